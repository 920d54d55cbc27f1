"""`python -m atlas.serve` with the scripted engine: `serve_scripted.py SCRIPT.json [FLAGS] MODEL`."""

import sys
from pathlib import Path

from atlas.serve.__main__ import main

ENGINE = Path(__file__).with_name("scripted_engine.py")

if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], engine_command=[sys.executable, str(ENGINE), sys.argv[1]]))

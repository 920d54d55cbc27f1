"""`python -m atlas COMMAND`: the same as the `atlas` command."""

import sys

from atlas.cli import main

sys.exit(main())

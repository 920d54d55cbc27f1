"""`python -m atlas.serve.reference docs/api.md`: the tables of a page written anew from the served OpenAPI document."""

import sys
from pathlib import Path

from atlas.serve.reference.openapi import document
from atlas.serve.reference.tables import with_tables
from atlas.serve.routes import ENDPOINTS

page = Path(sys.argv[1])
page.write_text(with_tables(page.read_text(), document(ENDPOINTS)))

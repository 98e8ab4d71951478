"""`python -m ropelens`: the same as the `ropelens` command."""

from ropelens.cli import app

app(prog_name="ropelens")

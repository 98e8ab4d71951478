"""The support table of docs/hosts.md, from the table of families that the tests go through.

Run `python tools/support.py` after a change in tests/hosts/families.py; tests/test_docs.py compares.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "hosts.md"
BEGIN, END = "<!-- from tests/hosts/families.py by tools/support.py -->", "<!-- end -->"
COLUMNS = {
    "hooked": "HookedTransformer 3.9",
    "bridge 3": "Bridge 3.9",
    "bridge 4": "Bridge 4.3",
    "transformers": "transformers",
}


def support_table() -> str:
    """Returns the table: a family a row, a host a column, with the reasons of refusals below it."""
    sys.path.insert(0, str(ROOT / "tests" / "hosts"))
    from families import FAMILIES

    lines = [
        f"| family | what bites | {' | '.join(COLUMNS.values())} |",
        f"| {' | '.join(['---'] * (2 + len(COLUMNS)))} |",
    ]
    for family in FAMILIES.values():
        cells = [reason(family.refused.get(host, "")) for host in COLUMNS]
        lines.append(f"| {family.title} | {family.special} | {' | '.join(cells)} |")
    return "\n".join(lines)


def reason(message: str) -> str:
    """Returns a refusal in a few words; the whole sentence is in the error."""
    if not message:
        return "yes"
    for part, words in (
        ("cannot be made from", "not converted"),
        ("has other", "refused: other " + message.partition("has other ")[2].partition(" than")[0]),
        ("never fires", "refused: hooks never fire"),
        ("differs from that of", "refused: the bridge is wrong"),
        ("do not turn", "refused: does not turn as RoPE"),
        ("rebuilt from queries and keys", "refused: scores not rebuilt"),
        ("outside transformers'", "refused: attention out of reach"),
    ):
        if part in message:
            return words
    raise ValueError(f"no short form for {message!r}")


def page_with_table(page: str) -> str:
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin
    assert end
    return f"{before}{BEGIN}\n\n{support_table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text()))

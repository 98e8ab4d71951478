"""`make mutations` can be run: every guard that it takes away is there, once, and so is the test it names."""

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_guards_and_their_tests_are_where_the_tool_looks_for_them():
    tool = runpy.run_path(str(ROOT / "tools" / "mutations.py"), run_name="mutations")
    tests = (ROOT / tool["TESTS"]).read_text()
    assert len({guard.name for guard in tool["GUARDS"]}) == len(tool["GUARDS"])
    for guard in tool["GUARDS"]:
        assert (ROOT / guard.file).read_text().count(guard.text) == 1, guard.name
        assert f"def {guard.test.partition('[')[0]}(" in tests, guard.name

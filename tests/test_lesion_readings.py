"""Readings of texts, against hand-labelled cases and definitions."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

import pytest

from ropelens.lesions import code
from ropelens.lesions.code import code_in, read_code
from ropelens.lesions.readings import (
    edit_distance,
    fidelity,
    first_divergence,
    loop_length,
    names_replaced,
    repeated_share,
    spread_of_errors,
    style,
    surprising_share,
    verdict,
)
from ropelens.lesions.tasks import Task, default_tasks, read_tasks


def by_definition(a: str, b: str) -> int:
    @cache
    def at(i: int, j: int) -> int:
        if not i or not j:
            return i or j
        return min(at(i - 1, j) + 1, at(i, j - 1) + 1, at(i - 1, j - 1) + (a[i - 1] != b[j - 1]))

    return at(len(a), len(b))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("kitten", "sitting"),
        ("", "abc"),
        ("abc", ""),
        ("", ""),
        ("abc", "abc"),
        ("abcdef", "azced"),
        ("aaab", "baaa"),
    ],
)
def test_edit_distance_is_levenshteins(a: str, b: str):
    assert edit_distance(a, b) == by_definition(a, b) == edit_distance(b, a)


def test_fidelity_counts_characters_of_the_longer_text():
    assert fidelity("a  b\nc", "a b c") == 1
    assert fidelity("abcd", "abxd") == 0.75
    assert fidelity("abcd", "") == 0
    assert fidelity("", "") == 1


def test_shares_of_tokens():
    assert surprising_share([0.1, 5.0, 5.1, 9.0]) == 0.5
    assert math.isnan(surprising_share([]))
    # 1 2 3 4 | 2 3 4 1 | 3 4 1 2 | 4 1 2 3 | 1 2 3 4: five runs of four, one of which was there before
    assert repeated_share([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert repeated_share([1, 2, 3]) == 0
    assert repeated_share([7] * 104) == 1 - 1 / 101
    assert loop_length([9, 1, 2, 1, 2, 1, 2]) == 2
    assert loop_length([9, 1, 2, 1, 2, 1, 3]) is None
    assert spread_of_errors([True, False, True, True]) == 0.5
    assert first_divergence([1, 2, 3], [1, 5, 3]) == 1
    assert first_divergence([1, 2], [1, 2, 3]) == 2
    assert first_divergence([1, 2], [1, 2]) is None


VERDICTS = [
    ("Yes, it makes sense.", "yes"),
    ("**Yes**, my previous output makes sense to me.", "yes"),
    ("No, it does not.", "no"),
    ("No. I repeated myself.", "no"),
    ("My previous output makes sense to me.", "yes"),
    ("I'm sorry, but my previous output doesn't make any sense.", "no"),
    ("It didn\u2019t make much sense, I am afraid.", "no"),
    ("The text is incoherent and I apologise for it.", "no"),
    ("That makes no sense at all.", "no"),
    ("I made a mistake in the second sentence.", "no"),
    ("The story is clear and it makes sense: Marta keeps bees.", "yes"),
    ("No one could know what the lighthouse keeper thought.", "unclear"),
    ("The previous output is not entirely accurate. The original text is incorrect.", "no"),
    ("The output was wrong: there are two boys.", "no"),
    ("The original text is indeed made sense to me.", "yes"),
    ("The cat sat on the mat, and that was right.", "unclear"),
    ("The cat sat on the mat.", "unclear"),
    ("", "unclear"),
    ("the the the the", "unclear"),
    ("Nobody said yes.", "unclear"),
]


@pytest.mark.parametrize(("answer", "expected"), VERDICTS)
def test_verdicts_are_those_of_a_reader(answer: str, expected: str):
    assert verdict(answer) == expected


TEMPLATE = "{} met {} in Rome. {} gave {} a map, and {} thanked {}. In {} it rained."
REFERENCE = TEMPLATE.format("Anna", "Ben", "Ben", "Anna", "Anna", "Ben", "Rome")
NAMES = ("Anna", "Ben", "Rome")
REPLACED = [
    (REFERENCE, "kept", 8, 0, math.nan),
    # one replacement a name, all the way
    (TEMPLATE.format("Clara", "Ben", "Ben", "Clara", "Clara", "Ben", "Rome"), "consistent", 5, 3, 1),
    (TEMPLATE.format("Clara", "Tom", "Tom", "Clara", "Clara", "Tom", "Rome"), "consistent", 2, 6, 1),
    # three replacements of one name; two and one
    (TEMPLATE.format("Clara", "Ben", "Ben", "Dora", "Eve", "Ben", "Rome"), "random", 5, 3, 1 / 3),
    (TEMPLATE.format("Clara", "Ben", "Ben", "Clara", "Eve", "Ben", "Rome"), "random", 5, 3, 2 / 3),
    # two people become one
    (TEMPLATE.format("Clara", "Clara", "Clara", "Clara", "Clara", "Clara", "Rome"), "random", 2, 6, 1),
    # replaced once only
    (TEMPLATE.format("Anna", "Ben", "Ben", "Anna", "Anna", "Ben", "Paris"), "lost", 7, 1, math.nan),
    # dropped
    ("It rained.", "lost", 0, 0, math.nan),
    ("", "lost", 0, 0, math.nan),
]


@pytest.mark.parametrize(("text", "said", "kept", "replaced", "consistency"), REPLACED)
def test_names_are_followed_as_a_reader_would(text, said, kept, replaced, consistency):
    found = names_replaced(REFERENCE, text, NAMES)
    assert (found["verdict"], found["kept"], found["replaced"]) == (said, kept, replaced)
    assert found["kept"] + found["replaced"] + found["dropped"] == 8
    assert found["consistency"] == pytest.approx(consistency, nan_ok=True)


def test_a_text_without_names_has_none():
    assert names_replaced("It rained.", "It snowed.", NAMES)["verdict"] == "none"


def test_style_counts_what_stands_there():
    prose = "# Title\n\n**Bold:**\nOne two three. Four five?\n\n- a\n- b\n2) c\n"
    text = prose + "```python\n# no header\n- x\n```\n"
    found = style(text)
    assert (found["headers"], found["list_items"]) == (2, 3)
    assert style("One two three. Four five?")["sentence_words"] == 2.5
    assert math.isnan(style("")["sentence_words"])


# Code -------------------------------------------------------------------------------------------------

RIGHT = "def f(x):\n    return 2 * x\n"
CHECK = "assert f(2) == 4"


def test_code_is_found():
    assert code_in(f"Here:\n```python\n{RIGHT}```\nIt doubles.") == RIGHT.strip("\n")
    assert code_in(f"Here:\n```\n{RIGHT}") == RIGHT.strip("\n")
    assert code_in(f"Sure!\n{RIGHT}") == RIGHT.strip("\n")
    assert code_in("I cannot do that.") == ""


CODES = [
    (RIGHT, True, True, ""),
    ("def f(x):\n    return 3 * x\n", True, False, "wrong"),
    ("def f(x):\n    return y\n", True, False, "exception"),
    ("def f(x)\n    return x\n", False, False, "parse"),
    ("Nothing here.", False, None, "no code"),
    ("def f(x):\n    while True: pass\n", True, False, "time"),
    ("def f(x):\n    return len('a' * 2**31)\n", True, False, "memory"),
    ("import os\ndef f(x):\n    os.system('true')\n    return 4\n", True, False, "exception"),
    ("import subprocess\ndef f(x):\n    subprocess.run(['true'])\n    return 4\n", True, False, "exception"),
    ("import socket\ndef f(x):\n    socket.socket()\n    return 4\n", True, False, "exception"),
    ("import os\ndef f(x):\n    os.fork()\n    return 4\n", True, False, "exception"),
    ("def f(x):\n    raise SystemExit(0)\n", True, False, "exception"),
]


@pytest.mark.parametrize(("code", "parses", "passes", "failure"), CODES)
def test_code_is_run_with_its_check(code: str, parses: bool, passes: bool | None, failure: str):
    found = read_code(code, CHECK)
    assert (found.parses, found.passes, found.failure) == (parses, passes, failure)


def test_code_writes_no_files(tmp_path: Path):
    path = tmp_path / "written"
    for write in (f"open({str(path)!r}, 'w')", f"__import__('os').open({str(path)!r}, 65)"):
        found = read_code(f"def f(x):\n    {write}\n    return 4\n", CHECK)
        assert (found.passes, found.failure) == (False, "exception")
        assert not path.exists()


def test_code_runs_where_memory_cannot_be_limited(monkeypatch: pytest.MonkeyPatch):
    without = """
import resource as limits
own = limits.setrlimit
def limit(kind, ends):
    if kind == limits.RLIMIT_AS:
        raise ValueError("current limit exceeds maximum limit")
    own(kind, ends)
limits.setrlimit = limit
"""
    monkeypatch.setattr(code, "_BEFORE", without + code._BEFORE)
    assert read_code("def one():\n    return 1", "assert one() == 1").passes


def test_nothing_runs_when_it_should_not():
    found = read_code("def f(x):\n    while True: pass\n", CHECK, run=False)
    assert (found.parses, found.passes, found.failure) == (True, None, "")


def test_recursion_is_a_function_that_calls_itself():
    assert read_code("def f(x):\n    return f(x - 1) if x else 0\n").recursive
    assert not read_code("def f(x):\n    return g(x)\ndef g(x):\n    return f\n").recursive


def test_a_solution_of_the_default_task_passes():
    task = next(task for task in default_tasks() if task.kind == "code")
    code = "def count_words(text):\n    return {w: text.split().count(w) for w in text.split()}"
    assert read_code(code, task.check).passes
    assert not read_code(code.replace(".split()", ""), task.check).passes


# Tasks ------------------------------------------------------------------------------------------------


def test_tasks_come_from_yaml_and_json(tmp_path: Path):
    given = [
        {"name": "a", "kind": "continuation", "prompt": "Go on:"},
        {"name": "b", "kind": "repetition", "prompt": "Repeat: x y", "reference": "x y", "names": ["x"]},
    ]
    expected = (Task("a", "continuation", "Go on:"), Task("b", "repetition", "Repeat: x y", "x y", ("x",)))
    (tmp_path / "t.json").write_text(json.dumps(given))
    (tmp_path / "t.yaml").write_text(
        "- {name: a, kind: continuation, prompt: 'Go on:'}\n"
        "- {name: b, kind: repetition, prompt: 'Repeat: x y', reference: x y, names: [x]}\n"
    )
    assert read_tasks(tmp_path / "t.json") == expected
    assert read_tasks(tmp_path / "t.yaml") == expected


BAD_TASKS = [
    ("{", "is no YAML or JSON"),
    ("a: b", "expected a list of tasks, each with name, kind and prompt"),
    ("[]", "expected a list of tasks"),
    ("- {name: a, kind: code}", "task 0 has no prompt"),
    ("- {name: a, kind: code, prompt: b, tests: c}", r"task 0 has unknown \['tests'\]"),
    ("- {name: a, kind: poem, prompt: b}", "expected a kind from repetition, continuation, code, got 'poem'"),
    ("- {name: a, kind: repetition, prompt: b}", "expected a reference"),
    ("- {name: a, kind: code, prompt: 3}", "task 0: expected texts"),
    ("- {name: a, kind: code, prompt: b}\n- {name: a, kind: code, prompt: b}", "names of their own"),
]


@pytest.mark.parametrize(("text", "message"), BAD_TASKS)
def test_bad_tasks_are_refused_in_a_sentence(tmp_path: Path, text: str, message: str):
    (tmp_path / "t.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_tasks(tmp_path / "t.yaml")

"""What can be read off a text without a reader."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Any, Literal

import numpy as np

SURPRISING = 5.0  # nats: a probability below 0.7%
N_GRAM = 4


def edit_distance(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Returns Levenshtein's distance: insertions, deletions and replacements from one to the other.

    Example:
        >>> edit_distance("kitten", "sitting")
        3
    """
    if not len(a) or not len(b):
        return len(a) or len(b)
    codes: dict[Any, int] = {}
    x, y = (np.array([codes.setdefault(item, len(codes)) for item in text]) for text in (a, b))
    steps = np.arange(len(y) + 1)
    row = steps.copy()
    for n, item in enumerate(x, start=1):
        # Deleted or replaced, then the cheapest run of insertions from any place before.
        best = np.minimum(row[1:] + 1, row[:-1] + (y != item))
        row = np.minimum.accumulate(np.concatenate([[n], best]) - steps) + steps
    return int(row[-1])


def fidelity(reference: str, text: str) -> float:
    """Returns how much of a reference a text repeats: 1 - edit distance / longer length, by characters.

    From 0 (nothing) to 1 (word for word); runs of white space count as one blank.
    """
    a, b = (" ".join(t.split()) for t in (reference, text))
    longer = max(len(a), len(b))
    return 1 - edit_distance(a, b) / longer if longer else 1.0


def surprising_share(losses: Sequence[float | int], limit: float | int = SURPRISING) -> float:
    """Returns the share of tokens that cost more than `limit` nats; NaN of no tokens."""
    return float(np.mean(np.asarray(losses) > limit)) if len(losses) else float("nan")


def repeated_share(tokens: Sequence[int], n: int = N_GRAM) -> float:
    """Returns the share of runs of n tokens that were there before; 0 of a text shorter than two runs."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if len(grams) > 1 else 0.0


Verdict = Literal["yes", "no", "unclear"]

_NO = (
    r"\b(?:does|did|do|is|was|are|were|could|would|can)(?: not|n't)\b[^.!?\n]{0,40}"
    r"\b(?:make|made|making)\b[^.!?\n]{0,20}\bsense\b",
    r"\b(?:makes?|made|making) (?:no|little|absolutely no) sense\b",
    r"\b(?:nonsens\w*|incoherent|gibberish|unintelligible|meaningless|illogical)\b",
    r"\bnot (?:entirely |quite |fully |completely |very )?"
    r"(?:accurate|coherent|correct|clear|right|understandable|logical)\b",
    r"\b(?:output|text|answer|response|code|it|this|that) (?:is|was) "
    r"(?:incorrect|inaccurate|wrong|unclear)\b",
    r"\bi (?:made|have made) (?:a |several |some |many )?(?:mistakes?|errors?)\b",
)
_YES = (
    r"\b(?:it|this|that|output|text|story|answer|response|code|which) "
    r"(?:does |did |all |certainly |clearly )?(?:make|makes|made) (?:perfect |complete |good )?sense\b",
    r"\b(?:makes?|made) sense to me\b",
    r"\bis (?:accurate|coherent|correct|clear|right|understandable|logical)\b",
)


def verdict(answer: str) -> Verdict:
    """Returns whether an answer to "Does it make sense to you?" is a yes or a no.

    Its first word decides where that is yes or no; else the first phrase that says so. Anything else, an
    answer about something else too, is "unclear".
    """
    text = answer.strip().lower().replace("\u2019", "'")
    opening = re.match(r"[\W_]*(yes|yeah|yep|no|nope)\b(?!\s+(?:one|matter|problem|doubt|worries)\b)", text)
    if opening:
        return "yes" if opening.group(1).startswith("y") else "no"
    found = [
        (match.start(), -len(match.group()), kind)
        for kind, patterns in (("no", _NO), ("yes", _YES))
        for pattern in patterns
        for match in re.finditer(pattern, text)
    ]
    if not found:
        return "unclear"
    return "no" if min(found)[2] == "no" else "yes"


NameVerdict = Literal["kept", "consistent", "random", "lost", "none"]


def names_replaced(reference: str, text: str, names: Iterable[str]) -> dict[str, Any]:
    """How the names of a reference fare in a text that should repeat it.

    The two are aligned word by word; a name is kept, replaced by the words that stand in its place, or
    dropped. Of the replaced ones, `consistency` is the share that took their name's commonest replacement,
    over names that were replaced twice or more; NaN if none was.

    Returns:
        `kept`, `replaced`, `dropped` (counts of occurrences), `consistency`, and `verdict`: "kept" (no
        name replaced or dropped), "consistent" (each name that was replaced twice or more has one
        replacement, never shared with another name), "random" (some do not), "lost" (dropped or replaced,
        but none replaced twice), "none" (the reference has no such names).
    """
    a, b = _words(reference), _words(text)
    names = list(names)
    given: dict[str, Counter[str]] = {name: Counter() for name in names}
    kept = dropped = 0
    for tag, i1, i2, j1, j2 in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        for at in (i for i in range(i1, i2) if a[i] in given):
            if tag == "equal":
                kept += 1
            elif tag == "replace" and (new := _in_place(b[j1:j2], at - i1, i2 - i1)):
                given[a[at]][new] += 1
            else:
                dropped += 1
    counted = {name: found for name, found in given.items() if found}
    several = [found for found in counted.values() if found.total() > 1]
    replaced = sum(found.total() for found in counted.values())
    total = sum(found.total() for found in several)
    share = sum(found.most_common(1)[0][1] for found in several) / total if total else float("nan")
    main = [found.most_common(1)[0][0] for found in several]
    if not any(word in given for word in a):
        said: NameVerdict = "none"
    elif not replaced and not dropped:
        said = "kept"
    elif not several:
        said = "lost"
    else:
        said = "consistent" if share == 1 and len(set(main)) == len(main) else "random"
    counts = {"kept": kept, "replaced": replaced, "dropped": dropped}
    return {**counts, "consistency": share, "verdict": said}


def _words(text: str) -> list[str]:
    return re.findall(r"\w+(?:['\u2019-]\w+)*", re.sub(r"['\u2019]s\b", "", text))


def _in_place(words: list[str], at: int, n: int) -> str:
    """What stands where the name stood, of words in place of `n` others: a capitalised word is preferred."""
    if not n <= 2 * len(words) <= 4 * n:
        return ""  # a passage that is gone, or another one altogether
    place = round(at * len(words) / n)
    near = sorted(range(len(words)), key=lambda i: (abs(i - place), i))
    capital = [i for i in near if words[i][0].isupper() and abs(i - place) <= 2]
    chosen = capital[0] if capital else near[0]
    return words[chosen]


def style(text: str) -> dict[str, float | int]:
    """Returns `headers`, `list_items` (counts of lines) and `sentence_words` (mean words a sentence)."""
    prose = re.sub(r"```.*?(?:```|\Z)", " ", text, flags=re.DOTALL)
    lines = prose.splitlines()
    headers = sum(bool(re.match(r"\s{0,3}(?:#{1,6}\s+\S|\*\*[^*]+\*\*:?\s*$)", line)) for line in lines)
    items = sum(bool(re.match(r"\s*(?:[-*+•]|\d{1,3}[.)])\s+\S", line)) for line in lines)
    sentences = [s for s in re.split(r"(?<=[.!?])\s+|\n{2,}", prose) if re.search(r"\w", s)]
    words = [len(re.findall(r"\w+", sentence)) for sentence in sentences]
    mean = float(np.mean(words)) if words else float("nan")
    return {"headers": headers, "list_items": items, "sentence_words": mean}


def first_divergence(tokens: Sequence[int], healthy: Sequence[int]) -> int | None:
    """Returns the first position at which two texts differ; None if they are the same."""
    for at, (a, b) in enumerate(zip(tokens, healthy, strict=False)):
        if a != b:
            return at
    return None if len(tokens) == len(healthy) else min(len(tokens), len(healthy))


def spread_of_errors(flags: Sequence[bool]) -> float:
    """Returns how evenly marked tokens lie over a text: the fewer of its two halves' over the more.

    1: as many in either half; 0: all in one; NaN without any.
    """
    middle = len(flags) // 2
    halves = [sum(flags[:middle]), sum(flags[middle:])]
    return min(halves) / max(halves) if max(halves) else float("nan")


def loop_length(tokens: Sequence[int], longest: int = 64) -> int | None:
    """Returns the length of the run that a text ends with three times over; None if there is none."""
    for n in range(1, min(longest, len(tokens) // 3) + 1):
        tail = [list(tokens[len(tokens) - (i + 1) * n : len(tokens) - i * n]) for i in range(3)]
        if all(a == b for a, b in pairwise(tail)):
            return n
    return None

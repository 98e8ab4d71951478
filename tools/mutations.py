"""Take guards against known wrong answers away and see tests fail: `python tools/mutations.py [WORD ...]`.

One row of `GUARDS` is a guard of ropelens, by the text that stands for it and what is put in its place, and
a test of tests/hosts/test_wrong_answers.py. Each is tried alone, in a copy of the tree. With words, only
guards whose name has one of them are tried.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TESTS = "tests/hosts/test_wrong_answers.py"
HOSTS, METRICS, KERNELS = "src/ropelens/hosts", "src/ropelens/metrics", "kernels/ropelens_kernels"


class Guard(NamedTuple):
    """What is guarded, by the rows of the design's table, and how the guard is taken away."""

    name: str
    file: str
    text: str
    instead: str
    test: str


GUARDS = [
    Guard(
        "pair layouts",
        f"{HOSTS}/certify.py",
        "    if not error <= tolerance:\n",
        "    if False:\n",
        "test_pair_layouts_are_not_confused[llama]",
    ),
    Guard(
        "frequencies as used",
        f"{HOSTS}/rotary.py",
        "    angle, width = torch.atan2(sin, cos).cpu(), cos.shape[-1]\n",
        "    width = cos.shape[-1]\n"
        "    angle = (10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)).repeat(2)\n",
        "test_scalings_are_not_ignored[yarn]",
    ),
    Guard(
        "amplitude",
        f"{HOSTS}/rotary.py",
        "    amplitude = float(torch.hypot(sin.double(), cos.double()).mean())\n",
        "    amplitude = 1.0\n",
        "test_scalings_are_not_ignored[yarn]",
    ),
    Guard(
        "partial rotary",
        f"{HOSTS}/rotary.py",
        "pair_dims(2 * len(ladder), adjacent), amplitude)",
        "pair_dims(d_head, adjacent)[: len(ladder)], amplitude)",
        "test_partial_rotary_pairs_the_rotated_dims_only",
    ),
    Guard(
        "key heads, rebuilt scores",
        f"{HOSTS}/certify.py",
        '    k = repeat(k, "batch key kv d -> batch key (kv group) d"',
        '    k = repeat(k, "batch key kv d -> batch key (group kv) d"',
        "test_key_heads_are_repeated_and_not_tiled",
    ),
    Guard(
        "key heads, entropy",
        f"{KERNELS}/reference/entropy.py",
        "        part, k = slice(first_head, first_head + group), inputs.k[row, first_head // group]\n",
        "        part = slice(first_head // group, None, heads // group)\n"
        "        k = inputs.k[row, first_head // group]\n",
        "test_key_heads_are_repeated_and_not_tiled",
    ),
    Guard(
        "key heads, attribution",
        "src/ropelens/measure.py",
        "        kv_head = head // (q.shape[2] // k.shape[2])\n",
        "        kv_head = head % k.shape[2]\n",
        "test_key_heads_are_repeated_and_not_tiled",
    ),
    Guard(
        "future keys, seen",
        f"{KERNELS}/checks.py",
        "        seen = i <= p\n",
        "        seen = i <= p + 1\n",
        "test_future_keys_have_no_effect_and_are_not_averaged_in",
    ),
    Guard(
        "future keys, counted",
        f"{KERNELS}/checks.py",
        "        return (seen - before)[:, self.offset :] * self.counted\n",
        "        return (seen[:, -1:] - before)[:, self.offset :] * self.counted\n",
        "test_future_keys_have_no_effect_and_are_not_averaged_in",
    ),
    Guard(
        "pads",
        f"{METRICS}/accumulate.py",
        "                mask=mask,\n",
        "                mask=torch.ones_like(mask),\n",
        "test_pads_are_not_in_the_statistics[5-right]",
    ),
    Guard(
        "scale, transformers",
        f"{HOSTS}/plain.py",
        "    return float(d_head**-0.5 if scale is None else scale)\n",
        "    return d_head**-0.5\n",
        "test_the_scale_is_read_and_not_assumed[transformers]",
    ),
    Guard(
        "scale, bridge",
        f"{HOSTS}/bridge.py",
        "            scale=float(scale),\n",
        "            scale=self.model.cfg.d_head**-0.5,\n",
        "test_the_scale_is_read_and_not_assumed[bridge]",
    ),
    Guard(
        "window, off by one in the mask",
        f"{HOSTS}/masks.py",
        "(distance < window)",
        "(distance <= window)",
        "test_the_window_is_not_off_by_one",
    ),
    Guard(
        "window, off by one in the kernel",
        f"{KERNELS}/checks.py",
        "            seen &= p - i < self.window\n",
        "            seen &= p - i <= self.window\n",
        "test_the_window_is_not_off_by_one",
    ),
    Guard(
        "window, invisible keys counted",
        f"{KERNELS}/checks.py",
        "            before[:, self.window :] = seen[:, : -self.window]\n",
        "            pass\n",
        "test_the_window_is_not_off_by_one",
    ),
    Guard(
        "softcap",
        f"{HOSTS}/layer.py",
        '            "softcap": self.softcap,\n',
        '            "softcap": None,\n',
        "test_the_softcap_is_in_the_path",
    ),
    Guard(
        "sinks",
        f"{HOSTS}/layer.py",
        '            "sinks": self.sinks,\n',
        '            "sinks": None,\n',
        "test_a_learned_sink_is_one_more_outcome",
    ),
    Guard(
        "float64 sums",
        f"{METRICS}/accumulate.py",
        "            values=sums.values + found.values.sum(0),\n",
        "            values=(sums.values.float() + found.values.sum(0).float()).double(),\n",
        "test_running_sums_do_not_stall",
    ),
    Guard(
        "value of masked scores",
        f"{KERNELS}/reference/path.py",
        "HIDDEN = -1e30",
        "HIDDEN = -1e4",
        "test_masks_are_not_beaten_by_large_scores",
    ),
    Guard(
        "hooks left behind, transformers",
        f"{HOSTS}/taps.py",
        "        attention.taps.remove(tap)\n",
        "        return\n",
        "test_no_hooks_are_left_behind_after_an_error[transformers]",
    ),
    Guard(
        "hooks left behind, bridge",
        f"{HOSTS}/lens.py",
        "                handle.hook.remove()\n                point.fwd_hooks.remove(handle)\n",
        "                pass\n",
        "test_no_hooks_are_left_behind_after_an_error[bridge]",
    ),
]


def main() -> None:
    words = sys.argv[1:] or [""]
    guards = [guard for guard in GUARDS if any(word in guard.name for word in words)]
    if not guards:
        sys.exit(f"mutations: expected one of {', '.join(guard.name for guard in GUARDS)}, got {words}")
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_of_the_tree(Path(folder))
        tests = sorted({guard.test for guard in guards})
        if not passed(run(tree, tests)):
            sys.exit("mutations: expected tests that pass while all guards are there: run `make test` first")
        survived = [guard.name for guard in guards if not caught(tree, guard)]
    if survived:
        sys.exit(f"mutations: these went unnoticed: {'; '.join(survived)}")
    print(f"all {len(guards)} are noticed")


def copy_of_the_tree(folder: Path) -> Path:
    """Copies what the tests need, so that the tree itself is never touched."""
    for name in ("src", "kernels", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def caught(tree: Path, guard: Guard) -> bool:
    """Takes one guard away, runs its test, and puts the guard back."""
    path = tree / guard.file
    whole = path.read_text()
    if whole.count(guard.text) != 1:
        sys.exit(f"mutations: {guard.name}: expected its text once in {guard.file}: correct GUARDS")
    path.write_text(whole.replace(guard.text, guard.instead))
    said = run(tree, [guard.test])
    path.write_text(whole)
    noticed = said.splitlines()[-1].startswith("1 failed")  # and no error while the test was collected
    why = next((line[2:].strip() for line in said.splitlines() if line.startswith("E  ")), "")
    print(f"{'noticed ' if noticed else 'SURVIVES'}  {guard.name}: {why[:110]}", flush=True)
    return noticed


def run(tree: Path, tests: list[str]) -> str:
    """Returns what pytest says of some tests, with the tree's own ropelens."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(str(tree / name) for name in ("src", "kernels"))}
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--durations=0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(f"{TESTS}::{test}" for test in tests)], cwd=tree, env=env, capture_output=True, text=True
    )
    return done.stdout.strip() or done.stderr.strip() or "nothing"


def passed(said: str) -> bool:
    return bool(re.match(r"\d+ passed\b[^,]*$", said.splitlines()[-1]))


if __name__ == "__main__":
    main()

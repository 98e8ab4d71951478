"""Whether code that a model wrote parses, and does what it should."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass

SECONDS = 4  # of the clock; of the processor, half
MEMORY = 512 * 2**20

# Runs in the subprocess before the code: limits, and a hook that refuses what functions on data never do.
_BEFORE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({cpu}, {cpu}))
try:
    resource.setrlimit(resource.RLIMIT_AS, ({memory}, {memory}))
except (ValueError, OSError):  # macOS has no such limit
    pass
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
import collections, functools, itertools, math, re, string
kinds = ("socket", "subprocess", "os", "shutil", "ctypes", "pty", "signal", "tempfile", "glob", "webbrowser",
         "ftplib", "urllib", "http", "smtplib", "_thread", "mmap", "fcntl", "resource", "syslog", "sqlite3",
         "cpython", "gc")
def refuse(event, args, _refused=kinds, _allowed=("os.listdir", "os.scandir")):
    if event == "open" and (not isinstance(args[1], str) or set(args[1]) & set("wax+")):
        raise PermissionError("refused: " + event)
    if event.split(".")[0] in _refused and event not in _allowed:
        raise PermissionError("refused: " + event)
sys.addaudithook(refuse)
del refuse, resource
"""
_RUN = """
import sys
code, check = sys.stdin.read().split("\\0")
space = {"__name__": "__main__"}
try:
    exec(compile(code, "code", "exec"), space)
    exec(compile(check, "check", "exec"), space)
except AssertionError:
    sys.exit(3)
except BaseException as error:
    sys.exit(5 if isinstance(error, MemoryError) else 4)
"""


@dataclass(frozen=True)
class CodeReading:
    """What came of code.

    Attributes:
        found: Whether there was any.
        parses: Whether Python reads it.
        passes: Whether its check ran through; None if it was not run.
        failure: "" or the first of: "no code", "parse", "exception", "wrong" (an assertion of the check),
            "time", "memory".
        recursive: Whether a function calls itself.
    """

    found: bool
    parses: bool
    passes: bool | None
    failure: str
    recursive: bool


def code_in(text: str) -> str:
    """Returns the Python in a text: its first fenced block, else all from the first `def` or `import` on."""
    fenced = re.search(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", text, flags=re.DOTALL | re.IGNORECASE)
    if fenced:
        return fenced.group(1).strip("\n")
    start = re.search(r"^(?:def|import|from|class)\s", text, flags=re.MULTILINE)
    return text[start.start() :].strip("\n") if start else ""


def read_code(text: str, check: str = "", run: bool = True) -> CodeReading:
    """Returns what comes of the code in a text.

    The code runs in another Python, isolated (`-I -S`), with no environment, an empty folder, limits on
    time, memory and file size, and a hook that refuses files for writing, processes and sockets. That stops
    accidents, not attackers: it is no sandbox.

    Args:
        text: What a model wrote.
        check: Python to run after it, which raises where it is wrong.
        run: Whether to run anything.
    """
    code = code_in(text)
    if not code:
        return CodeReading(False, False, None, "no code", False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a model writes may well warn
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return CodeReading(True, False, False if check and run else None, "parse", False)
    recursive = is_recursive(tree)
    if not check or not run:
        return CodeReading(True, True, None, "", recursive)
    failure = _failure(code.replace("\0", ""), check)
    return CodeReading(True, True, failure == "", failure, recursive)


def is_recursive(tree: ast.AST) -> bool:
    """Whether a function in it calls itself by name."""
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return any(
        isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == function.name
        for function in functions
        for call in ast.walk(function)
    )


def _failure(code: str, check: str) -> str:
    before = _BEFORE.format(cpu=max(1, SECONDS // 2), memory=MEMORY)
    with tempfile.TemporaryDirectory(prefix="rl-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-c", before + _RUN],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
            text=True,
        )
        try:
            process.communicate(f"{code}\0{check}", timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return "time"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
    codes = {0: "", 3: "wrong", 5: "memory", -9: "time", -24: "time"}
    return codes.get(process.returncode, "exception")

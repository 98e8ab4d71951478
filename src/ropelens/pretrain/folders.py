"""Folders that are whole or not there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def replace_folder(target: Path, write: Callable[[str], Any]) -> None:
    """Has a folder written beside its place, and puts it there once it is complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent)
    try:
        write(unfinished)
        if target.exists():
            shutil.rmtree(target)
        os.replace(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)

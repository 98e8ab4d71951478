"""What users can mend, said in one sentence."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from typing import Any

import typer


class UsageError(ValueError):
    """A value that an option does not take, whatever model and data are."""


@contextmanager
def one_sentence() -> Iterator[None]:
    """Turns what users can mend into one sentence on standard error and an exit status."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = partial(_show, warnings.showwarning)
            yield
    except (ValueError, OSError, ImportError) as error:
        typer.echo(f"ropelens: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2 if isinstance(error, UsageError) else 1) from error
    except KeyboardInterrupt as error:
        typer.echo(f"ropelens: {str(error) or 'interrupted'}", err=True)
        raise typer.Exit(130) from error


@contextmanager
def only_json(as_json: bool) -> Iterator[None]:
    """With --json, sends what is printed meanwhile to standard error, so that standard output is JSON."""
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        yield


def _show(otherwise: Callable[..., None], message: Any, category: type[Warning], *where: Any) -> None:
    """Prints a warning of ours without the line of code that it comes from."""
    if category is UserWarning:
        typer.echo(f"ropelens: warning: {' '.join(str(message).split())}", err=True)
    else:
        otherwise(message, category, *where)

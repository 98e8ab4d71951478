"""What users can mend, said in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def one_sentence() -> Iterator[None]:
    """Turns what users can mend into one sentence on standard error and an exit status."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        typer.echo(f"ropelens: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as error:
        typer.echo(f"ropelens: {str(error) or 'interrupted'}", err=True)
        raise typer.Exit(130) from error

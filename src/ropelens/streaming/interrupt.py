"""Stopping a run between two windows rather than in the middle of one."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tqdm.auto import tqdm


class Interruption:
    """Whether somebody asked the run to stop."""

    asked = False

    def ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        tqdm.write("stopping after this window; once more to stop now", file=sys.stderr)


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Lets the first Ctrl-C (or SIGTERM) ask for the end, and a second one interrupt at once.

    Only the main thread hears signals; elsewhere nothing changes.
    """
    interruption = Interruption()
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {
            number: signal.signal(number, interruption.ask) for number in (signal.SIGINT, signal.SIGTERM)
        }
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

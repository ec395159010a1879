"""What the data plane says to its operator, on a stderr that may be gone."""

from __future__ import annotations

import contextlib
import sys
import traceback


def say(sentence: str) -> None:
    """One line; whoever read them may have died, which is no reason to end."""
    with contextlib.suppress(OSError, ValueError):
        print(f"weefs: {sentence}", file=sys.stderr, flush=True)


def say_traceback() -> None:
    """Of the exception that is being handled: a bug of ours."""
    with contextlib.suppress(OSError, ValueError):
        traceback.print_exc()

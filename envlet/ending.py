"""The signals that end the daemon, between two daemons in one process: after node.restart one leaves, and another program starts in its
place, which takes a moment to listen to signals. One that comes meanwhile must not kill the process, whose environments would then be
nobody's, nor be forgotten.

While a daemon runs, trio receives them. Below that lies `LateSignals`, which notes what comes when trio does not receive any more. Before
the next program starts they are blocked, which it inherits, and what was noted is raised again, to wait until it unblocks them.
"""

import signal
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class LateSignals:
    """Notes signals from `begin` on. Main thread only."""

    def __init__(self) -> None:
        self._noted: int | None = None

    def begin(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = number

    def end(self) -> None:
        """The daemon has ended: they do again what they do to any program."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def hand_on(self) -> None:
        """What was noted, and what comes from now on, is for the next program."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        if self._noted is not None:
            signal.raise_signal(self._noted)


def take_over() -> None:
    """Somebody listens now: lets come what a daemon before handed on."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

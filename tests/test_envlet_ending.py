"""Signals that end the daemon and come as it leaves its environments to the next one."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from envlet import ending
from envlet.daemon import _cancel_on_signal


@pytest.fixture
def late() -> Iterator[ending.LateSignals]:
    late = ending.LateSignals()
    late.begin()
    yield late
    for number in ending.SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # which takes what is pending
    late.end()
    ending.take_over()


@pytest.mark.parametrize("number", ending.SIGNALS)
def test_a_signal_that_comes_as_the_daemon_leaves_is_for_the_next_one(late: ending.LateSignals, number: signal.Signals) -> None:
    """The task that waits for signals wakes up with it, and finds that it was told to end in the same moment."""

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(_cancel_on_signal, nursery.cancel_scope)
            await trio.testing.wait_all_tasks_blocked()
            signal.raise_signal(number)  # trio's handler is in the same queue as what follows, and wakes the task
            trio.lowlevel.current_trio_token().run_sync_soon(nursery.cancel_scope.cancel, idempotent=True)
            await trio.sleep_forever()

    trio.run(main)
    late.hand_on()
    assert signal.sigpending() == {number}


@pytest.mark.parametrize("number", ending.SIGNALS)
def test_a_signal_ends_a_daemon_that_does_not_leave_and_no_other(late: ending.LateSignals, number: signal.Signals) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(_cancel_on_signal, nursery.cancel_scope)
            signal.raise_signal(number)
            await trio.sleep_forever()

    trio.run(main)
    late.hand_on()
    assert signal.sigpending() == set()

"""What this node thinks of a peer: whether to ask it, and how long an answer of it takes. Pure: times are given.

      3 failures in a row, or 8 lost races              the pause is over: one is let through
 UP ----------------------------------> DOWN (pause) <------------------------------> trying
  ^                                                    it fails: a longer pause          |
  +------------------------------------------------------------ it answers to the end ---+

 any state -- bytes without their digest --> LEFT OUT, for an hour
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from typing import Literal

import attrs

FAILURES = 3
LOST_RACES = 8
"""A peer that never answers before it is given up for another one fails nothing by itself."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 60.0
LEFT_OUT_S = 3600.0
TRIAL_S = 10.0
"""After which a trial of which nothing was heard is over."""
SHORTEST_HEDGE_S = 0.02
ANSWERS_KEPT = 128

State = Literal["up", "down", "left_out"]


def quantile_s(times_s: Iterable[float], share: float) -> float | None:
    """The smallest time within which that share of them came; None: there are none."""
    ordered = sorted(times_s)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


@attrs.define
class PeerHealth:
    """Of one peer. Bytes; times in seconds of a monotonic clock."""

    received_bytes: int = 0
    sent_bytes: int = 0
    lies: int = 0
    _failures: int = 0
    _lost: int = 0
    _pauses: int = 0
    _until_s: float = 0.0
    _trying: bool = False
    _tried_s: float = 0.0
    _left_out_until_s: float = 0.0
    _answers_s: deque[float] = attrs.field(factory=lambda: deque(maxlen=ANSWERS_KEPT))

    def state(self, now_s: float) -> State:
        if now_s < self._left_out_until_s:
            return "left_out"
        return "down" if self._pauses else "up"

    def may_ask(self, now_s: float) -> bool:
        """Whether to ask it now. Of one that is down, when its pause is over: once, until that has ended."""
        if now_s < self._left_out_until_s:
            return False
        if not self._pauses:
            return True
        if now_s < (self._tried_s + TRIAL_S if self._trying else self._until_s):
            return False
        self._trying, self._tried_s = True, now_s
        return True

    def answered(self, took_s: float) -> None:
        """Its first byte came, after so long. Whether the last one does is another question: finished(), failed() or gave_up()."""
        self._answers_s.append(took_s)
        self._lost = 0

    def finished(self) -> None:
        """A whole answer came; whatever it said, the peer is well."""
        self._failures = self._lost = self._pauses = 0
        self._trying = False

    def failed(self, now_s: float) -> None:
        self._failures += 1
        if self._trying or self._failures >= FAILURES:
            self._pause(now_s)

    def lost(self, now_s: float) -> None:
        """Another one answered before it said anything."""
        self._lost += 1
        if self._trying or self._lost >= LOST_RACES:
            self._pause(now_s)

    def gave_up(self) -> None:
        """It was not asked to the end, which says nothing of it."""
        self._trying = False

    def lied(self, now_s: float) -> None:
        self.lies += 1
        self._left_out_until_s = now_s + LEFT_OUT_S

    def _pause(self, now_s: float) -> None:
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._pauses, 16))
        self._until_s = now_s + pause_s * random.uniform(0.5, 1.0)
        self._pauses += 1
        self._failures = self._lost = 0
        self._trying = False

    def rtt_s(self, share: float) -> float | None:
        """Time to the first byte that this share of its recent answers took at most."""
        return quantile_s(self._answers_s, share)


@attrs.define
class Answers:
    """Of all peers, the recent ones: how long to wait for one before another is asked as well."""

    _times_s: deque[float] = attrs.field(factory=lambda: deque(maxlen=ANSWERS_KEPT))

    def add(self, took_s: float) -> None:
        self._times_s.append(took_s)

    @property
    def hedge_s(self) -> float:
        return max(SHORTEST_HEDGE_S, quantile_s(self._times_s, 0.95) or 0.0)

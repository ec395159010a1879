"""Who was sent what lately, so that one node need not send it to all: a pure decision, apart from the sending.

A chunk is sent to a few nodes; whoever asks afterwards is referred to those who have it by now, and they do the same: a tree grows by the
order of arrival. What is remembered is short-lived and bounded, and only a hint: a node that was referred to in vain asks elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict

import attrs

from weefs.placement import GROUP_CHUNKS, turned

CHILDREN = 4
"""Nodes that one node sends a chunk to before it refers others to them."""
MEMORY_S = 10.0
"""Of a crowd: who comes later than this after the last one is none."""
MAX_GROUPS = 4096
NAMED = 4
"""Holders in one answer, at most."""


@attrs.frozen
class Admission:
    """`send`: now. Else ask `holders`; when there are none yet, they are still being sent to."""

    send: bool
    holders: tuple[str, ...] = ()


@attrs.define
class _Sent:
    """Bits of chunks of the group."""

    complete: int = 0
    under_way: int = 0


@attrs.define
class _Group:
    last_s: float
    nodes: dict[str, _Sent] = attrs.field(factory=dict)


def bits_of(chunks: range, group: int) -> int:
    """Those of the chunks that are in a group."""
    bits = 0
    for chunk in chunks:
        if chunk // GROUP_CHUNKS == group:
            bits |= 1 << chunk % GROUP_CHUNKS
    return bits


class Crowd:
    """Of the node `name`: from each, an asker is sent on in another direction. Times are of any monotonic clock, seconds."""

    def __init__(self, name: str = "", children: int = CHILDREN, memory_s: float = MEMORY_S, max_groups: int = MAX_GROUPS) -> None:
        self._name = name
        self._children = children
        self._memory_s = memory_s
        self._max_groups = max_groups
        self._groups: OrderedDict[tuple[str, int], _Group] = OrderedDict()

    def __len__(self) -> int:
        return len(self._groups)

    def admit(self, layer: str, group: int, bits: int, asker: str, now_s: float) -> Admission:
        """May it have these chunks from here? When it may, sent() or failed() must follow."""
        known = self._group(layer, group, now_s)
        before = known.nodes.get(asker)
        served = [name for name, sent in known.nodes.items() if (sent.complete | sent.under_way) & bits and name != asker]
        was_served = before is not None and (before.complete | before.under_way) & bits
        if was_served or len(served) < self._children:
            sent = known.nodes.setdefault(asker, _Sent())
            sent.under_way |= bits
            return Admission(send=True)
        if not any((known.nodes[name].complete | known.nodes[name].under_way) & bits == bits for name in served):
            # Each has a part, and nobody will have all of it: there is nobody to be referred to.
            known.nodes.setdefault(asker, _Sent()).under_way |= bits
            return Admission(send=True)
        holders = [name for name in served if known.nodes[name].complete & bits == bits]
        return Admission(send=False, holders=tuple(turned(holders, asker, f"{self._name} {layer} {group}")[:NAMED]))

    def sent(self, layer: str, group: int, bits: int, asker: str, now_s: float) -> None:
        """All bytes went out: it has them, or will in a moment."""
        known = self._group(layer, group, now_s)
        record = known.nodes.setdefault(asker, _Sent())
        record.under_way &= ~bits
        record.complete |= bits

    def failed(self, layer: str, group: int, bits: int, asker: str, now_s: float) -> None:
        """It did not get them."""
        known = self._group(layer, group, now_s)
        if record := known.nodes.get(asker):
            record.under_way &= ~bits
            if not record.under_way | record.complete:
                del known.nodes[asker]

    def _group(self, layer: str, group: int, now_s: float) -> _Group:
        key = (layer, group)
        known = self._groups.get(key)
        if known is None or known.last_s < now_s - self._memory_s:
            known = self._groups[key] = _Group(now_s)
            while len(self._groups) > self._max_groups:
                self._groups.popitem(last=False)
        known.last_s = now_s
        self._groups.move_to_end(key)
        return known

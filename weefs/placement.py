"""Which nodes are responsible for a chunk: a pure function of names, the same on every node.

Rendezvous hashing: for each group of chunks, members are ranked by a hash of their name with it, and the first few are its owners. No
weights and no state: when a member leaves, its groups go to the next in their ranks and nothing else moves.

Rejected: a hash ring (uneven without many virtual nodes); one owner (it dies, and everybody asks the registry for its chunks).

Ranks also say who may wait for whom: always for one ranked before oneself. Since a rank depends on no list of members, that is an order on
all nodes, and so nodes cannot wait in a circle, whatever lists they have.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

GROUP_CHUNKS = 16
OWNERS = 3
TOC_GROUP = -1
"""Stands for a layer's TOC, which has owners of its own. Who wants chunks may wait for their TOC, but never the other way round."""


def group_of(chunk: int) -> int:
    """The group that a chunk of a layer is in."""
    return chunk // GROUP_CHUNKS


def _rank_key(layer: str, group: int) -> Callable[[str], tuple[bytes, str]]:
    """Of a member: the greater, the earlier in rank."""
    head = f"{layer}\0{group}\0".encode()
    return lambda member: (blake2b(head + member.encode(), digest_size=16).digest(), member)


def owners(members: Iterable[str], layer: str, group: int, n: int = OWNERS) -> list[str]:
    """The owners of a group, the first in rank first: `n`, or all if there are fewer. `layer`: its digest. Costs a hash for each member, so
    who asks often should remember.
    """
    return heapq.nlargest(n, frozenset(members), key=_rank_key(layer, group))


def before(one: str, other: str, layer: str, group: int) -> bool:
    """Whether `one` ranks before `other`, which may therefore wait for it."""
    key = _rank_key(layer, group)
    return key(one) > key(other)


def turned(choices: Sequence[str], name: str, what: str) -> list[str]:
    """The same, from another beginning for each name: so that many who choose among them share them."""
    if not choices:
        return []
    begin = int.from_bytes(blake2b(f"{what}\0{name}".encode(), digest_size=8).digest(), "big") % len(choices)
    return [*choices[begin:], *choices[:begin]]


def behind(name: str, ranked: Sequence[str]) -> list[str]:
    """Owners that rank behind an owner. It must not wait for them, but may ask for what they have: it may have come later, or lost it."""
    return [*ranked[ranked.index(name) + 1 :]] if name in ranked else []


def places_to_ask(name: str, ranked: Sequence[str], layer: str, group: int) -> list[str]:
    """Whom a node asks for chunks of a group with the owners `ranked`, in this order, before the registry. An owner: those before it, the
    first in rank first. Anybody else: all owners, in an order of its own.
    """
    if name in ranked:
        return [*ranked[: ranked.index(name)]]
    return turned(ranked, name, f"{layer} {group}")

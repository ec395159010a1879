"""One error out of a group: trio wraps what leaves a nursery, and a client wants to hear the error itself."""

import trio

from envlet.errors import EnvletError


def first_error(group: BaseExceptionGroup[BaseException]) -> EnvletError | None:
    """The first error of ours in a group that has nothing but such errors and cancellations; else None."""
    ours, rest = group.split(EnvletError)
    if ours is None or (rest is not None and rest.split(trio.Cancelled)[1] is not None):
        return None
    leaf: BaseException = ours
    while isinstance(leaf, BaseExceptionGroup):
        leaf = leaf.exceptions[0]
    return leaf if isinstance(leaf, EnvletError) else None

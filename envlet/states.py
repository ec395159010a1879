"""The one table of an environment's states. Whatever changes a state asks it.

    creating ──► ready ──► deleting ──► deleted
        │          │           ▲
        └──────────┴─► failure ┘      failure: faulted, oom, lost, killed, expired, error, each with its cause

A failure ends all processes. The root stays for `env.diff`, until the environment is deleted or its time is over;
only `expired` removes everything at once. `deleting` falls back to `error` when something could not be removed, so
that it can be tried again.
"""

from envlet.types import State

FAILURES: frozenset[State] = frozenset(("faulted", "oom", "lost", "killed", "expired", "error"))
TRANSITIONS: dict[State, frozenset[State]] = {
    "creating": FAILURES | {"ready", "deleting"},
    "ready": FAILURES | {"deleting"},
    **dict.fromkeys(FAILURES, frozenset[State](("deleting",))),
    "deleting": frozenset(("deleted", "error")),
    "deleted": frozenset(),
}


def check_transition(before: State, after: State) -> None:
    """Raises ValueError for a step that the table does not have: a defect of the caller."""
    if after not in TRANSITIONS[before]:
        raise ValueError(f"an environment cannot go from {before} to {after}")

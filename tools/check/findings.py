"""A finding: something about a plan that its packager should know, and what to do about it."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from attrs import frozen


class Severity(enum.Enum):
    """ERROR: environments do not start, or a task gives its answer away. WARNING: something will not behave as it looks.
    NOTE: worth knowing, and often right."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@frozen
class Finding:
    """`code` names the kind, once and for all; `path` is in the merged view, from the root without a leading slash.

    what    the one thing found: a sentence without the path
    remedy  what to do; the same for all findings of a code
    """

    severity: Severity
    code: str
    path: bytes
    what: str
    remedy: str
    details: tuple[str, ...] = ()
    """Lines, bounded: the commits of a branch, the objects that nothing reaches."""


def count(findings: Iterable[Finding], severity: Severity) -> int:
    return sum(finding.severity is severity for finding in findings)

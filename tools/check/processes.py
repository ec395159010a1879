"""Whether environments can start their processes as a plan's groups say: the user, and where commands begin.

| code | severity | is |
|---|---|---|
| user | error | names that /etc/passwd or /etc/group of the plan do not have, or no USER[:GROUP]: environments do not start |
| workdir | error, warning | something on the way is no directory: environments do not start; a warning when it is no absolute path |

Looked at when the plan is complete, for a group that lies below may have what is missing.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence

from envlet.errors import EnvletError
from envlet.users import resolve_user
from registry import GroupConfig
from tools.check.findings import Finding, Severity
from tools.check.git_repositories import small_file
from weefs.merge import File, View

_NAMED = "name one that is there, or a number, with --user; or add it to the files"
_ABSOLUTE = "give the path of a directory, or of nothing: environments make what is missing"


def check_processes(view: View, configs: Sequence[GroupConfig]) -> Iterator[Finding]:
    """`configs`: of the plan's groups, base first. FormatError, RegistryError and its kinds."""
    user = next((config.user for config in reversed(configs) if config.user), None)
    workdir = next((config.workdir for config in reversed(configs) if config.workdir), None)
    if user is not None:
        yield from _user(view, user)
    if workdir is not None:
        yield from _workdir(view, workdir)


def _user(view: View, user: str) -> Iterator[Finding]:
    passwd, group = (small_file(view, view.lookup(path)).decode("utf-8", "replace") for path in (b"etc/passwd", b"etc/group"))
    try:
        resolve_user(user, passwd, group)
    except EnvletError as error:
        path = b"etc/group" if "/etc/group" in error.message else b"etc/passwd"
        yield Finding(Severity.ERROR, "user", path, f"does not fit the user {user!r} of the plan: {error.message}", _NAMED)


def _workdir(view: View, workdir: str) -> Iterator[Finding]:
    path = workdir.encode("utf-8", "surrogateescape")
    if not workdir.startswith("/"):
        what = f"is where commands begin, for the working directory is {workdir!r}, which is no absolute path"
        yield Finding(Severity.WARNING, "workdir", path, what, _ABSOLUTE)
    walked = b""
    for part in path.split(b"/"):
        walked = posixpath.join(walked, part)
        if isinstance(view.lookup(walked), File):
            what = f"is no directory, and the working directory of the plan is {workdir!r}"
            yield Finding(Severity.ERROR, "workdir", walked.lstrip(b"/"), what, _ABSOLUTE)
            return

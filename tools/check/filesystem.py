"""What can be seen in the merged view of a plan, from metadata alone.

Findings are about what the checked group brings: of the groups below it, only what the group breaks in them.

| code | severity | is |
|---|---|---|
| link-to-nothing | error | a hard link to a file that no layer below has: nodes refuse the plan |
| below-dangling-symlink | error | entries below a symlink of a lower layer that leads to no directory: nodes refuse the plan |
| mount-point | error | /proc, /sys or /dev is no directory: environments do not start |
| whiteout-of-nothing | warning | a deletion of what nothing below has |
| opaque-over-nothing | warning | a directory that replaces one which nothing below has |
| type-changed | warning | a directory in the place of something else, or the other way round |
| symlink-leaves-root | warning | more .. than directories above: outside an environment it leads out |
| symlink-dangles | warning, note | leads nowhere; a note when it is relative |
| symlink-broken | warning | a lower group's symlink that led somewhere without this group |
| hidden-by-mount | warning | a file below /dev, /proc or /sys, which every environment mounts over |
| device | warning, note | a device that environments may not open; a note when they may |
| shared-directory | warning | /tmp or /run is no directory, or users cannot share /tmp |
| name-resolution | warning, note | /etc/hosts or /etc/resolv.conf is something else than a file |
| world-writable | warning | anybody may change it, or replace what is in it |
| setuid, setgid, capability | note | an exec does not honour it, for environments have no_new_privs |

The first two of the warnings are notes while it is unknown what lies below.
"""

from __future__ import annotations

import contextlib
import stat
import sys
from collections.abc import Iterator

from layerformat import Layer, printable
from tools.check.findings import Finding, Severity
from tools.check.opening import Plan
from weefs.merge import OPAQUE, Directory, File, PlanRefused, View

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE

MOUNT_POINTS = (b"proc", b"sys", b"dev")
_FILLED_LATER = (*MOUNT_POINTS, b"run", b"tmp", b"var/run", b"var/tmp", b"var/lock")
"""Where a target need not be there yet."""
_OWN_DEVICES = {(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 2)}
"""null, zero, full, random, urandom, tty, ptmx: an OCI runtime lets every container use them."""
_DEEPEST = 10_000
"""Frames for a tree of 2,048 levels, which a path of 4,095 bytes can have."""

_BELOW = "give the groups that it goes on with --below, base first; if they are given, publish it again from a diff against them"


def check_filesystem(plan: Plan, *, complete: bool) -> tuple[View, list[Finding]]:
    """The merged view, and what is wrong in it. `complete`: nothing else will lie below what is there."""
    with deep_trees():
        checks = _LayerChecks(plan, complete=complete)
        view = View(plan.layers, refused=checks.refused, before=checks.before)
        below = View(plan.layers[: plan.below], refused=_ignore) if plan.below else None
    findings = [*checks.findings(), *_ViewChecks(plan, view, below).findings()]
    return view, findings


@contextlib.contextmanager
def deep_trees() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, _DEEPEST))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def _ignore(refusal: PlanRefused) -> None:
    """It is reported for the whole plan."""


class _LayerChecks:
    """What a layer says of those below it: looked at before it is applied to them."""

    def __init__(self, plan: Plan, *, complete: bool) -> None:
        self._plan = plan
        self._severity = WARNING if complete else NOTE
        self._complete = complete
        self._findings: list[Finding] = []
        self._refusals: list[PlanRefused] = []

    def before(self, view: View, index: int) -> None:
        if index >= self._plan.below:
            self._look_below(self._plan.layers[index], view)

    def refused(self, refusal: PlanRefused) -> None:
        self._refusals.append(refusal)

    def findings(self) -> list[Finding]:
        if self._plan.below == 0:
            self._look_below(self._plan.layers[0], None)
        return [*map(self._refusal, self._refusals), *self._findings]

    def _look_below(self, layer: Layer, view: View | None) -> None:
        for path, number in layer.walk():
            if number is None:
                parent, _, name = path.rpartition(b"/")
                directory = view.lookup(parent) if view else None
                if not isinstance(directory, Directory) or name not in directory.children:
                    self._report("whiteout-of-nothing", path, "deletes what nothing below has")
            elif layer.inode(number).flags & OPAQUE and not isinstance(view.lookup(path) if view else None, Directory):
                self._report("opaque-over-nothing", path, "replaces a directory that nothing below has")

    def _report(self, code: str, path: bytes, what: str) -> None:
        self._findings.append(Finding(self._severity, code, path, what, _BELOW))

    def _refusal(self, refusal: PlanRefused) -> Finding:
        layer = self._plan.layers[refusal.layer]
        path = next(path for path, number in layer.walk() if number == refusal.number)
        if layer.inode(refusal.number).is_lower_link:
            severity = ERROR if self._complete else NOTE
            target = printable(layer.toc.target(refusal.number))
            return Finding(severity, "link-to-nothing", path, f"is another name of /{target}, which no layer below has as a file", _BELOW)
        what = "has entries, and is a symlink that leads to no directory below"
        return Finding(ERROR, "below-dangling-symlink", path, what, _BELOW)


class _ViewChecks:
    """What the plan looks like in the end."""

    def __init__(self, plan: Plan, view: View, below: View | None) -> None:
        self._plan = plan
        self._view = view
        self._below = below

    def findings(self) -> Iterator[Finding]:
        yield from self._places()
        for path, node in self._view.walk():
            if node.layer < self._plan.below:
                continue
            yield from self._type_change(path, node)
            mode = node.inode.mode
            if path.partition(b"/")[0] in MOUNT_POINTS and b"/" in path and isinstance(node, File):
                what = "is never seen: every environment mounts over it"
                yield Finding(WARNING, "hidden-by-mount", path, what, "leave it out of the group")
            elif stat.S_ISLNK(mode) and isinstance(node, File):
                yield from self._symlink(path, node)
            else:
                yield from _permissions(path, node)
                yield from self._privileges(path, node)
        yield from self._broken_symlinks()

    # Places that an environment needs

    def _places(self) -> Iterator[Finding]:
        for name in MOUNT_POINTS:
            if (node := self._own(name)) is not None and not isinstance(node, Directory):
                what = f"is {_kind(node)}; environments mount there and do not start"
                yield Finding(ERROR, "mount-point", name, what, "make it an empty directory, or leave it out")
        for name in (b"tmp", b"run"):
            node = self._own(name)
            if isinstance(node, File):
                yield Finding(WARNING, "shared-directory", name, f"is {_kind(node)}", "make it a directory")
            elif node is not None and name == b"tmp" and node.inode.mode & 0o1777 != 0o1777:
                what = f"has mode {node.inode.mode & 0o7777:04o}: not every user can write there, or may remove what others wrote"
                yield Finding(WARNING, "shared-directory", name, what, "chmod 1777")
        yield from self._name_resolution()

    def _name_resolution(self) -> Iterator[Finding]:
        hosts, resolv = self._own(b"etc/hosts"), self._own(b"etc/resolv.conf")
        if hosts is not None and not stat.S_ISREG(hosts.inode.mode):
            what = f"is {_kind(hosts)}: envlet adds localhost only where a file is missing or empty"
            yield Finding(WARNING, "name-resolution", b"etc/hosts", what, "make it a file, or leave it out")
        if resolv is not None and not stat.S_ISREG(resolv.inode.mode):
            severity = NOTE if resolv.inode.is_symlink else WARNING
            what = f"is {_kind(resolv)}; environments have no network but the loopback, and nothing puts a file there"
            yield Finding(severity, "name-resolution", b"etc/resolv.conf", what, "make it a file if a program insists on one")

    def _own(self, path: bytes) -> File | Directory | None:
        node = self._view.lookup(path, follow=False)
        return node if node is not None and node.layer >= self._plan.below else None

    # Symlinks

    def _symlink(self, path: bytes, link: File) -> Iterator[Finding]:
        target = self._view.target(link)
        parent = path.rpartition(b"/")[0]
        shown = printable(target)
        if _climbs_out(parent, target):
            what = f"leads to {shown}, above the root"
            yield Finding(WARNING, "symlink-leaves-root", path, what, "a path from the root, or with fewer .., says what is meant")
        if not self._leads_somewhere(self._view, path, link) and not _is_filled_later(parent, target):
            severity = WARNING if target.startswith(b"/") else NOTE
            remedy = "package what it leads to, give the group that has it with --below, or leave the symlink out"
            yield Finding(severity, "symlink-dangles", path, f"leads to {shown}, which is not there", remedy)

    def _leads_somewhere(self, view: View, path: bytes, link: File) -> bool:
        parent = view.lookup(path.rpartition(b"/")[0], follow=False)
        return isinstance(parent, Directory) and view.lookup(view.target(link), at=parent) is not None

    def _broken_symlinks(self) -> Iterator[Finding]:
        if self._below is None:
            return
        for path, link in self._below.walk():
            if not isinstance(link, File) or not link.inode.is_symlink or not self._leads_somewhere(self._below, path, link):
                continue
            now = self._view.lookup(path, follow=False)
            same = isinstance(now, File) and (now.layer, now.number) == (link.layer, link.number)
            if same and not self._leads_somewhere(self._view, path, link):
                what = f"of a group below leads to {printable(self._below.target(link))}, which this group removes"
                yield Finding(WARNING, "symlink-broken", path, what, "keep what it leads to, or replace the symlink too")

    # Types, permissions, privileges

    def _type_change(self, path: bytes, node: File | Directory) -> Iterator[Finding]:
        before = self._below.lookup(path, follow=False) if self._below else None
        if before is None or isinstance(before, Directory) == isinstance(node, Directory):
            return
        what = f"is {_kind(node)} in the place of {_kind(before)}"
        if isinstance(before, Directory):
            what += f", whose {len(before.children)} entries are hidden"
        elif before.inode.is_symlink:
            what += f" to {printable(self._below.target(before)) if self._below else ''}, whose entries are not seen here any more"
        remedy = "keep the type; a symlink such as /lib -> usr/lib is kept by packaging below the directory that it leads to"
        yield Finding(WARNING, "type-changed", path, what, remedy)

    def _privileges(self, path: bytes, node: File | Directory) -> Iterator[Finding]:
        mode, rdev = node.inode.mode, node.inode.rdev
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            numbers = (rdev >> 8 & 0xFFF, rdev & 0xFF | rdev >> 12 & 0xFFF00)
            usable = stat.S_ISCHR(mode) and numbers in _OWN_DEVICES
            what = f"is {_kind(node)} {numbers[0]}:{numbers[1]}" + ("" if usable else ", which environments may not open")
            yield Finding(NOTE if usable else WARNING, "device", path, what, "leave it out; /dev of an environment has the usual ones")
        if not stat.S_ISREG(mode):
            return
        remedy = "nothing, unless a command needs it: then run that command as root"
        for bit, code in ((stat.S_ISUID, "setuid"), (stat.S_ISGID, "setgid")):
            if mode & bit:
                yield Finding(NOTE, code, path, f"is {code} {node.inode.uid}:{node.inode.gid}, which has no effect in environments", remedy)
        if b"security.capability" in self._view.layers[node.layer].toc.xattrs(node.number):
            yield Finding(NOTE, "capability", path, "has file capabilities, which have no effect in environments", remedy)


def _permissions(path: bytes, node: File | Directory) -> Iterator[Finding]:
    mode = node.inode.mode
    if not mode & stat.S_IWOTH:
        return
    if isinstance(node, Directory) and not mode & stat.S_ISVTX:
        what = f"has mode {mode & 0o7777:04o}: any user can replace what is in it"
        yield Finding(WARNING, "world-writable", path, what, "chmod o-w, or add the sticky bit")
    elif stat.S_ISREG(mode):
        yield Finding(WARNING, "world-writable", path, f"has mode {mode & 0o7777:04o}: any user can change it", "chmod o-w")


_KINDS = {
    stat.S_IFDIR: "a directory", stat.S_IFREG: "a file", stat.S_IFLNK: "a symlink", stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device", stat.S_IFIFO: "a fifo", stat.S_IFSOCK: "a socket", 0: "a link to nothing",
}  # fmt: skip


def _kind(node: File | Directory) -> str:
    return _KINDS[stat.S_IFMT(node.inode.mode)]


def _parts(path: bytes) -> list[bytes]:
    return [part for part in path.split(b"/") if part not in (b"", b".")]


def _climbs_out(parent: bytes, target: bytes) -> bool:
    """By the names alone: whether a target has more `..` than directories above it."""
    depth = 0 if target.startswith(b"/") else len(_parts(parent))
    for part in _parts(target):
        depth += -1 if part == b".." else 1
        if depth < 0:
            return True
    return False


def _is_filled_later(parent: bytes, target: bytes) -> bool:
    """Whether a target lies where something is put when an environment runs."""
    place: list[bytes] = [] if target.startswith(b"/") else _parts(parent)
    for part in _parts(target):
        if part != b"..":
            place.append(part)
        elif place:
            place.pop()
    path = b"/".join(place) + b"/"
    return any(path.startswith(name + b"/") for name in _FILLED_LATER)

"""The repair of what makes `git status` read a whole work tree: two settings, and an index that fits the packed files.

Of a directory before it is packed (`repair_tree`, `repair_index`), in place; of a plan that is published, as one small
layer with the files that change (`repair_layer`). Owner, mode and extended attributes of both files stay, and the time
of `config`; the index gets a time that no entry has.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from attrs import frozen

from layerformat import Entry, Kind, encode, printable
from tools.check.git_index import IndexDamaged
from tools.check.git_repositories import (
    Config,
    GitFailed,
    Repository,
    child_path,
    indexes_without_worktree,
    parse_config,
    read_file,
    run_git,
    stray_gitfiles,
)
from tools.check.git_worktree import SETTINGS, DirectoryTree, Refreshed, ViewTree, WorkTree, open_index, refresh_index
from tools.check.opening import Plan
from tools.exits import CommandError
from weefs.merge import Directory, File, View

Progress = Callable[[int, int], None]
"""Called with the files read and the number of all of them."""


class RepairRefused(CommandError):
    """A repository that is left as it is: which, and why."""


@frozen
class Repair:
    """What was done for one work tree.

    changed    whether anything had to be
    clean      index entries that `git status` need not read any more
    different  paths whose contents are not those of their object: git goes on reading them
    missing    index entries without a file of their type
    """

    worktree: bytes
    changed: bool
    clean: int
    different: tuple[bytes, ...]
    missing: int


def has_settings(config: Config) -> bool:
    """Whether git is told to compare only what survives packing."""
    return all((config.last(key.lower()) or "").lower() == value for key, value in SETTINGS)


def with_settings(config: bytes) -> bytes:
    """A configuration file with both settings, otherwise as it was. GitFailed."""
    with tempfile.TemporaryDirectory(prefix="weenv-git-") as scratch:
        home = Path(scratch)
        (home / "config").write_bytes(config)
        for key, value in SETTINGS:
            arguments = ("config", "--file", str(home / "config"), "--replace-all", key, value)
            result = run_git(arguments, git_directory=home / "none", home=home)
            if result.returncode:
                raise GitFailed(f"git config: {os.fsdecode(result.stderr).strip()}")
        return (home / "config").read_bytes()


# A directory


@frozen
class TreeRepair:
    """What was done below a directory.

    refused  sentences about work trees that cannot be repaired, and are as they were
    skipped  these, and sentences about those that are not looked at, for their repository is elsewhere
    """

    repairs: tuple[Repair, ...]
    refused: tuple[str, ...]
    skipped: tuple[str, ...]


def repair_tree(root: Path, *, progress: Progress | None = None) -> TreeRepair:
    """Repairs the work trees below a directory, itself included, whose `.git` is a directory: all are looked at before the
    first is changed, and one that cannot be repaired keeps no other from it.
    """
    edits: list[_Edit] = []
    repairs: list[Repair] = []
    refused: list[str] = []
    elsewhere: list[str] = []
    for worktree in _find_worktrees(root):
        if not stat.S_ISDIR((worktree / ".git").lstat().st_mode):
            elsewhere.append(f"{worktree / '.git'}: its repository is elsewhere, and is not looked at before it is packed")
            continue
        with _noting_refusal(worktree, refused):
            edits.append(_plan_edit(worktree, progress))
    for edit in edits:
        with _noting_refusal(edit.worktree, refused):
            edit.apply()
            repairs.append(edit.repair)
    return TreeRepair(tuple(repairs), tuple(refused), (*refused, *elsewhere))


@contextlib.contextmanager
def _noting_refusal(worktree: Path, refused: list[str]) -> Iterator[None]:
    try:
        yield
    except RepairRefused as error:
        refused.append(str(error))
    except OSError as error:
        refused.append(f"{error.filename or worktree}: {error.strerror}")


def _find_worktrees(root: Path) -> Iterator[Path]:
    """Directories with a `.git`: one with an index in it, or something else than a directory."""
    for directory, names, files in os.walk(os.fsencode(root)):
        if b".git" not in names and b".git" not in files:
            continue
        names[:] = [name for name in names if name != b".git"]
        git_directory = os.path.join(directory, b".git")
        is_own = stat.S_ISDIR(os.lstat(git_directory).st_mode)
        if not is_own or os.path.lexists(os.path.join(git_directory, b"index")):
            yield Path(os.fsdecode(directory))


def repair_index(worktree: Path, *, progress: Progress | None = None) -> Repair:
    """Repairs one work tree in place: `.git/config` and `.git/index` are replaced, both or none, under git's own locks.

    The tree may be a stranger's: no symlink is followed, and nothing that it configures is run. RepairRefused when it
    cannot be repaired; OSError.
    """
    edit = _plan_edit(worktree, progress)
    edit.apply()
    return edit.repair


@frozen
class _NewFile:
    """What a file is to become. `mtime_ns` None: its time stays."""

    path: Path
    before: bytes
    data: bytes
    mtime_ns: int | None


@frozen
class _Edit:
    """A repair that is worked out and not done yet."""

    worktree: Path
    files: tuple[_NewFile, ...]
    repair: Repair

    def apply(self) -> None:
        """Replaces the files when all of them are written. RepairRefused, OSError."""
        git_directory = self.worktree / ".git"
        before = git_directory.stat()
        with contextlib.ExitStack() as stack:
            locks = [stack.enter_context(_locked(file)) for file in self.files]
            for file, lock in zip(self.files, locks, strict=True):
                lock.replace(file.path)
        if self.files:
            os.utime(git_directory, ns=(before.st_atime_ns, before.st_mtime_ns))


def _plan_edit(worktree: Path, progress: Progress | None) -> _Edit:
    git_directory = worktree / ".git"
    config_path, index_path = git_directory / "config", git_directory / "index"
    for path, is_kind in ((git_directory, stat.S_ISDIR), (config_path, stat.S_ISREG), (index_path, stat.S_ISREG)):
        if not is_kind(path.lstat().st_mode):
            kind = "directory" if is_kind is stat.S_ISDIR else "file"
            raise RepairRefused(f"{path}: expected a {kind} of the repository itself, received something else")
    config, index, mtime_ns = config_path.read_bytes(), index_path.read_bytes(), index_path.stat().st_mtime_ns
    tree = DirectoryTree(os.fsencode(worktree))
    new_config, refreshed = _repaired(str(worktree), config, index, mtime_ns, tree, progress)
    files = []
    if new_config != config:
        files.append(_NewFile(config_path, config, new_config, None))
    if (refreshed.data, refreshed.mtime_ns) != (index, mtime_ns):
        files.append(_NewFile(index_path, index, refreshed.data, refreshed.mtime_ns))
    return _Edit(worktree, tuple(files), _repair(os.fsencode(worktree), bool(files), refreshed))


@contextlib.contextmanager
def _locked(file: _NewFile) -> Iterator[Path]:
    """The lock that git takes to write a file, with the new contents under the owner, mode and attributes of the old; gone
    afterwards, unless it was renamed. RepairRefused when it is taken, or the file is not what was looked at.
    """
    lock = file.path.with_name(f"{file.path.name}.lock")
    try:
        target = lock.open("xb")
    except FileExistsError:
        raise RepairRefused(f"{lock}: a git command is at work there, or was killed; when none is, remove it") from None
    try:
        with target:
            target.write(file.data)
        before = file.path.lstat()
        if not stat.S_ISREG(before.st_mode) or file.path.read_bytes() != file.before:
            raise RepairRefused(f"{file.path}: expected what was there a moment ago, it has changed")
        os.chown(lock, before.st_uid, before.st_gid)
        shutil.copystat(file.path, lock, follow_symlinks=False)
        if file.mtime_ns is not None:
            os.utime(lock, ns=(file.mtime_ns, file.mtime_ns))
        yield lock
    finally:
        lock.unlink(missing_ok=True)


# A plan


@frozen
class RepairLayer:
    """`data`: a layer file with what changes; None when nothing does. `skipped`: sentences about what was left."""

    data: bytes | None
    repairs: tuple[Repair, ...]
    skipped: tuple[str, ...]


def repair_layer(plan: Plan, view: View, repositories: Sequence[Repository], *, progress: Progress | None = None) -> RepairLayer:
    """What repairs the work trees that a group brings: their files are read once. FormatError, RegistryError and its
    kinds, OSError.
    """
    entries: list[tuple[Entry, io.BytesIO]] = []
    repairs: list[Repair] = []
    skipped: list[str] = []
    for repository in repositories:
        for worktree in repository.worktrees:
            try:
                changed, repair = _repair_worktree(plan, view, repository, worktree.path, worktree.git_directory, progress)
            except RepairRefused as error:
                skipped.append(str(error))
                continue
            known = {entry.path for entry, _ in entries}
            entries += [(entry, data) for entry, data in changed if entry.path not in known]
            repairs.append(repair)
        skipped += [f"/{printable(path)}: no work tree of the plan leads to it" for path in indexes_without_worktree(view, repository)]
    skipped += [f"/{printable(path)}: leads to no repository of the plan" for path, _ in stray_gitfiles(view, repositories)]
    if not entries:
        return RepairLayer(None, tuple(repairs), tuple(skipped))
    layer = io.BytesIO()
    encode(sorted(entries, key=lambda pair: pair[0].path), layer)
    return RepairLayer(layer.getvalue(), tuple(repairs), tuple(skipped))


def _repair_worktree(
    plan: Plan, view: View, repository: Repository, worktree: bytes, git_directory: bytes, progress: Progress | None
) -> tuple[list[tuple[Entry, io.BytesIO]], Repair]:
    name = "/" + os.fsdecode(worktree)
    top = view.lookup(worktree, follow=False)
    config_path, index_path = repository.inside(b"config"), child_path(git_directory, b"index")
    config, index = _own_file(view, config_path, name), _own_file(view, index_path, name)
    if not isinstance(top, Directory) or index.layer < plan.below:
        raise RepairRefused(f"{name}: it is of a group below; repair that one")
    old_config, old_index, mtime_ns = read_file(view, config), read_file(view, index), index.inode.total_mtime_ns
    new_config, refreshed = _repaired(name, old_config, old_index, mtime_ns, ViewTree(plan, view, top), progress)
    changed = []
    if new_config != old_config:
        changed.append(_entry(view, config_path, config, new_config, config.inode.total_mtime_ns))
    if (refreshed.data, refreshed.mtime_ns) != (old_index, mtime_ns):
        changed.append(_entry(view, index_path, index, refreshed.data, refreshed.mtime_ns))
    return changed, _repair(worktree, bool(changed), refreshed)


def _own_file(view: View, path: bytes, name: str) -> File:
    node = view.lookup(path, follow=False)
    if not isinstance(node, File) or not node.inode.is_regular:
        raise RepairRefused(f"{name}: expected the file /{os.fsdecode(path)}, received {'something else' if node else 'none'}")
    return node


def _entry(view: View, path: bytes, file: File, data: bytes, mtime_ns: int) -> tuple[Entry, io.BytesIO]:
    inode = file.inode
    entry = Entry(
        path=path,
        kind=Kind.REGULAR,
        mode=stat.S_IMODE(inode.mode),
        uid=inode.uid,
        gid=inode.gid,
        mtime_ns=mtime_ns,
        size=len(data),
        xattrs=view.layers[file.layer].toc.xattrs(file.number),
    )
    return entry, io.BytesIO(data)


# Both


def _repaired(
    name: str, config: bytes, index: bytes, index_mtime_ns: int, tree: WorkTree, progress: Progress | None
) -> tuple[bytes, Refreshed]:
    try:
        parsed = parse_config(config)
        checked = open_index(index, parsed.hash_name)
        new_config = config if has_settings(parsed) else with_settings(config)
    except (GitFailed, IndexDamaged, ValueError) as error:
        raise RepairRefused(f"{name}: {error}") from None
    return new_config, refresh_index(checked, index_mtime_ns, parsed.hash_name, tree, progress=progress)


def _repair(worktree: bytes, changed: bool, refreshed: Refreshed) -> Repair:
    return Repair(worktree, changed, refreshed.clean, refreshed.different, refreshed.missing)

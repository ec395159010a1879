"""The repair of what makes `git status` read a whole work tree: two settings, and an index that fits the packed files.

Of a directory before it is packed (`repair_tree`, `repair_index`), in place; of a plan that is published, as one small
layer with the files that change (`repair_layer`). Owner, mode and extended attributes of both files stay, and the time
of `config`; the index gets a time that no entry has.
"""

from __future__ import annotations

import io
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from attrs import frozen

from layerformat import Entry, Kind, encode
from tools.check.git_index import IndexDamaged
from tools.check.git_repositories import Config, GitFailed, Repository, child_path, parse_config, read_file, run_git
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


def repair_tree(root: Path, *, progress: Progress | None = None) -> list[Repair]:
    """Repairs every work tree below a directory whose `.git` is a directory. RepairRefused, GitFailed, OSError."""
    return [repair_index(worktree, progress=progress) for worktree in find_worktrees(root)]


def find_worktrees(root: Path) -> Iterator[Path]:
    """Directories below `root`, itself included, that have a `.git` directory with an index."""
    for directory, names, _ in os.walk(os.fsencode(root)):
        if b".git" in names:
            names.remove(b".git")
            git_directory = os.path.join(directory, b".git")
            if not os.path.islink(git_directory) and os.path.lexists(os.path.join(git_directory, b"index")):
                yield Path(os.fsdecode(directory))


def repair_index(worktree: Path, *, progress: Progress | None = None) -> Repair:
    """Repairs one work tree in place: `.git/config` and `.git/index` are replaced, each whole or not at all.

    The tree may be a stranger's: no symlink is followed, and nothing that it configures is run. RepairRefused when the
    index cannot be repaired; GitFailed when git cannot read the configuration; OSError.
    """
    git_directory = worktree / ".git"
    for path, is_kind in ((git_directory, stat.S_ISDIR), (git_directory / "config", stat.S_ISREG), (git_directory / "index", stat.S_ISREG)):
        if not is_kind(path.lstat().st_mode):
            kind = "directory" if is_kind is stat.S_ISDIR else "file"
            raise RepairRefused(f"{path}: expected a {kind} of the repository itself, received something else")
    before = git_directory.stat()
    config, index = (git_directory / "config").read_bytes(), (git_directory / "index").read_bytes()
    mtime_ns = (git_directory / "index").stat().st_mtime_ns
    tree = DirectoryTree(os.fsencode(worktree))
    new_config, refreshed = _repaired(str(worktree), config, index, mtime_ns, tree, progress)
    if new_config != config:
        _replace(git_directory / "config", new_config, None)
    if (refreshed.data, refreshed.mtime_ns) != (index, mtime_ns):
        _replace(git_directory / "index", refreshed.data, refreshed.mtime_ns)
    os.utime(git_directory, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = (new_config, refreshed.data, refreshed.mtime_ns) != (config, index, mtime_ns)
    return _repair(os.fsencode(worktree), changed, refreshed)


def _replace(path: Path, data: bytes, mtime_ns: int | None) -> None:
    """New contents under the owner, mode and attributes of the old; and its time, unless another is given."""
    before = path.lstat()
    unfinished = path.with_name(f"{path.name}.weenv-{secrets.token_hex(8)}")
    try:
        with unfinished.open("xb") as file:
            file.write(data)
        os.chown(unfinished, before.st_uid, before.st_gid)
        shutil.copystat(path, unfinished, follow_symlinks=False)
        if mtime_ns is not None:
            os.utime(unfinished, ns=(mtime_ns, mtime_ns))
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


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
            except (RepairRefused, GitFailed) as error:
                skipped.append(str(error))
                continue
            known = {entry.path for entry, _ in entries}
            entries += [(entry, data) for entry, data in changed if entry.path not in known]
            repairs.append(repair)
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
    parsed = parse_config(config)
    try:
        checked = open_index(index, parsed.hash_name)
    except (IndexDamaged, ValueError) as error:
        raise RepairRefused(f"{name}: {error}") from None
    new_config = config if has_settings(parsed) else with_settings(config)
    return new_config, refresh_index(checked, index_mtime_ns, parsed.hash_name, tree, progress=progress)


def _repair(worktree: bytes, changed: bool, refreshed: Refreshed) -> Repair:
    return Repair(worktree, changed, refreshed.clean, refreshed.different, refreshed.missing)

"""What is wrong with the git repositories of a plan: what gives a task's answer away, and what makes git slow.

| code | severity | is |
|---|---|---|
| git-status-reads | warning | `git status` reads files that did not change, because packing changed their stat data |
| git-index | warning | an index that is damaged, or of a kind that is not looked into |
| git-gitfile | warning | a `.git` file that leads to no repository of the plan |
| git-no-worktree | note | an index whose work tree is not known: it is not judged, and not repaired |
| git-unreadable | error | a repository that could not be looked into: nothing is known about it |

The others are in `git_leaks.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from layerformat import printable
from tools.check.findings import Finding, Severity
from tools.check.git_index import GitIndex, IndexDamaged
from tools.check.git_leaks import find_leaks
from tools.check.git_repositories import (
    Config,
    GitFailed,
    Repository,
    Worktree,
    child_path,
    git_directories,
    open_sandbox,
    parse_config,
    read_file,
    small_file,
    stray_gitfiles,
)
from tools.check.git_worktree import SETTINGS, ViewTree, open_index, status_cost
from tools.check.opening import Plan
from weefs.merge import Directory, File, View

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE
_FIX = "--fix publishes the group with a repaired index; for a directory, repair it before it is packed"
_NO_WORKTREE = "let the .git file of the work tree lead to it by a path of the plan (gitdir: /PATH, or a relative one); else leave it out"


def check_git(plan: Plan, view: View, repositories: Sequence[Repository]) -> Iterator[Finding]:
    """Of every repository. FormatError, RegistryError and its kinds, OSError."""
    for repository in repositories:
        try:
            yield from _check_repository(plan, view, repository)
        except GitFailed as error:
            yield Finding(ERROR, "git-unreadable", repository.path, f"cannot be looked into: {error}", "repair it, or leave it out")
    yield from _stray(view, repositories)


def _check_repository(plan: Plan, view: View, repository: Repository) -> Iterator[Finding]:
    children = repository.directory.children
    config = parse_config(small_file(view, children.get(b"config")))
    if config.last("extensions.refstorage") not in (None, "files") or b"reftable" in children:
        raise GitFailed("its refs are in a reftable, which is not read here")
    indexes: dict[bytes, GitIndex] = {}
    for git_directory, directory in git_directories(view, repository).items():
        file = directory.children.get(b"index")
        if not isinstance(file, File) or not file.inode.is_regular:
            continue
        path = child_path(git_directory, b"index")
        try:
            indexes[git_directory] = open_index(read_file(view, file), config.hash_name)
        except (IndexDamaged, ValueError) as error:
            yield Finding(WARNING, "git-index", path, f"is not looked into: {error}", "git reset makes a new one")
            continue
        worktrees = [worktree for worktree in repository.worktrees if worktree.git_directory == git_directory]
        for worktree in worktrees:
            yield from _cost(plan, view, worktree, file, indexes[git_directory], config)
        if not worktrees and directory is repository.directory:
            what = "is of no work tree in the plan: what git status does with it is not known, and --fix does not repair it"
            yield Finding(NOTE, "git-no-worktree", path, what, _NO_WORKTREE)
    with open_sandbox(plan, view, repository, config.hash_name) as sandbox:
        yield from find_leaks(view, repository, sandbox, config, indexes)


def _stray(view: View, repositories: Sequence[Repository]) -> Iterator[Finding]:
    for path, target in stray_gitfiles(view, repositories):
        what = f"leads to no repository of the plan, but to {printable(target)}: git does not work there, and nothing is looked at"
        yield Finding(WARNING, "git-gitfile", path, what, _NO_WORKTREE)


def _cost(plan: Plan, view: View, worktree: Worktree, file: File, index: GitIndex, config: Config) -> Iterator[Finding]:
    top = view.lookup(worktree.path, follow=False)
    if not isinstance(top, Directory):
        return
    key, value = SETTINGS[0]
    minimal = (config.last(key.lower()) or "").lower() == value
    cost = status_cost(index, file.inode.total_mtime_ns, ViewTree(plan, view, top), minimal=minimal)
    if not cost.reads:
        return
    details = []
    if not minimal:
        details.append(f"{key} is not {value}, so that git compares inodes and change times")
    if cost.stale:
        details.append(f"{cost.stale} entries have another size or time than their file")
    if cost.racy:
        details.append(f"{cost.racy} entries are as young as the index, so that git does not trust it")
    what = f"makes git status read {cost.reads} of {cost.entries} files"
    yield Finding(WARNING, "git-status-reads", child_path(worktree.git_directory, b"index"), what, _FIX, tuple(details))

"""Repositories of a data set on the packager's machine: fetched with git, no more than the tasks' commits, and made into the
tree that a group is built from.

The tree holds the commits without their histories (a shallow repository keeps their names as they are), in one pack, and a
checkout of one of them. It is the same for the same commits, whatever else the source holds: so is the group.

git on the packager's machine reads its user's configuration to fetch (credentials, proxies), and none for anything else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec
from attrs import evolve, frozen

from tools import exits
from tools.catalog.commands import APPLY_OPTIONS
from tools.catalog.config import Repository

_LAYOUT = 1
"""Of the tree: another number when the same commits give another tree."""
_REFS = "refs/weenv/"
_QUIET = (
    "-c", "core.logAllRefUpdates=false", "-c", "core.hooksPath=/dev/null", "-c", "gc.auto=0", "-c", "maintenance.auto=false",
    "-c", "fetch.writeCommitGraph=false", "-c", "pack.threads=1", "-c", "advice.detachedHead=false",
)  # fmt: skip
_KEPT = ("GIT_SSH", "GIT_ASKPASS", "GIT_PROXY", "GIT_HTTP", "GIT_TRACE")
"""Beginnings of git's environment variables that say how to fetch; others say what is done to which repository."""
_ALONE = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}


class GitRefused(Exception):
    """A git command that failed: what it said."""


@frozen
class Source:
    """A repository with the commits that its tasks need, and the one that is checked out in its group."""

    repository: Repository
    commits: tuple[str, ...]
    checkout: str

    @property
    def alone(self) -> bool:
        """Whether there is one commit only."""
        return len(self.commits) == 1

    def keyed(self) -> Repository:
        """The repository whose recipe's variables, and so the keys of its group, tell of the commits."""
        content = {"layout": _LAYOUT, "path": self.repository.path, "checkout": self.checkout, "commits": self.commits}
        recipe = self.repository.recipe
        variables = {**recipe.variables, "catalog.source": msgspec.json.encode(content, order="sorted").decode()}
        return evolve(self.repository, recipe=msgspec.structs.replace(recipe, variables=variables))


def choose_source(repository: Repository, commits: Mapping[str, int]) -> Source:
    """`commits`: how many tasks begin at each. The commonest is checked out, so that most tasks change little; of several
    the first by name.
    """
    checkout = min(commits, key=lambda commit: (-commits[commit], commit))
    return Source(repository, tuple(sorted(commits)), checkout)


def fetch_tree(source: Source, directory: Path) -> None:
    """Makes the tree in a directory that does not exist. CommandError when git cannot have one of the commits."""
    url = source.repository.url
    try:
        _git("init", "--quiet", "--template=", "--initial-branch=main", str(directory))
        wanted = "".join(f"{commit}:{_REFS}{commit}\n" for commit in source.commits)
        fetch = ("fetch", "--quiet", "--depth=1", "--no-tags", "--no-recurse-submodules", "--no-write-fetch-head", "--stdin", url)
        _git(*fetch, cwd=directory, stdin=wanted, settings={"GIT_TERMINAL_PROMPT": "0"})
        _git("checkout", "--quiet", "--detach", source.checkout, cwd=directory)
        if source.alone:
            _git("update-ref", "-d", f"{_REFS}{source.checkout}", cwd=directory)
        _git("pack-refs", "--all", "--prune", cwd=directory)
        _git("repack", "-a", "-d", "-f", "-n", "-q", cwd=directory)
    except GitRefused as error:
        shutil.rmtree(directory, ignore_errors=True)
        commits = "its commit" if source.alone else f"its {len(source.commits)} commits"
        raise exits.CommandError(f"{source.repository.name}: expected {commits} from its 'url', received: {error}") from error


class Verifier:
    """Applies mutations to the commits of a tree that `fetch_tree` made, without changing it. Safe for several threads."""

    def __init__(self, tree: Path, scratch: Path) -> None:
        self._tree = tree
        self._scratch = scratch
        self._lock = threading.Lock()
        self._indexes: dict[str, Path] = {}

    def tree_of(self, commit: str, mutation: str | None) -> str:
        """git's name of the state that the mutation makes of the commit. GitRefused says why it does not apply."""
        if mutation is None:
            return _git("rev-parse", f"{commit}^{{tree}}", cwd=self._tree).strip()
        with tempfile.TemporaryDirectory(dir=self._scratch) as made:
            index = Path(made) / "index"
            shutil.copyfile(self._index(commit), index)
            settings = {
                "GIT_INDEX_FILE": str(index),
                "GIT_OBJECT_DIRECTORY": made,
                "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(self._tree / ".git/objects"),
                **_ALONE,
            }
            _git("apply", "--cached", *APPLY_OPTIONS, "-", cwd=self._tree, stdin=mutation, settings=settings)
            return _git("write-tree", cwd=self._tree, settings=settings).strip()

    def _index(self, commit: str) -> Path:
        with self._lock:
            if commit not in self._indexes:
                path = self._scratch / f"index-{commit}"
                _git("read-tree", commit, cwd=self._tree, settings={"GIT_INDEX_FILE": str(path), **_ALONE})
                self._indexes[commit] = path
            return self._indexes[commit]


def _git(*arguments: str, cwd: Path | None = None, stdin: str = "", settings: Mapping[str, str] = _ALONE) -> str:
    """Runs git; its stdout. GitRefused. `settings`: environment variables, over ours without those of git."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name.startswith(_KEPT)}
    try:
        result = subprocess.run(
            ["git", *_QUIET, *arguments], cwd=cwd, env={**inherited, **settings}, input=stdin.encode(), capture_output=True
        )
    except FileNotFoundError:
        raise exits.CommandError("expected git on this machine, which fetches repositories, received none") from None
    if result.returncode:
        said = result.stderr.decode(errors="replace").strip() or f"git {arguments[0]} ended with status {result.returncode}"
        raise GitRefused("; ".join(line.strip() for line in said.splitlines()[:4]))
    return result.stdout.decode()

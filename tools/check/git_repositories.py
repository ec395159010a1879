"""The git repositories of a merged view, and git run on a copy of one that can do nothing but be read.

A repository of an image is untrusted: its configuration names programs to run (fsmonitor, filters, aliases, hooks), its
files name other places to read from (alternates, commondir, includes, symlinks), and its caches may lie about history
(commit-graph, grafts, replace refs). So what git is shown is a copy made here: by a list of what is taken, with a
configuration of ours, and with symlinks and alternates followed inside the view and nowhere else. The environment of
git is ours too. git then reads objects and refs, which is what it was made to do with those of strangers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from attrs import field, frozen

from layerformat import printable
from tools.check.opening import Plan, position
from tools.exits import CommandError
from weefs.merge import Directory, File, View

_MAX_SMALL_BYTES = 1 << 20
_LONGEST_S = 600
"""Of one git command."""
_MAX_ALTERNATES = 5
"""As git itself follows."""
STATE_FILES = (
    b"ORIG_HEAD", b"FETCH_HEAD", b"MERGE_HEAD", b"CHERRY_PICK_HEAD", b"REVERT_HEAD", b"REBASE_HEAD", b"BISECT_HEAD", b"AUTO_MERGE",
)  # fmt: skip
"""What git commands leave beside HEAD, each with the names of commits in it."""
_SAFE_CONFIG = "[core]\n\trepositoryformatversion = {version}\n\tbare = true\n"
_SHA256_CONFIG = "[extensions]\n\tobjectFormat = sha256\n"
_OVERRIDES = (
    "core.hooksPath=/dev/null", "core.fsmonitor=false", "core.commitGraph=false", "core.multiPackIndex=false",
    "core.useReplaceRefs=false", "core.attributesFile=/dev/null", "core.excludesFile=/dev/null", "core.pager=cat",
    "protocol.allow=never", "safe.directory=*", "gc.auto=0", "maintenance.auto=false", "log.showSignature=false",
)  # fmt: skip


class GitFailed(CommandError):
    """git could not read a repository: what it said last."""


@frozen
class Worktree:
    """A checkout: its path in the view, and that of the git directory that has its index and HEAD."""

    path: bytes
    git_directory: bytes


@frozen
class Repository:
    """A directory with objects and refs: `.git`, a bare repository, or a submodule's."""

    path: bytes
    directory: Directory = field(repr=False)
    worktrees: tuple[Worktree, ...] = ()

    def inside(self, name: bytes) -> bytes:
        """The path in the view of what has this path in the repository."""
        return child_path(self.path, name)


def find_repositories(view: View) -> list[Repository]:
    """All of a view, in the order of their paths, each with its checkouts."""
    paths: dict[int, bytes] = {}
    gitfiles: list[tuple[bytes, File]] = []
    found: list[Directory] = []
    for path, node in view.walk():
        if isinstance(node, File):
            if path.rpartition(b"/")[2] == b".git":
                gitfiles.append((path, node))
            continue
        paths[id(node)] = path
        if _is_repository(node):
            found.append(node)
    worktrees: dict[int, list[Worktree]] = {id(node): [] for node in found}
    for node in found:
        parent, _, name = paths[id(node)].rpartition(b"/")
        if name == b".git":
            worktrees[id(node)].append(Worktree(parent, paths[id(node)]))
    for path, file in gitfiles:
        linked = _follow_gitfile(view, path, file)
        if linked is not None and id(linked[0]) in worktrees:
            repository, git_directory = linked
            worktrees[id(repository)].append(Worktree(path.rpartition(b"/")[0], paths[id(git_directory)]))
    repositories = [Repository(paths[id(node)], node, tuple(worktrees[id(node)])) for node in found]
    return sorted(repositories, key=lambda repository: repository.path)


def stray_gitfiles(view: View, repositories: Sequence[Repository]) -> list[tuple[bytes, bytes]]:
    """Files named `.git` that lead to no repository of the view: their paths, and what is in them."""
    known = {worktree.path for repository in repositories for worktree in repository.worktrees}
    found = []
    for path, node in view.walk():
        parent, _, name = path.rpartition(b"/")
        if name == b".git" and isinstance(node, File) and parent not in known:
            text = view.target(node) if node.inode.is_symlink else small_file(view, node)
            found.append((path, text.removeprefix(b"gitdir:").strip()))
    return found


def linked_directories(repository: Repository) -> dict[bytes, Directory]:
    """What a repository keeps of linked worktrees: git directories by their paths in the view."""
    kept = repository.directory.children.get(b"worktrees")
    children = kept.children if isinstance(kept, Directory) else {}
    return {repository.inside(b"worktrees/" + name): node for name, node in sorted(children.items()) if isinstance(node, Directory)}


def git_directories(view: View, repository: Repository) -> dict[bytes, Directory]:
    """Those that have a HEAD and an index of their own, by their paths in the view, the repository's first."""
    found = {repository.path: repository.directory, **linked_directories(repository)}
    for worktree in repository.worktrees:
        directory = view.lookup(worktree.git_directory)
        if isinstance(directory, Directory):
            found.setdefault(worktree.git_directory, directory)
    return found


def indexes_without_worktree(view: View, repository: Repository) -> list[bytes]:
    """The paths of indexes whose work tree is not known."""
    known = {worktree.git_directory for worktree in repository.worktrees}
    found = [path for path, directory in git_directories(view, repository).items() if path not in known and b"index" in directory.children]
    return [child_path(path, b"index") for path in found]


def _is_repository(node: Directory) -> bool:
    objects, refs = node.children.get(b"objects"), node.children.get(b"refs")
    has_refs = isinstance(refs, Directory) or b"packed-refs" in node.children
    return isinstance(node.children.get(b"HEAD"), File) and objects is not None and has_refs


def _follow_gitfile(view: View, path: bytes, file: File) -> tuple[Directory, Directory] | None:
    """Where `gitdir: PATH` or a symlink leads, of a linked worktree, a submodule or a separate git directory: the
    repository, and the git directory of the checkout; None when that is nowhere in the view.
    """
    text = b"gitdir:" + view.target(file) if file.inode.is_symlink else small_file(view, file)
    if not text.startswith(b"gitdir:"):
        return None
    directory = _directory_at(view, path.rpartition(b"/")[0], text.removeprefix(b"gitdir:").strip())
    if directory is None:
        return None
    common = directory.children.get(b"commondir")
    if common is None:
        return directory, directory
    found = view.lookup(small_file(view, common).strip(), at=directory)
    return (found, directory) if isinstance(found, Directory) else None


def _directory_at(view: View, parent: bytes, path: bytes) -> Directory | None:
    start = view.lookup(parent, follow=False)
    node = view.lookup(path, at=start) if isinstance(start, Directory) else None
    return node if isinstance(node, Directory) else None


def child_path(parent: bytes, name: bytes) -> bytes:
    """A path below another in the view, whose root is b''."""
    return parent + b"/" + name if parent else name


def small_file(view: View, node: File | Directory | None) -> bytes:
    """The contents of a regular file of at most 1 MiB; empty for anything else."""
    if not isinstance(node, File) or not node.inode.is_regular or node.inode.size > _MAX_SMALL_BYTES:
        return b""
    return read_file(view, node)


def read_file(view: View, file: File) -> bytes:
    """The contents of a regular file. FormatError, RegistryError and its kinds."""
    return view.layers[file.layer].read(file.number, 0, file.inode.size)


@frozen
class Config:
    """A repository's own configuration: key (section and name in lower case) and value, in the order of the file."""

    settings: tuple[tuple[str, str], ...]

    def last(self, key: str) -> str | None:
        """What git goes by; None when it is not set."""
        return next((value for name, value in reversed(self.settings) if name == key), None)

    @property
    def hash_name(self) -> str:
        """Of the repository's objects, as hashlib calls it."""
        return "sha256" if (self.last("extensions.objectformat") or "").lower() == "sha256" else "sha1"


def parse_config(data: bytes) -> Config:
    """What a configuration file says by itself; nothing that it includes is read. GitFailed."""
    with tempfile.TemporaryDirectory(prefix="weenv-git-") as scratch:
        home = Path(scratch)
        (home / "config").write_bytes(data)
        arguments = ("config", "--file", str(home / "config"), "--no-includes", "--null", "--list")
        result = run_git(arguments, git_directory=home / "none", home=home)
    if result.returncode:
        raise GitFailed("expected a configuration that git can read: " + printable(result.stderr.strip()[:200]))
    pairs = (item.partition(b"\n") for item in result.stdout.split(b"\0") if item)
    return Config(tuple((os.fsdecode(key), os.fsdecode(value) if separator else "true") for key, separator, value in pairs))


# The copy


class Sandbox:
    """A copy of one repository and git on it. `hash_name`: of its objects."""

    def __init__(self, directory: Path, hash_name: str) -> None:
        self.directory = directory
        self.git_directory = directory / "git"
        self.hash_name = hash_name

    def git(self, *arguments: str, stdin: bytes = b"") -> bytes:
        """git's answer. GitFailed."""
        result = self._run(arguments, stdin)
        if result.returncode:
            lines = result.stderr.splitlines() or [b"status %d" % result.returncode]
            raise GitFailed(f"git {arguments[0]}: {printable(lines[-1])}")
        return result.stdout

    def succeeds(self, *arguments: str) -> bool:
        return self._run(arguments, b"").returncode == 0

    def _run(self, arguments: Sequence[str], stdin: bytes) -> subprocess.CompletedProcess[bytes]:
        return run_git(arguments, git_directory=self.git_directory, home=self.directory, stdin=stdin)


def run_git(arguments: Sequence[str], *, git_directory: Path, home: Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """git with nothing of the caller's environment and configuration. `home`: an empty directory, which it runs in."""
    overrides = [part for setting in _OVERRIDES for part in ("-c", setting)]
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(home),
        "LC_ALL": "C",
        "GIT_DIR": str(git_directory),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_GRAFT_FILE": "/dev/null",
    }
    try:
        return subprocess.run(
            ["git", *overrides, *arguments], input=stdin, capture_output=True, env=environment, cwd=home, timeout=_LONGEST_S
        )
    except FileNotFoundError:
        raise GitFailed("expected the program `git` to look into repositories, there is none; install it") from None
    except subprocess.TimeoutExpired:
        raise GitFailed(f"git {arguments[0]}: expected an answer within {_LONGEST_S} s, received none") from None


@contextlib.contextmanager
def open_sandbox(plan: Plan, view: View, repository: Repository, hash_name: str) -> Iterator[Sandbox]:
    """Copies what git needs of a repository, and only that. OSError, FormatError, RegistryError and its kinds."""
    with tempfile.TemporaryDirectory(prefix="weenv-git-") as scratch:
        sandbox = Sandbox(Path(scratch), hash_name)
        copy = _Copy(view, repository, sandbox)
        plan.announce(file for file, _ in copy.files)
        try:
            copy.write()
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            raise GitFailed("a path in it is too long to be copied") from None
        yield sandbox


class _Copy:
    """Which files of the view become which of the copy, and then the copying."""

    def __init__(self, view: View, repository: Repository, sandbox: Sandbox) -> None:
        self._view = view
        self._sandbox = sandbox
        self._stores: list[Path] = []
        self.files: list[tuple[File, Path]] = []
        top, target = repository.directory, sandbox.git_directory
        for name in (b"HEAD", b"packed-refs", b"shallow", *STATE_FILES):
            self._take(top, name, target)
        for name in (b"refs", b"logs"):
            self._take_tree(self._directory(top, name), target / os.fsdecode(name), _is_any)
        self._take_objects(top, target, target / "objects", 0)

    def write(self) -> None:
        """Makes the copy; files in the order in which their contents lie."""
        target = self._sandbox.git_directory
        for directory in (target / "refs/heads", target / "objects/info", target / "objects/pack"):
            directory.mkdir(parents=True, exist_ok=True)
        layers = self._view.layers
        for file, path in sorted(self.files, key=lambda pair: (pair[0].layer, position(layers[pair[0].layer], pair[0].number))):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as copy:
                for data in layers[file.layer].read_file(file.number):
                    copy.write(data)
        is_sha256 = self._sandbox.hash_name == "sha256"
        config = _SAFE_CONFIG.format(version=int(is_sha256)) + (_SHA256_CONFIG if is_sha256 else "")
        (target / "config").write_text(config)
        if self._stores:
            (target / "objects/info/alternates").write_text("".join(f"{store}\n" for store in self._stores))

    def _directory(self, parent: Directory, name: bytes) -> Directory | None:
        node = self._view.lookup(name, at=parent)
        return node if isinstance(node, Directory) else None

    def _take(self, parent: Directory, name: bytes, target: Path) -> None:
        """A file by its name, a symlink followed inside the view."""
        node = self._view.lookup(name, at=parent) if name in parent.children else None
        if isinstance(node, File) and node.inode.is_regular:
            self.files.append((node, target / os.fsdecode(name)))

    def _take_tree(self, top: Directory | None, target: Path, wanted: Callable[[bytes], bool]) -> None:
        """What is `wanted` of a directory and those below it; symlinks to directories are not followed."""
        pending = [(top, target)] if top else []
        while pending:
            directory, path = pending.pop()
            for name, node in directory.children.items():
                if isinstance(node, Directory):
                    pending.append((node, path / os.fsdecode(name)))
                elif wanted(name):
                    self._take(directory, name, path)

    def _take_objects(self, parent: Directory, at: Path, target: Path, depth: int) -> None:
        """An object store, and those that it borrows from."""
        objects = self._directory(parent, b"objects") if depth == 0 else parent
        if objects is None:
            return
        self._take_tree(objects, target, _is_object)
        for store in alternates(self._view, objects) if depth < _MAX_ALTERNATES else ():
            path = self._sandbox.directory / f"alternate-{len(self._stores)}"
            self._stores.append(path)
            self._take_objects(store, at, path, depth + 1)


def alternates(view: View, objects: Directory) -> list[Directory]:
    """The object stores that a store borrows from, those that the view has."""
    info = objects.children.get(b"info")
    text = small_file(view, info.children.get(b"alternates")) if isinstance(info, Directory) else b""
    paths = [line for line in text.splitlines() if line and not line.startswith(b"#")]
    found = [view.lookup(path, at=objects) for path in paths]
    return [node for node in found if isinstance(node, Directory)]


def _is_any(name: bytes) -> bool:
    return not name.endswith(b".lock")


def _is_object(name: bytes) -> bool:
    """A loose object's file, or a pack and its index; no cache that says what they hold."""
    is_loose = len(name) in (38, 62) and all(byte in b"0123456789abcdef" for byte in name)
    return is_loose or name.endswith((b".pack", b".idx"))

"""From what a task's git repository lets its answer be read: everything that HEAD's history does not hold.

A repository at the commit before a fix is a leak when the fix is still in it: under a branch, a tag, a remote's branch,
a stash, a note, a replacement, in a reflog, in ORIG_HEAD and the like, in a linked worktree, staged in the index, or in
objects that nothing names any more. Each has a code, so that each can be found and removed for itself.

| code | severity | is |
|---|---|---|
| git-branch, git-tag, git-remote-branch, git-stash, git-notes, git-replace, git-ref | error | a ref to what is beyond HEAD |
| git-reflog | error, warning | a reflog that names a commit beyond HEAD; a warning when that commit is gone |
| git-state | error, warning | ORIG_HEAD, FETCH_HEAD, …, or packed-refs name one |
| git-worktree | error, warning | HEAD, refs and the like of a linked worktree lead to one; a warning when its work tree is not there |
| git-lost-found | error | what `git fsck --lost-found` found has been copied |
| git-unreachable | error | objects that no ref leads to |
| git-staged | error | contents in the index that HEAD's history does not have |
| git-alternates | warning | objects are borrowed from another place |
| git-grafts | warning | a history that is not the one that git shows |
| git-pack | warning | a pack without its index, or a temporary one: git does not see its objects, a reader does |
| git-operation | warning | a merge, rebase, bisection or recorded resolution is kept |
| git-lock | warning | a lock that a killed git left: git refuses to write what it locks |
| git-program | warning | the configuration runs a program, or reads another file |
| git-credentials | warning | a remote's address holds a password |
| git-remote, git-hook, git-message | note | a remote's address; a hook; the message of another commit |
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from urllib.parse import urlsplit

from attrs import frozen

from layerformat import printable
from tools.check.findings import Finding, Severity
from tools.check.git_index import GitIndex
from tools.check.git_repositories import (
    STATE_FILES,
    Config,
    GitFailed,
    Repository,
    Sandbox,
    child_path,
    git_directories,
    small_file,
)
from weefs.merge import Directory, File, View

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE

_SHOWN = 10
_MAX_REFS = 200
"""For each of which git is asked what it leads to; further ones are only named."""
_FORMAT = "--format=%h %cs %s"
_OID = rb"[0-9a-f]{40}(?:[0-9a-f]{24})?"
_REFLOG_LINE = re.compile(rb"^(%s) (%s) [^\t\n]*(?:\t(.*))?$" % (_OID, _OID), re.MULTILINE)
_STATE_LINE = re.compile(rb"^\^?(%s)\b" % _OID, re.MULTILINE)
_PROGRAMS = re.compile(
    r"core\.(fsmonitor|hookspath|sshcommand|editor|pager|askpass|gitproxy|alternaterefscommand)|alias\..*|include\.path|includeif\..*\.path"
    r"|filter\..*\.(clean|smudge|process)|diff\.external|diff\..*\.(command|textconv)|merge\..*\.driver|gpg\.(.*\.)?program"
    r"|credential\.(.*\.)?helper|sequence\.editor|uploadpack\.packobjectshook|pager\..*|difftool\..*|mergetool\..*"
)

_REFS = (
    ("refs/heads/", "git-branch", "git branch -D, then git gc --prune=now"),
    ("refs/tags/", "git-tag", "git tag -d, then git gc --prune=now"),
    ("refs/remotes/", "git-remote-branch", "git remote remove, then git gc --prune=now"),
    ("refs/stash", "git-stash", "git stash clear, then git gc --prune=now"),
    ("refs/notes/", "git-notes", "git update-ref -d, then git gc --prune=now"),
    ("refs/replace/", "git-replace", "git replace -d, then git gc --prune=now"),
    ("refs/", "git-ref", "git update-ref -d, then git gc --prune=now"),
)
_EXPIRE = "git reflog expire --expire=now --all, then git gc --prune=now"

Entries = list[tuple[str, str]]
"""Objects that a file names, each with what is said of it."""


def find_leaks(
    view: View, repository: Repository, sandbox: Sandbox, config: Config, indexes: Mapping[bytes, GitIndex]
) -> Iterator[Finding]:
    """All of the above of one repository. `indexes`: by their git directories. GitFailed when git cannot read on."""
    yield from _config_findings(repository, config)
    yield from _Surroundings(view, repository).findings()
    yield from _Search(view, repository, sandbox, indexes).findings()


@frozen
class _Linked:
    """What a linked worktree has of its own.

    path      of its git directory in the view
    is_there  whether the plan has its work tree
    where     that is, or was, for findings
    remedy    what removes both
    files     that name objects, by their paths below the git directory, with what they name
    """

    path: bytes
    is_there: bool
    where: str
    remedy: str
    files: dict[bytes, Entries]

    def named(self) -> Iterator[str]:
        for entries in self.files.values():
            yield from (oid for oid, _ in entries)


class _Search:
    """Objects: which there are, which HEAD's history holds, and what names the others."""

    def __init__(self, view: View, repository: Repository, sandbox: Sandbox, indexes: Mapping[bytes, GitIndex]) -> None:
        self._view = view
        self._repository = repository
        self._sandbox = sandbox
        self._indexes = indexes
        self._objects = self._list_objects()
        verified = sandbox.succeeds("rev-parse", "--verify", "--quiet", "HEAD^{commit}")
        self._head = ("HEAD",) if verified else ()
        self._held = self._reachable(*self._head) if verified else set()

    def findings(self) -> Iterator[Finding]:
        refs = self._refs()
        yield from self._ref_findings(refs)
        yield from self._reflog_findings()
        yield from self._state_findings({oid for oid, _ in refs})
        linked = self._linked({name: oid for oid, name in refs})
        in_linked = self._reached_by(linked)
        yield from self._worktree_findings(linked)
        yield from self._staged_findings({each.path: each for each in linked}, in_linked)
        yield from self._unreachable_findings(in_linked)
        yield from self._lost_and_found_findings()
        yield from self._message_findings()

    def _finding(self, severity: Severity, code: str, name: str | bytes, what: str, remedy: str, details: Iterable[str] = ()) -> Finding:
        """`name`: in the repository, or as bytes the path in the view."""
        if isinstance(name, str):
            name = self._repository.inside(name.encode("utf-8", "surrogateescape")) if name else self._repository.path
        return Finding(severity, code, name, what, remedy, tuple(details))

    # What git says

    def _list_objects(self) -> dict[str, tuple[str, int]]:
        """Type and size, bytes, of every object that git can see."""
        arguments = ("--batch-all-objects", "--unordered", "--batch-check=%(objectname) %(objecttype) %(objectsize)")
        lines = [line.split() for line in self._sandbox.git("cat-file", *arguments).decode("ascii").splitlines()]
        if damaged := [fields[0] for fields in lines if len(fields) != 3]:
            raise GitFailed(f"{len(damaged)} of its {len(lines)} objects are damaged, {damaged[0]} first")
        return {oid: (kind, int(size)) for oid, kind, size in lines}

    def _reachable(self, *roots: str) -> set[str]:
        arguments = ("--objects", "--no-object-names", "--missing=allow-any", *roots)
        return set(self._sandbox.git("rev-list", *arguments).decode("ascii").split())

    def _refs(self) -> list[tuple[str, str]]:
        """Object and name of every ref."""
        lines = self._sandbox.git("for-each-ref", "--format=%(objectname) %(refname)").splitlines()
        pairs = (line.partition(b" ") for line in lines)
        return [(oid.decode("ascii"), name.decode("utf-8", "surrogateescape")) for oid, _, name in pairs]

    def _peeled(self, oids: Iterable[str]) -> dict[str, str]:
        """What tags lead to; other objects lead to themselves."""
        asked = list(dict.fromkeys(oids))
        text = "".join(f"{oid}^{{}}\n" for oid in asked).encode()
        answers = self._sandbox.git("cat-file", "--batch-check=%(objectname)", stdin=text).decode().splitlines()
        return {oid: answer for oid, answer in zip(asked, answers, strict=True) if not answer.endswith("missing")}

    def _history(self, oid: str) -> list[str]:
        """The commits beyond HEAD that one leads to, the youngest first, and how many more there are."""
        excluded = ("--not", *self._head) if self._head else ()
        try:
            total = int(self._sandbox.git("rev-list", "--count", oid, *excluded))
            shown = self._sandbox.git("log", f"--max-count={_SHOWN}", _FORMAT, oid, *excluded, "--").splitlines()
        except GitFailed as error:
            return [f"{oid[:10]}, whose history cannot be walked: {error}"]
        return _bounded([printable(line) for line in shown], total)

    def _described(self, oids: Iterable[str]) -> list[str]:
        """Objects, one a line: commits with their subjects first."""
        order = {"commit": 0, "tag": 1, "blob": 2, "tree": 3}
        sorted_oids = sorted(oids, key=lambda oid: (order[self._objects[oid][0]], oid))
        commits = [oid for oid in sorted_oids if self._objects[oid][0] == "commit"][:_SHOWN]
        lines = []
        if commits:
            text = "".join(f"{oid}\n" for oid in commits).encode()
            answer = self._sandbox.git("log", "--no-walk=unsorted", "--stdin", _FORMAT, stdin=text)
            lines = [printable(line) for line in answer.splitlines()]
        others = (oid for oid in sorted_oids[len(commits) : _SHOWN] if self._objects[oid][0] != "commit")
        lines += [f"{oid[:10]} {self._objects[oid][0]} of {self._objects[oid][1]} bytes" for oid in others]
        return _bounded(lines, len(sorted_oids))

    # Names that lead beyond HEAD

    def _ref_findings(self, refs: Sequence[tuple[str, str]]) -> Iterator[Finding]:
        peeled = self._peeled(oid for oid, _ in refs)
        beyond = [(peeled.get(oid, oid), name) for oid, name in refs if peeled.get(oid) not in self._held]
        for number, (oid, name) in enumerate(beyond):
            code, remedy = next((code, remedy) for prefix, code, remedy in _REFS if name.startswith(prefix))
            if oid not in self._objects:
                yield self._finding(WARNING, code, name, f"names an object that is not here, {oid[:10]}", remedy)
                continue
            kind = self._objects[oid][0]
            details = self._history(oid) if kind == "commit" and number < _MAX_REFS else [f"{oid[:10]} {kind}"]
            yield self._finding(ERROR, code, name, f"leads to a {kind} beyond HEAD", remedy, details)

    def _reflog_findings(self) -> Iterator[Finding]:
        logs = self._sandbox.git_directory / "logs"
        for path in sorted(logs.rglob("*")):
            if path.is_file():
                name = str(path.relative_to(self._sandbox.git_directory))
                yield from self._named("git-reflog", name, _reflog_entries(path.read_bytes()), _EXPIRE)

    def _state_findings(self, refs: set[str]) -> Iterator[Finding]:
        """`refs`: what refs lead to, which packed-refs may say again."""
        for name in STATE_FILES:
            yield from self._state(name.decode(), set())
        yield from self._state("packed-refs", refs | set(self._peeled(refs).values()))

    def _state(self, name: str, known: set[str]) -> Iterator[Finding]:
        path = self._sandbox.git_directory / name
        if path.is_file():
            remedy = "git pack-refs --all" if name == "packed-refs" else f"rm {name}"
            entries = [(oid, line) for oid, line in _state_entries(path.read_bytes()) if oid not in known]
            yield from self._named("git-state", name, entries, f"{remedy}, then git gc --prune=now")

    # Linked worktrees

    def _linked(self, refs: Mapping[str, str]) -> list[_Linked]:
        """`refs`: objects by the names of refs."""
        places = {worktree.git_directory: worktree.path for worktree in self._repository.worktrees}
        directories = git_directories(self._view, self._repository)
        del directories[self._repository.path]
        found = []
        for path, directory in sorted(directories.items()):
            is_there = path in places
            if is_there:
                shown = printable(places[path])
                where, remedy = f"; its work tree is /{shown}", f"git worktree remove --force /{shown}"
            else:
                said = printable(small_file(self._view, directory.children.get(b"gitdir")).strip().removesuffix(b"/.git")) or "?"
                where = f"; its work tree is not in the plan, but was at {said}"
                remedy = f"git worktree remove --force {said} where it still is, else git worktree prune"
            if b"locked" in directory.children:
                remedy = f"git worktree unlock {printable(path.rpartition(b'/')[2])}, then {remedy}"
            found.append(_Linked(path, is_there, where, f"{remedy}, then git gc --prune=now", self._files_of(directory, refs)))
        return found

    def _files_of(self, directory: Directory, refs: Mapping[str, str]) -> dict[bytes, Entries]:
        """What names objects in the git directory of a linked worktree."""
        files: dict[bytes, Entries] = {}
        for name in (b"HEAD", *STATE_FILES):
            text = small_file(self._view, directory.children.get(name))
            files[name] = _state_entries(text)
            symbolic = text.removeprefix(b"ref:").strip().decode("utf-8", "surrogateescape")
            if symbolic in refs:
                files[name].append((refs[symbolic], ""))
        for path, file in _walk(directory, b"refs"):
            files[path] = _state_entries(small_file(self._view, file))
        for path, file in _walk(directory, b"logs"):
            files[path] = _reflog_entries(small_file(self._view, file))
        return files

    def _reached_by(self, linked: Iterable[_Linked]) -> set[str]:
        """What linked worktrees lead to: it is there because of them."""
        roots = {oid for each in linked for oid in each.named() if oid in self._objects}
        return self._reachable(*sorted(roots)) if roots else set()

    def _worktree_findings(self, linked: Iterable[_Linked]) -> Iterator[Finding]:
        for each in linked:
            if not each.is_there:
                yield self._finding(WARNING, "git-worktree", each.path, "is kept of a linked worktree" + each.where, each.remedy)
            for name, entries in each.files.items():
                yield from self._named("git-worktree", child_path(each.path, name), entries, each.remedy, each.where)

    def _named(self, code: str, name: str | bytes, entries: Entries, remedy: str, where: str = "") -> Iterator[Finding]:
        """Of the objects that a file names: those here beyond HEAD, and those that are gone."""
        lines: dict[str, str] = {}
        for oid, line in entries:
            if oid.strip("0") and oid not in self._held:
                lines[oid] = lines.get(oid) or line
        here = self._beyond(oid for oid in lines if oid in self._objects)
        gone = [oid for oid in lines if oid not in self._objects]
        if here:
            yield self._finding(ERROR, code, name, f"names {_counted(len(here))} beyond HEAD{where}", remedy, self._described(here))
        if gone:
            details = _bounded([f"{oid[:10]} {lines[oid]}".rstrip() for oid in gone[:_SHOWN]], len(gone))
            what = f"names {_counted(len(gone))} beyond HEAD, not to be found here{where}"
            yield self._finding(WARNING, code, name, what, remedy, details)

    def _beyond(self, oids: Iterable[str]) -> list[str]:
        """Those that are not only a tag on what HEAD holds."""
        peeled = self._peeled(oids)
        return [oid for oid, target in peeled.items() if target not in self._held]

    # Objects without a name

    def _staged_findings(self, linked: Mapping[bytes, _Linked], in_linked: set[str]) -> Iterator[Finding]:
        """`in_linked`: what a linked worktree's HEAD and the like lead to, which is said of them."""
        for path, index in self._indexes.items():
            of_linked = linked.get(path)
            known = self._held | in_linked if of_linked else self._held
            staged = [entry for entry in index.entries if entry.oid in self._objects and entry.oid not in known]
            staged = [entry for entry in staged if self._objects[entry.oid][1]]
            if staged:
                details = _bounded([printable(entry.path) for entry in staged[:_SHOWN]], len(staged))
                what = f"has {len(staged)} staged contents that no commit of HEAD's history has"
                what += of_linked.where if of_linked else ""
                remedy = of_linked.remedy if of_linked else "git reset, then git gc --prune=now"
                yield self._finding(ERROR, "git-staged", child_path(path, b"index"), what, remedy, details)

    def _unreachable_findings(self, in_linked: set[str]) -> Iterator[Finding]:
        staged = {entry.oid for index in self._indexes.values() for entry in index.entries}
        reached = self._reachable("--all") | in_linked
        lost = [oid for oid, (_, size) in self._objects.items() if size and oid not in reached and oid not in staged]
        if not lost:
            return
        kinds = [self._objects[oid][0] for oid in lost]
        counts = ", ".join(f"{kinds.count(kind)} {kind}s" for kind in ("commit", "tree", "blob", "tag") if kind in kinds)
        yield self._finding(ERROR, "git-unreachable", "", f"holds objects that no ref leads to: {counts}", _EXPIRE, self._described(lost))

    def _lost_and_found_findings(self) -> Iterator[Finding]:
        """Commits are there by their names, everything else by its contents, which stay when the object has gone."""
        walked = _walk(self._repository.directory, b"lost-found")
        files = {path.rpartition(b"/")[2].decode("ascii", "replace"): file for path, file in walked}
        lost = {oid: file for oid, file in files.items() if oid not in self._held}
        if lost:
            details = self._described(oid for oid in lost if oid in self._objects)
            gone = [(oid, file.inode.size) for oid, file in lost.items() if oid not in self._objects]
            details += [f"{oid[:10]}: {size} bytes of an object that is not here" for oid, size in gone]
            what = f"holds {_counted(len(lost))} beyond HEAD, by name or contents"
            remedy = "rm -r lost-found, then git gc --prune=now"
            yield self._finding(ERROR, "git-lost-found", "lost-found", what, remedy, _bounded(details, len(lost)))

    def _message_findings(self) -> Iterator[Finding]:
        said = self._sandbox.git("log", "--max-count=1", "--format=%B", "HEAD", "--").splitlines() if self._head else []
        for name in (b"COMMIT_EDITMSG", b"SQUASH_MSG"):
            subject = small_file(self._view, self._repository.directory.children.get(name)).partition(b"\n")[0]
            if subject and subject not in said:
                what = f"is not the message of HEAD: {printable(subject)}"
                yield self._finding(NOTE, "git-message", name.decode(), what, "remove it if that commit must not be known")


def _walk(top: Directory, name: bytes) -> Iterator[tuple[bytes, File]]:
    """The files of a subdirectory, none when there is no such one, by their paths below `top`; symlinks are not followed."""
    pending: list[tuple[bytes, File | Directory | None]] = [(name, top.children.get(name))]
    while pending:
        path, node = pending.pop()
        if isinstance(node, File):
            yield path, node
        elif node is not None:
            pending += [(path + b"/" + child, below) for child, below in sorted(node.children.items(), reverse=True)]


def _reflog_entries(text: bytes) -> Entries:
    """Each object that a reflog names, with the message."""
    pairs = []
    for match in _REFLOG_LINE.finditer(text):
        pairs += [(match[1].decode(), ""), (match[2].decode(), printable(match[3] or b""))]
    return pairs


def _state_entries(text: bytes) -> Entries:
    return [(match[1].decode(), "") for match in _STATE_LINE.finditer(text)]


def _bounded(lines: list[str], total: int) -> list[str]:
    shown = lines[:_SHOWN]
    return [*shown, f"and {total - len(shown)} more"] if total > len(shown) else shown


def _counted(number: int) -> str:
    return f"{number} object{'' if number == 1 else 's'}"


class _Surroundings:
    """What lies in a git directory beside objects and refs."""

    def __init__(self, view: View, repository: Repository) -> None:
        self._view = view
        self._repository = repository

    def findings(self) -> Iterator[Finding]:
        yield from self._borrowed()
        yield from self._packs()
        yield from self._operations()
        yield from self._locks()
        yield from self._hooks()

    def _at(self, *names: bytes) -> File | Directory | None:
        return self._view.lookup(b"/".join(names), at=self._repository.directory)

    def _text(self, *names: bytes) -> bytes:
        return small_file(self._view, self._at(*names))

    def _entries(self, *names: bytes) -> dict[bytes, File | Directory]:
        node = self._at(*names) if names else self._repository.directory
        return node.children if isinstance(node, Directory) else {}

    def _finding(self, severity: Severity, code: str, name: bytes, what: str, remedy: str, details: Sequence[str] = ()) -> Finding:
        return Finding(severity, code, self._repository.inside(name), what, remedy, tuple(details))

    def _borrowed(self) -> Iterator[Finding]:
        for name in (b"alternates", b"http-alternates"):
            if text := self._text(b"objects", b"info", name):
                lines = [printable(line) for line in text.splitlines()[:_SHOWN]]
                remedy = "git repack -a -d, then remove the file"
                yield self._finding(WARNING, "git-alternates", b"objects/info/" + name, "borrows objects", remedy, lines)
        if self._text(b"info", b"grafts"):
            yield self._finding(WARNING, "git-grafts", b"info/grafts", "gives commits other parents than they have", "remove the file")

    def _packs(self) -> Iterator[Finding]:
        packs = self._entries(b"objects", b"pack")
        for name in packs:
            stem, _, kind = name.rpartition(b".")
            if (kind == b"pack" and stem + b".idx" not in packs) or name.startswith(b"tmp_"):
                what = "is a pack that git does not see, and whose objects can be read"
                yield self._finding(WARNING, "git-pack", b"objects/pack/" + name, what, "remove it")

    def _operations(self) -> Iterator[Finding]:
        places = [b"", *(b"worktrees/" + name + b"/" for name in self._entries(b"worktrees"))]
        for place in places:
            for name in (b"rebase-merge", b"rebase-apply", b"sequencer", b"BISECT_LOG", b"MERGE_MSG", b"rr-cache"):
                node = self._at(place + name)
                if isinstance(node, File) or (isinstance(node, Directory) and node.children):
                    what = "is left of an operation, and says what it was about"
                    yield self._finding(WARNING, "git-operation", place + name, what, "finish or abort it, or remove what is left")

    def _locks(self) -> Iterator[Finding]:
        for top in self._entries():
            if top in (b"modules", b"hooks"):  # repositories of their own; programs, with names as people like them
                continue
            for name, _ in _walk(self._repository.directory, top):
                if name.endswith(b".lock"):
                    what = f"keeps git from writing {printable(name.removesuffix(b'.lock'))}: a git that was killed has left it"
                    yield self._finding(WARNING, "git-lock", name, what, "remove it")

    def _hooks(self) -> Iterator[Finding]:
        for name, node in self._entries(b"hooks").items():
            if isinstance(node, File) and not name.endswith(b".sample") and node.inode.mode & stat.S_IXUSR:
                what = "runs when git does what it is named after"
                yield self._finding(NOTE, "git-hook", b"hooks/" + name, what, "remove it unless the task wants it")


def _config_findings(repository: Repository, config: Config) -> Iterator[Finding]:
    path = repository.inside(b"config")
    for key, value in config.settings:
        if _PROGRAMS.fullmatch(key) and value not in ("", "false"):
            what = f"sets {key} to {printable(value.encode('utf-8', 'surrogateescape'))}, which git commands run or read"
            yield Finding(WARNING, "git-program", path, what, "git config --unset")
        elif key.startswith("remote.") and key.endswith((".url", ".pushurl")):
            address, secret = _without_password(value)
            if secret:
                yield Finding(WARNING, "git-credentials", path, f"holds a password or token for {address}", "git remote set-url")
            yield Finding(NOTE, "git-remote", path, f"names a remote: {address}", "git remote remove, if the task must not know it")


def _without_password(address: str) -> tuple[str, bool]:
    """An address as it can be shown, and whether something was left out."""
    shown = printable(address.encode("utf-8", "surrogateescape"))
    try:
        parts = urlsplit(address)
    except ValueError:
        return shown, False
    user, at, host = parts.netloc.rpartition("@")
    if parts.scheme not in ("http", "https") or not at or not user:
        return shown, False
    return parts._replace(netloc=f"…@{host}").geturl(), True



"""`weenv group check`: every kind of finding is found where it was planted, nothing is found where nothing is, a hostile
repository runs nothing, and a repaired index spares `git status` the work tree.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import strategies
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st
from registry_fixture import run_registry
from strategies import Member, encode_layer, make_content
from test_cli_layers import mounted
from weefs_harness import open_layers
from weenv_cli import CAPACITY, INTEGRITY, NOT_FOUND, OK, USAGE, Weenv

from layerformat import Entry, Kind, convert
from registry import GroupConfig, push_group, resolve_group
from tools.check.filesystem import check_filesystem
from tools.check.git_index import GitIndex, IndexDamaged
from tools.check.git_repair import RepairRefused, repair_index, repair_tree
from tools.check.git_worktree import DirectoryTree, status_cost
from tools.check.opening import Plan, PlannedRanges
from weefs.merge import File, PlanRefused, View

GIT_ENVIRONMENT = {
    "PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_AUTHOR_NAME": "A", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "A", "GIT_COMMITTER_EMAIL": "a@b", "LC_ALL": "C",
}  # fmt: skip
Root = dict[str, Any]


def git(repository: Path, *arguments: str, stdin: bytes = b"") -> str:
    result = subprocess.run(["git", *arguments], cwd=repository, env=GIT_ENVIRONMENT, input=stdin, capture_output=True)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode().strip()


@frozen
class Check:
    """One run of the command, in JSON."""

    status: int
    result: dict[str, Any]

    def codes(self, *severities: str) -> dict[str, list[dict[str, Any]]]:
        """Findings by code; of these severities, or of all."""
        found: dict[str, list[dict[str, Any]]] = {}
        for finding in self.result["findings"]:
            if not severities or finding["severity"] in severities:
                found.setdefault(finding["code"], []).append(finding)
        return found


@pytest.fixture
def check(weenv: Weenv) -> Callable[..., Check]:
    def run(*arguments: str) -> Check:
        answer = weenv("group", "check", "--format", "json", *arguments)
        assert answer.out, answer.err
        return Check(answer.status, json.loads(answer.out))

    return run


def publish(tmp_path: Path, tag: str, *layers: list[Member] | Path, role: str | None = None) -> str:
    """Directories and lists of members as a group of a layout."""
    files = []
    for number, layer in enumerate(layers):
        path = tmp_path / f"{tag}-{number}.weenv"
        if isinstance(layer, Path):
            convert(layer, path)
        else:
            path.write_bytes(encode_layer(layer))
        files.append(path)
    reference = f"oci:{tmp_path}/layout:{tag}"
    push_group(reference, files, role=role, config=GroupConfig(env=("A=b",), workdir="/w"))
    return reference


# The file system


def directory(path: str, mode: int = 0o755) -> Member:
    return Member(Entry(path=path.encode(), kind=Kind.DIRECTORY, mode=mode))


def plain(path: str, mode: int = 0o644, **more: Any) -> Member:
    return Member(Entry(path=path.encode(), kind=Kind.REGULAR, mode=mode, size=4, **more), b"text")


def symlink(path: str, target: str) -> Member:
    return Member(Entry(path=path.encode(), kind=Kind.SYMLINK, target=target.encode()))


def lower_link(path: str, target: str) -> Member:
    return Member(Entry(path=path.encode(), kind=Kind.HARD_LINK, target=target.encode()))


def device(path: str, minor: int) -> Member:
    return Member(Entry(path=path.encode(), kind=Kind.CHARACTER, rdev=os.makedev(1, minor)))


BASE = [
    directory("tmp", 0o1777), directory("usr/lib"), symlink("lib", "usr/lib"), plain("usr/lib/so"), plain("etc/passwd"),
    symlink("etc/here", "passwd"), directory("d"), plain("d/x"), plain("f"), directory("proc"), symlink("mtab", "/proc/mounts"),
]  # fmt: skip


def test_a_good_plan_has_no_findings(tmp_path: Path, check: Callable[..., Check]) -> None:
    base = publish(tmp_path, "base", BASE, role="base")
    task = [plain(".wh.f"), plain("d/.wh.x"), lower_link("d/again", "etc/passwd"), plain("lib/more"), directory("tmp/mine")]
    top = publish(tmp_path, "task", task, [plain("d/.wh.again")])
    for result in (check(base), check("--strict", base), check("--strict", "--git", "--below", base, top)):
        assert (result.status, result.result["findings"]) == (0, [])
        assert result.result["counts"] == {"error": 0, "warning": 0, "note": 0}


@pytest.mark.parametrize(
    ("member", "code", "severity", "path"),
    [
        (plain("d/.wh.nothing"), "whiteout-of-nothing", "warning", "d/nothing"),
        (plain("new/.wh..wh..opq"), "opaque-over-nothing", "warning", "new"),
        (lower_link("again", "usr/nothing"), "link-to-nothing", "error", "again"),
        (plain("etc/here/below"), "below-dangling-symlink", "error", "etc/here"),
        (symlink("proc", "/tmp"), "mount-point", "error", "proc"),
        (plain("sys"), "mount-point", "error", "sys"),
        (directory("lib"), "type-changed", "warning", "lib"),
        (plain("d"), "type-changed", "warning", "d"),
        (directory("f"), "type-changed", "warning", "f"),
        (symlink("d/up", "../../etc/passwd"), "symlink-leaves-root", "warning", "d/up"),
        (symlink("d/away", "/usr/gone"), "symlink-dangles", "warning", "d/away"),
        (symlink("d/away", "gone"), "symlink-dangles", "note", "d/away"),
        (symlink("loop", "/loop"), "symlink-dangles", "warning", "loop"),
        (plain("etc/.wh.passwd"), "symlink-broken", "warning", "etc/here"),
        (plain("proc/x"), "hidden-by-mount", "warning", "proc/x"),
        (device("dev/null", 3), "hidden-by-mount", "warning", "dev/null"),
        (device("d/null", 3), "device", "note", "d/null"),
        (device("d/mem", 1), "device", "warning", "d/mem"),
        (symlink("tmp", "d"), "shared-directory", "warning", "tmp"),
        (directory("tmp", 0o755), "shared-directory", "warning", "tmp"),
        (symlink("etc/hosts", "passwd"), "name-resolution", "warning", "etc/hosts"),
        (symlink("etc/resolv.conf", "/run/resolv.conf"), "name-resolution", "note", "etc/resolv.conf"),
        (directory("etc/resolv.conf"), "name-resolution", "warning", "etc/resolv.conf"),
        (plain("open", 0o666), "world-writable", "warning", "open"),
        (directory("open", 0o777), "world-writable", "warning", "open"),
        (plain("su", 0o4755), "setuid", "note", "su"),
        (plain("chage", 0o2755), "setgid", "note", "chage"),
        (plain("ping", 0o755, xattrs={b"security.capability": b"\1\0\0\2" + bytes(16)}), "capability", "note", "ping"),
    ],
)  # fmt: skip
def test_each_kind_is_found(
    member: Member, code: str, severity: str, path: str, tmp_path: Path, check: Callable[..., Check]
) -> None:
    base = publish(tmp_path, "base", BASE)
    result = check("--below", base, publish(tmp_path, "task", [member]))
    assert [(found["severity"], found["path"]) for found in result.codes()[code]] == [(severity, path)]
    assert set(result.codes("error", "warning")) <= {code, "type-changed"}  # which some of them are too
    assert result.status == (1 if severity == "error" else 0)
    assert check("--strict", "--below", base, f"oci:{tmp_path}/layout:task").status == (0 if severity == "note" else 1)


@given(strategies.layer_stacks(), st.data())
def test_findings_say_what_a_node_refuses_and_which_whiteouts_do_nothing(stack: list[strategies.Layer], data: st.DataObject) -> None:
    layers = open_layers([encode_layer(layer) for layer in stack])
    below = data.draw(st.integers(0, len(layers) - 1))
    with PlannedRanges(None) as ranges:
        _, findings = check_filesystem(Plan(tuple(layers), ("",) * len(layers), below, ranges), complete=True)
    refused = [finding for finding in findings if finding.code in ("link-to-nothing", "below-dangling-symlink")]
    try:
        View(layers)
    except PlanRefused:
        assert refused
        return
    assert not refused
    expected: list[bytes] = []
    for index in range(below, len(layers)):
        known = dict(View(layers[:index]).walk()) if index else {}
        for path in (path for path, number in layers[index].walk() if number is None):
            parents = [path[:at] for at, byte in enumerate(path) if byte == ord("/")]
            if any(isinstance(known.get(parent), File) for parent in parents):
                return  # a parent may be a symlink, through which the path means another one
            expected += [path] if path not in known else []
    assert sorted(finding.path for finding in findings if finding.code == "whiteout-of-nothing") == sorted(expected)


PASSWD = b"root:x:0:0::/root:/bin/sh\nworker:x:1000:100::/:/bin/sh\n"
ACCOUNTS = [
    Member(Entry(path=b"etc/passwd", kind=Kind.REGULAR, size=len(PASSWD)), PASSWD),
    Member(Entry(path=b"etc/group", kind=Kind.REGULAR, size=12), b"staff:x:50:\n"),
    symlink("dir", "etc"), symlink("loop", "loop"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GroupConfig(user="worker:staff", workdir="/dir/new/deep"), []),
        (GroupConfig(user="7:8", workdir="/etc"), []),
        (GroupConfig(user="nobody"), [("error", "user", "etc/passwd")]),
        (GroupConfig(user="worker:wheel"), [("error", "user", "etc/group")]),
        (GroupConfig(user="worker:staff:more"), [("error", "user", "etc/passwd")]),
        (GroupConfig(workdir="/etc/passwd"), [("error", "workdir", "etc/passwd")]),
        (GroupConfig(workdir="/dir/group/below"), [("error", "workdir", "dir/group")]),
        (GroupConfig(workdir="rel/dir"), [("warning", "workdir", "rel/dir")]),
    ],
)
def test_the_user_and_the_working_directory_are_those_of_a_complete_plan(
    config: GroupConfig, expected: list[tuple[str, str, str]], tmp_path: Path, check: Callable[..., Check]
) -> None:
    (tmp_path / "empty").mkdir()
    convert(tmp_path / "empty", tmp_path / "top.weenv")
    push_group(f"oci:{tmp_path}/layout:top", [tmp_path / "top.weenv"], config=config)
    base = publish(tmp_path, "base", ACCOUNTS)
    found = check("--below", base, f"oci:{tmp_path}/layout:top").result["findings"]
    assert [(finding["severity"], finding["code"], finding["path"]) for finding in found] == expected
    assert check(f"oci:{tmp_path}/layout:top").result["findings"] == []


def test_what_is_missing_below_is_a_note_while_it_is_unknown_what_lies_below(tmp_path: Path, check: Callable[..., Check]) -> None:
    task = [plain(".wh.f"), lower_link("d/again", "etc/passwd")]
    result = check(publish(tmp_path, "task", task))
    assert {code: found[0]["severity"] for code, found in result.codes().items()} == {
        "whiteout-of-nothing": "note",
        "link-to-nothing": "note",
    }
    assert set(check(publish(tmp_path, "base", task, role="base")).codes("error", "warning")) == {"whiteout-of-nothing", "link-to-nothing"}


def test_findings_are_of_the_group_and_not_of_those_below(tmp_path: Path, check: Callable[..., Check]) -> None:
    base = publish(tmp_path, "base", [*BASE, plain("open", 0o666), symlink("away", "/nowhere"), device("dev/mem", 1)])
    assert check("--below", base, publish(tmp_path, "task", [plain("new")])).result["findings"] == []


def test_text_names_paths_remedies_and_counts(tmp_path: Path, weenv: Weenv) -> None:
    many = [plain(f"file{number:02}", 0o666) for number in range(12)]
    reference = publish(tmp_path, "base", many, role="base")
    answer = weenv("group", "check", reference)
    lines = answer.out.splitlines()
    assert answer.status == OK
    assert lines[0] == "warning world-writable (12)"
    assert lines[1] == "  /file00 has mode 0666: any user can change it"
    assert lines[11:13] == ["  and 2 more; --all lists them", "  → chmod o-w"]
    assert lines[-1].endswith(": 0 errors, 12 warnings, 0 notes")
    assert "  /file11 has mode 0666: any user can change it" in weenv("group", "check", "--all", reference).out.splitlines()


def test_refusals(tmp_path: Path, weenv: Weenv) -> None:
    reference = publish(tmp_path, "base", BASE)
    assert weenv("group", "check", f"oci:{tmp_path}/layout:none").status == NOT_FOUND
    refused = weenv("group", "check", "--fix", f"oci:{tmp_path}/layout:new", reference)
    assert refused.status == USAGE
    assert "expected --git with it" in refused.err
    blob = max((tmp_path / "layout/blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(blob.read_bytes())
    data[-90] ^= 1  # of the TOC
    blob.write_bytes(data)
    assert weenv("group", "check", reference).status == INTEGRITY


# Repositories


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of two commits on `main`, with nothing else in it."""
    path = tmp_path_factory.mktemp("template") / "src"
    path.mkdir()
    git(path, "init", "--quiet", "--initial-branch=main", "--template=")
    for number in (1, 2):
        (path / "file").write_text(f"version {number}\n")
        (path / f"other{number}").write_text(f"{number}\n" * 1000)
        git(path, "add", ".")
        git(path, "commit", "--quiet", "--message", f"Commit {number}")
    return path


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    """A root directory with a copy of it in /src."""
    (tmp_path / "root").mkdir()
    subprocess.run(["cp", "-a", template, tmp_path / "root/src"], check=True)
    return tmp_path / "root"


def fix_commit(repository: Path) -> str:
    """A commit beyond HEAD that nothing names, with no reflog of it."""
    blob = git(repository, "hash-object", "-w", "--stdin", stdin=b"the fix\n")
    tree = git(repository, "mktree", stdin=f"100644 blob {blob}\tfile\n".encode())
    return git(repository, "commit-tree", "-p", "HEAD", "-m", "The secret fix", tree)


def ref(name: str) -> Callable[[Path], None]:
    return lambda repository: git(repository, "update-ref", name, fix_commit(repository)) and None


def plant_stash(repository: Path) -> None:
    (repository / "file").write_text("the fix\n")
    git(repository, "stash")


def plant_annotated_tag(repository: Path) -> None:
    git(repository, "tag", "-a", "-m", "Release", "v2", fix_commit(repository))


def plant_packed_ref(repository: Path) -> None:
    git(repository, "update-ref", "refs/heads/next", fix_commit(repository))
    git(repository, "pack-refs", "--all", "--prune")


def plant_shadowed_packed_ref(repository: Path) -> None:
    before = git(repository, "rev-parse", "HEAD")
    plant_packed_ref(repository)
    (repository / ".git/refs/heads/next").write_text(before + "\n")


def plant_reflog(repository: Path) -> None:
    git(repository, "checkout", "--quiet", "--detach", fix_commit(repository))
    git(repository, "checkout", "--quiet", "main")


def plant_reflog_of_a_lost_commit(repository: Path) -> None:
    plant_reflog(repository)
    git(repository, "-c", "gc.reflogExpire=never", "-c", "gc.reflogExpireUnreachable=never", "gc", "--quiet")
    log = (repository / ".git/logs/HEAD").read_text()
    git(repository, "reflog", "expire", "--expire=now", "--all")
    git(repository, "gc", "--quiet", "--prune=now")
    (repository / ".git/logs/HEAD").write_text(log)


def plant_file(name: str) -> Callable[[Path], None]:
    return lambda repository: (repository / ".git" / name).write_text(fix_commit(repository) + "\n") and None


def plant_packed_blob(repository: Path) -> None:
    blob = git(repository, "hash-object", "-w", "--stdin", stdin=b"the fix\n")
    git(repository, "pack-objects", "--quiet", ".git/objects/pack/pack", stdin=f"{blob}\n".encode())
    git(repository, "prune-packed", "--quiet")
    assert not (repository / ".git/objects" / blob[:2] / blob[2:]).exists()


def plant_alternates(repository: Path) -> None:
    other = repository.parent / "other.git"
    git(repository, "init", "--quiet", "--bare", "--template=", str(other))
    git(other, "hash-object", "-w", "--stdin", stdin=b"the fix\n")
    (repository / ".git/objects/info").mkdir(exist_ok=True)
    (repository / ".git/objects/info/alternates").write_text("/other.git/objects\n")


def plant_staged(repository: Path) -> None:
    (repository / "file").write_text("the fix\n")
    git(repository, "add", "file")


def plant_pack_without_index(repository: Path) -> None:
    plant_packed_blob(repository)
    (index,) = (repository / ".git/objects/pack").glob("*.idx")
    index.unlink()


def plant_worktree(repository: Path) -> None:
    git(repository, "worktree", "add", "--quiet", "--detach", str(repository.parent / "linked"), fix_commit(repository))
    (repository.parent / "linked/.git").write_text("gitdir: /src/.git/worktrees/linked\n")


def plant_lost_worktree(repository: Path) -> None:
    plant_worktree(repository)
    shutil.rmtree(repository.parent / "linked")


def plant_worktree_of_a_branch(repository: Path) -> None:
    git(repository, "update-ref", "refs/heads/next", fix_commit(repository))
    git(repository, "worktree", "add", "--quiet", str(repository.parent / "linked"), "next")


def plant_worktree_state(name: str) -> Callable[[Path], None]:
    def plant(repository: Path) -> None:
        git(repository, "worktree", "add", "--quiet", "--detach", str(repository.parent / "linked"))
        path = repository / ".git/worktrees/linked" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(fix_commit(repository) + "\n")

    return plant


def plant_staged_in_worktree(repository: Path) -> None:
    git(repository, "worktree", "add", "--quiet", "--detach", str(repository.parent / "linked"))
    plant_staged(repository.parent / "linked")


def plant_worktree_reflog(repository: Path) -> None:
    git(repository, "worktree", "add", "--quiet", "--detach", str(repository.parent / "linked"))
    plant_reflog_between(repository.parent / "linked", fix_commit(repository))


def plant_reflog_between(repository: Path, commit: str) -> None:
    git(repository, "checkout", "--quiet", "--detach", commit)
    git(repository, "checkout", "--quiet", "--detach", "main")


def plant_lost_found(repository: Path) -> None:
    fix_commit(repository)
    git(repository, "fsck", "--lost-found")


def plant_lost_found_of_what_is_gone(repository: Path) -> None:
    git(repository, "hash-object", "-w", "--stdin", stdin=b"the fix\n")
    git(repository, "fsck", "--lost-found")
    git(repository, "gc", "--quiet", "--prune=now")


def plant_rebase(repository: Path) -> None:
    (repository / ".git/rebase-merge").mkdir()
    (repository / ".git/rebase-merge/head-name").write_text("refs/heads/main\n")


def plant_grafts(repository: Path) -> None:
    (repository / ".git/info").mkdir(exist_ok=True)
    (repository / ".git/info/grafts").write_text(f"{git(repository, 'rev-parse', 'HEAD')}\n")


def plant_hook(repository: Path) -> None:
    (repository / ".git/hooks").mkdir(exist_ok=True)
    (repository / ".git/hooks/post-checkout").write_text("#!/bin/sh\n")
    (repository / ".git/hooks/post-checkout").chmod(0o755)


def plant_message(repository: Path) -> None:
    (repository / ".git/COMMIT_EDITMSG").write_text("The secret fix\n")


def plant_setting(key: str, value: str) -> Callable[[Path], None]:
    return lambda repository: git(repository, "config", key, value) and None


LEAKS: dict[str, tuple[Callable[[Path], None], str, str, str]] = {
    "branch": (ref("refs/heads/next"), "git-branch", "error", "The secret fix"),
    "packed branch": (plant_packed_ref, "git-branch", "error", "The secret fix"),
    "shadowed packed ref": (plant_shadowed_packed_ref, "git-state", "error", "The secret fix"),
    "tag": (ref("refs/tags/v2"), "git-tag", "error", "The secret fix"),
    "annotated tag": (plant_annotated_tag, "git-tag", "error", "The secret fix"),
    "remote ref": (ref("refs/remotes/origin/main"), "git-remote-branch", "error", "The secret fix"),
    "note": (lambda repository: git(repository, "notes", "add", "-m", "see the fix") and None, "git-notes", "error", "Notes added"),
    "replacement": (
        lambda repository: git(repository, "replace", "HEAD~1", fix_commit(repository)) and None, "git-replace", "error", "The secret fix",
    ),
    "pull request": (ref("refs/pull/1/head"), "git-ref", "error", "The secret fix"),
    "stash": (plant_stash, "git-stash", "error", "WIP on main"),
    "reflog": (plant_reflog, "git-reflog", "error", "The secret fix"),
    "reflog of a lost commit": (plant_reflog_of_a_lost_commit, "git-reflog", "warning", "checkout: moving from main to"),
    "ORIG_HEAD": (plant_file("ORIG_HEAD"), "git-state", "error", "The secret fix"),
    "FETCH_HEAD": (plant_file("FETCH_HEAD"), "git-state", "error", "The secret fix"),
    "dangling commit": (lambda repository: fix_commit(repository) and None, "git-unreachable", "error", "The secret fix"),
    "dangling blob in a pack": (plant_packed_blob, "git-unreachable", "error", "blob of 8 bytes"),
    "staged": (plant_staged, "git-staged", "error", "file"),
    "worktree": (plant_worktree, "git-worktree", "error", "The secret fix"),
    "worktree that is not there": (plant_lost_worktree, "git-worktree", "error", "The secret fix"),
    "worktree of a branch": (plant_worktree_of_a_branch, "git-worktree", "error", "The secret fix"),
    "worktree's ORIG_HEAD": (plant_worktree_state("ORIG_HEAD"), "git-worktree", "error", "The secret fix"),
    "worktree's ref": (plant_worktree_state("refs/bisect/bad"), "git-worktree", "error", "The secret fix"),
    "worktree's reflog": (plant_worktree_reflog, "git-worktree", "error", "The secret fix"),
    "staged in a worktree": (plant_staged_in_worktree, "git-staged", "error", "file"),
    "lost and found": (plant_lost_found, "git-lost-found", "error", "The secret fix"),
    "lost and found, gone": (plant_lost_found_of_what_is_gone, "git-lost-found", "error", "8 bytes of an object that is not here"),
    **{
        f"{name} lock": (plant_file(f"{name}.lock"), "git-lock", "warning", "")
        for name in ("index", "HEAD", "config", "packed-refs", "refs/heads/main")
    },
    "alternates": (plant_alternates, "git-alternates", "warning", "/other.git/objects"),
    "pack without index": (plant_pack_without_index, "git-pack", "warning", ""),
    "rebase": (plant_rebase, "git-operation", "warning", ""),
    "grafts": (plant_grafts, "git-grafts", "warning", ""),
    "alias": (plant_setting("alias.st", "!touch /x"), "git-program", "warning", ""),
    "password": (plant_setting("remote.origin.url", "https://me:secret@host/x"), "git-credentials", "warning", ""),
    "remote": (plant_setting("remote.origin.url", "https://host/x"), "git-remote", "note", ""),
    "hook": (plant_hook, "git-hook", "note", ""),
    "message": (plant_message, "git-message", "note", ""),
}  # fmt: skip


@pytest.mark.parametrize("leak", LEAKS)
def test_every_planted_leak_is_found(leak: str, root: Path, tmp_path: Path, check: Callable[..., Check]) -> None:
    plant, code, severity, said = LEAKS[leak]
    before = check("--git", publish(tmp_path, "clean", root)).codes()
    plant(root / "src")
    after = check("--git", publish(tmp_path, "task", root))
    found = [finding for finding in after.codes()[code] if finding not in before.get(code, [])]
    found = [finding for finding in found if finding["severity"] == severity]
    assert found[0]["path"].startswith("src/.git")
    assert any(said in line for line in (*found[0]["details"], "" if not said else "-"))
    assert "secret@" not in json.dumps(after.result)
    assert after.status == (1 if after.result["counts"]["error"] else 0)


@pytest.mark.parametrize("leak", [leak for leak in LEAKS if "worktree" in leak or "lost" in leak or "lock" in leak])
def test_the_remedies_help(leak: str, root: Path, tmp_path: Path, check: Callable[..., Check]) -> None:
    """They are done as they are said, except that a path of the plan is one below the root."""
    LEAKS[leak][0](root / "src")
    found = check("--git", publish(tmp_path, "leaky", root)).codes("error", "warning")
    del found["git-status-reads"]
    findings = [finding for each in found.values() for finding in each]
    is_linked = (root / "linked").exists()
    if is_linked:
        (root / "linked/.git").write_text(f"gitdir: {root}/src/.git/worktrees/linked\n")
    steps = [
        (step, finding)
        for finding in sorted(findings, key=lambda finding: finding["code"] not in ("git-lock", "git-worktree"))
        for step in finding["remedy"].split(", then ")
        if finding["code"] != "git-gitfile"
    ]
    done = set()
    for step, finding in steps:
        there, _, away = step.partition(" where it still is, else ")
        command = (there if is_linked or not away else away).replace(" /linked", f" {root}/linked")
        if command == "remove it":
            (root / finding["path"]).unlink()
        elif command.startswith("rm -r "):
            shutil.rmtree(root / "src/.git" / command.removeprefix("rm -r "))
        elif command == "git branch -D":
            git(root / "src", "branch", "-D", "next")
        elif command not in done:
            git(root / "src", *command.removeprefix("git ").split())
            if "worktree" in command:
                done.add(command)
    assert set(check("--git", publish(tmp_path, "clean", root)).codes("error", "warning")) == {"git-status-reads"}


def test_a_linked_worktree_is_named_with_its_remedy(root: Path, tmp_path: Path, check: Callable[..., Check]) -> None:
    plant_worktree(root / "src")
    codes = check("--git", publish(tmp_path, "there", root)).codes("error", "warning")
    assert set(codes) == {"git-worktree", "git-status-reads"}  # what it holds is not said to be held by nothing
    head = codes["git-worktree"][0]
    assert (head["path"], head["remedy"]) == (
        "src/.git/worktrees/linked/HEAD", "git worktree remove --force /linked, then git gc --prune=now",
    )  # fmt: skip
    assert head["what"].endswith("its work tree is /linked")
    git(root / "src", "worktree", "lock", "linked")
    shutil.rmtree(root / "linked")
    kept = check("--git", publish(tmp_path, "away", root)).codes("warning")["git-worktree"][0]
    remedy = f"git worktree unlock linked, then git worktree remove --force {root}/linked where it still is, else git worktree prune"
    assert kept["remedy"] == f"{remedy}, then git gc --prune=now"
    assert kept["what"].endswith(f"not in the plan, but was at {root}/linked")


def test_a_separate_git_directory_is_looked_at_or_said_not_to_be(
    template: Path, tmp_path: Path, check: Callable[..., Check], weenv: Weenv
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    git(tmp_path, "clone", "--quiet", "--template=", f"--separate-git-dir={root}/repo.git", str(template), str(root / "src"))
    codes = check("--git", publish(tmp_path, "away", root)).codes()
    assert [finding["path"] for finding in codes["git-gitfile"]] == ["src/.git"]
    assert f"but to {root}/repo.git" in codes["git-gitfile"][0]["what"]
    assert [finding["path"] for finding in codes["git-no-worktree"]] == ["repo.git/index"]
    fixed = check("--git", "--fix", f"oci:{tmp_path}/layout:fixed", f"oci:{tmp_path}/layout:away").result["fixed"]
    assert fixed["skipped"] == ["/repo.git/index: no work tree of the plan leads to it", "/src/.git: leads to no repository of the plan"]

    pushed = weenv("group", "push", "--fix-git", "--rootfs", root, f"oci:{tmp_path}/layout:pushed")
    assert pushed.status == OK
    assert f"weenv: {root}/src/.git: its repository is elsewhere, and is not looked at before it is packed: left as it is" in pushed.err

    (root / "src/.git").write_text("gitdir: /repo.git\n")
    codes = check("--git", publish(tmp_path, "here", root)).codes()
    assert [finding["path"] for finding in codes["git-status-reads"]] == ["repo.git/index"]
    assert not {"git-gitfile", "git-no-worktree"} & set(codes)
    (root / "src/.git").unlink()
    (root / "src/.git").symlink_to("../repo.git")
    assert "git-status-reads" in check("--git", publish(tmp_path, "symlink", root)).codes()


def test_a_clean_shallow_clone_gives_nothing(template: Path, tmp_path: Path, check: Callable[..., Check]) -> None:
    (tmp_path / "root").mkdir()
    git(tmp_path, "clone", "--quiet", "--template=", "--depth=1", f"file://{template}", str(tmp_path / "root/src"))
    git(tmp_path / "root/src", "remote", "remove", "origin")
    assert repair_tree(tmp_path / "root").skipped == ()
    for index, said in (("packed", []), ("bare", ["git-no-worktree"])):
        result = check("--git", "--strict", publish(tmp_path, index, tmp_path / "root", role="base"))
        assert (result.status, [finding["code"] for finding in result.result["findings"]]) == (0, said)
        (tmp_path / "root/src/.git").rename(tmp_path / "root/bare.git") if index == "packed" else None


def test_bare_repositories_and_submodules_are_looked_into(root: Path, tmp_path: Path, check: Callable[..., Check]) -> None:
    git(root / "src", "update-ref", "refs/heads/next", fix_commit(root / "src"))
    subprocess.run(["cp", "-a", root / "src/.git", root / "bare.git"], check=True)
    (root / "super/.git/modules").mkdir(parents=True)
    subprocess.run(["mv", root / "src/.git", root / "super/.git/modules/sub"], check=True)
    (root / "src").rename(root / "super/sub")
    (root / "super/sub/.git").write_text("gitdir: ../.git/modules/sub\n")
    result = check("--git", publish(tmp_path, "task", root))
    assert {finding["path"].partition("/refs")[0] for finding in result.codes()["git-branch"]} == {"bare.git", "super/.git/modules/sub"}
    assert [finding["path"] for finding in result.codes()["git-status-reads"]] == ["super/.git/modules/sub/index"]


HOSTILE = """
[core]
\tfsmonitor = touch {marker}
\thooksPath = {hooks}
\tsshCommand = touch {marker}
\tworktree = /
\tpager = touch {marker}
[alias]
\tlog = !touch {marker}
\tcat-file = !touch {marker}
[filter "x"]
\tclean = touch {marker}
\tsmudge = touch {marker}
[include]
\tpath = {included}
[diff]
\texternal = touch {marker}
"""


def test_a_hostile_repository_runs_nothing_and_reads_nothing_of_ours(
    root: Path, template: Path, tmp_path: Path, check: Callable[..., Check]
) -> None:
    marker, secret = tmp_path / "marker", tmp_path / "secret"
    secret.mkdir()
    git(secret, "init", "--quiet", "--bare", "--template=")
    git(secret, "hash-object", "-w", "--stdin", stdin=b"of the machine\n")
    (tmp_path / "included").write_text(f"[remote \"ours\"]\n\turl = https://ours/\n[core]\n\tfsmonitor = touch {marker}\n")
    git_directory = root / "src/.git"
    with (git_directory / "config").open("a") as config:
        config.write(HOSTILE.format(marker=marker, hooks=git_directory / "hooks", included=tmp_path / "included"))
    (git_directory / "hooks").mkdir()
    for name in ("post-index-change", "reference-transaction", "fsmonitor-watchman"):
        (git_directory / "hooks" / name).write_text(f"#!/bin/sh\ntouch {marker}\n")
        (git_directory / "hooks" / name).chmod(0o755)
    (root / "src/.gitattributes").write_text("* filter=x diff=x\n")
    (git_directory / "objects/info").mkdir(exist_ok=True)
    (git_directory / "objects/info/alternates").write_text(f"{secret}/objects\n")
    (git_directory / "commondir").write_text(f"{secret}\n")
    (git_directory / "refs/heads/host").symlink_to("/etc/passwd")
    reference = publish(tmp_path, "task", root)
    result = check("--git", "--fix", f"oci:{tmp_path}/layout:fixed", reference)
    repair_index(root / "src")
    assert not marker.exists()
    assert "git-unreadable" not in result.codes()
    assert "git-unreachable" not in result.codes()
    assert len(result.codes()["git-program"]) >= 9
    assert "https://ours/" not in json.dumps(result.result)


@pytest.mark.parametrize("damage", ["HEAD", "packed-refs", "index", "config", "pack"])
def test_a_damaged_repository_is_said_to_be_one(damage: str, root: Path, tmp_path: Path, check: Callable[..., Check]) -> None:
    git(root / "src", "gc", "--quiet")
    path = root / "src/.git" / damage
    if damage == "pack":
        (path,) = (root / "src/.git/objects/pack").glob("*.idx")
        path.chmod(0o644)
    path.write_bytes(b"\xff[noise\n")
    result = check("--git", publish(tmp_path, "task", root))
    codes = set(result.codes("error", "warning"))
    assert codes & {"git-unreadable", "git-index", "git-unreachable", "git-branch", "git-staged"}
    assert damage != "config" or "git-unreadable" in codes


def test_only_git_directories_are_fetched(root: Path, tmp_path: Path, check: Callable[..., Check]) -> None:
    (root / "large").write_bytes(make_content(8 << 20, 1, False))
    result = check("--git", publish(tmp_path, "task", root))
    assert result.result["fetched"]["bytes"] < 1 << 20


# The index


@pytest.fixture
def many_files(tmp_path: Path) -> Path:
    """A root directory with a repository of 300 files, a symlink and an executable."""
    path = tmp_path / "root/src"
    path.mkdir(parents=True)
    git(path, "init", "--quiet", "--initial-branch=main", "--template=")
    for number in range(300):
        file = path / f"package{number % 7}" / f"module{number}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"value = {number}\n")
    (path / "link").symlink_to("package0/module0.py")
    (path / "run").write_text("#!/bin/sh\n")
    (path / "run").chmod(0o755)
    git(path, "add", ".")
    git(path, "commit", "--quiet", "--message", "All")
    return tmp_path / "root"


def opened_by_git_status(worktree: Path, scratch: Path) -> tuple[int, str]:
    """How many tracked files `git status` opens, and what it prints."""
    trace = scratch / "trace"
    command = ["strace", "-f", "-z", "-e", "trace=openat,open", "-o", trace, "git", "-c", "safe.directory=*", "status", "--porcelain"]
    environment = {**GIT_ENVIRONMENT, "GIT_OPTIONAL_LOCKS": "0"}
    result = subprocess.run(command, cwd=worktree, env=environment, capture_output=True, text=True, check=True)
    tracked = set(git(worktree, "-c", "safe.directory=*", "ls-files").splitlines())
    opened = {line.split('"')[1] for line in trace.read_text().splitlines() if '"' in line and "O_DIRECTORY" not in line}
    return len(opened & tracked), result.stdout


def test_after_the_fix_git_status_reads_nothing(many_files: Path, tmp_path: Path, check: Callable[..., Check]) -> None:
    (many_files / "src/package1/module1.py").write_text("value = 9\n")  # another content of the same size, in the same second
    layout = f"oci:{tmp_path}/layout"
    os.chown(many_files / "src/.git/index", 1000, 1001)
    (many_files / "src/.git/index").chmod(0o640)
    before = check("--git", publish(tmp_path, "task", many_files))
    (finding,) = before.codes()["git-status-reads"]
    assert finding["what"] == "makes git status read 301 of 302 files"
    fixed = check("--git", "--fix", f"{layout}:fixed", f"{layout}:task")
    (worktree,) = fixed.result["fixed"]["worktrees"]
    assert worktree == {"path": "src", "changed": True, "clean": 301, "different": ["src/package1/module1.py"[4:]], "missing": 0}
    reference = fixed.result["fixed"]["reference"]
    assert reference.startswith(f"{layout}:fixed@sha256:")
    old, new = resolve_group(f"{layout}:task"), resolve_group(reference)
    assert (new.layers[:-1], new.config, new.role) == (old.layers, old.config, old.role)
    with mounted(tmp_path / "mnt", f"{layout}:task"):
        assert opened_by_git_status(tmp_path / "mnt/src", tmp_path) == (301, " M package1/module1.py\n")
    with mounted(tmp_path / "mnt", reference):
        assert opened_by_git_status(tmp_path / "mnt/src", tmp_path) == (1, " M package1/module1.py\n")
        status = (tmp_path / "mnt/src/.git/index").stat()
        assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (1000, 1001, 0o640)
        assert (tmp_path / "mnt/src").stat().st_mtime_ns == (many_files / "src").stat().st_mtime_ns
    after = check("--git", "--fix", f"{layout}:again", reference)
    (finding,) = after.codes()["git-status-reads"]
    assert finding["what"] == "makes git status read 1 of 302 files"
    assert after.result["fixed"]["worktrees"][0]["changed"] is False
    assert resolve_group(after.result["fixed"]["reference"]).layers == new.layers


@pytest.mark.parametrize("check_stat", ["default", "minimal"])
@pytest.mark.parametrize("index_age_s", [-5, 0, 5])
def test_what_git_status_would_read_is_what_it_reads(check_stat: str, index_age_s: int, many_files: Path, tmp_path: Path) -> None:
    source, copy = many_files / "src", tmp_path / "copy"
    at = 1_700_000_000
    for number, path in enumerate(sorted(source.glob("package*/*"))):
        os.utime(path, (at - number % 2 * 100, at - number % 2 * 100))
    git(source, "update-index", "--refresh")
    (source / "package0/module0.py").write_text("longer than before\n")
    (source / "package1/module1.py").unlink()
    (source / "package2/module2.py").unlink()
    (source / "package2/module2.py").symlink_to("nowhere")
    os.utime(source / "package3/module3.py", (at + 50, at + 50))
    os.utime(source / ".git/index", (at + index_age_s, at + index_age_s))
    git(source, "config", "core.checkStat", check_stat)
    subprocess.run(["cp", "-a", source, copy], check=True)
    index = GitIndex((copy / ".git/index").read_bytes(), "sha1")
    mtime_ns = (copy / ".git/index").stat().st_mtime_ns
    cost = status_cost(index, mtime_ns, DirectoryTree(os.fsencode(copy)), minimal=check_stat == "minimal")
    assert cost.entries == 302
    assert opened_by_git_status(copy, tmp_path)[0] == cost.reads


def test_a_full_disk_is_named(root: Path, tmp_path: Path, weenv: Weenv, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "src/large").write_bytes(make_content(1 << 20, 1, False))
    git(root / "src", "add", "large")
    reference = publish(tmp_path, "task", root)
    full = tmp_path / "full"
    full.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", full], check=True)
    try:
        monkeypatch.setattr(tempfile, "tempdir", str(full))
        ran = weenv("group", "check", "--git", reference)
        assert ran.status == CAPACITY
        assert ran.err == f"weenv: {full}: No space left on device; make room there, or set $TMPDIR to a directory that has some\n"
    finally:
        subprocess.run(["umount", full], check=True)


def test_linked_worktrees_are_repaired_too(root: Path, tmp_path: Path, check: Callable[..., Check]) -> None:
    git(root / "src", "worktree", "add", "--quiet", "--detach", str(root / "linked"))
    (root / "linked/.git").write_text("gitdir: /src/.git/worktrees/linked\n")
    result = check("--git", "--fix", f"oci:{tmp_path}/layout:fixed", publish(tmp_path, "task", root))
    assert [finding["path"] for finding in result.codes()["git-status-reads"]] == ["src/.git/index", "src/.git/worktrees/linked/index"]
    assert [(each["path"], each["clean"]) for each in result.result["fixed"]["worktrees"]] == [("src", 3), ("linked", 3)]
    assert "git-status-reads" not in check("--git", f"oci:{tmp_path}/layout:fixed").codes()


def test_a_directory_is_repaired_before_it_is_packed(many_files: Path, tmp_path: Path, check: Callable[..., Check]) -> None:
    index = many_files / "src/.git/index"
    before = index.stat(), (many_files / "src/.git").stat()
    (repair,) = repair_tree(many_files).repairs
    assert (repair.changed, repair.clean, repair.different, repair.missing) == (True, 302, (), 0)
    assert (index.stat().st_mode, (many_files / "src/.git").stat().st_mtime_ns) == (before[0].st_mode, before[1].st_mtime_ns)
    assert git(many_files / "src", "config", "core.checkStat") == "minimal"
    assert list((many_files / "src/.git").glob("*.lock")) == []
    assert repair_index(many_files / "src").changed is False
    assert git(many_files / "src", "fsck", "--strict") == ""
    assert opened_by_git_status(many_files / "src", tmp_path) == (0, "")
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-a", many_files, copy], check=True)
    assert opened_by_git_status(copy / "src", tmp_path) == (0, "")
    assert "git-status-reads" not in check("--git", publish(tmp_path, "task", many_files)).codes()


@pytest.mark.parametrize("version", [2, 3, 4])
@pytest.mark.parametrize("object_format", ["sha1", "sha256"])
def test_every_version_of_the_index_is_repaired_in_place(version: int, object_format: str, tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet", "--template=", f"--object-format={object_format}", "src")
    path = tmp_path / "src"
    for name in ("a", "deep/" * 40 + "file", "abc" * 60, "näme", "skipped", "added"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(name)
    git(path, "add", ".")
    git(path, "commit", "--quiet", "--message", "All")
    git(path, "update-index", f"--index-version={version}")
    if version > 2:
        git(path, "update-index", "--skip-worktree", "skipped")
    git(path, "update-index", "--untracked-cache", "--assume-unchanged", "added")
    before = git(path, "ls-files", "--stage", "-v", "-t")
    data = (path / ".git/index").read_bytes()
    index = GitIndex(data, object_format)
    assert (index.version, index.to_bytes()) == (version, data)
    shown = git(path, "-c", "core.quotePath=false", "ls-files", "--stage", "-z").split("\0")
    assert [f"{entry.mode:o} {entry.oid} {entry.stage}\t{entry.path.decode()}" for entry in index.entries] == shown[:-1]
    repair_index(path)
    assert git(path, "ls-files", "--stage", "-v", "-t") == before
    assert GitIndex((path / ".git/index").read_bytes(), object_format).extensions == index.extensions
    debug = git(path, "ls-files", "--debug", "--", "abc" * 60)
    status = (path / ("abc" * 60)).stat()
    assert f"mtime: {int(status.st_mtime)}:{status.st_mtime_ns % 10**9}" in debug
    assert opened_by_git_status(path, tmp_path) == (0, "")


def test_an_index_of_other_bytes_is_refused(template: Path) -> None:
    data = (template / ".git/index").read_bytes()
    for cut in range(0, len(data), 7):
        with pytest.raises(IndexDamaged):
            GitIndex(data[:cut], "sha1")
        with pytest.raises(IndexDamaged):
            GitIndex(data[:cut] + bytes(20), "sha1")  # without a checksum to fail first
    with pytest.raises(IndexDamaged, match="checksum"):
        GitIndex(data[:50] + bytes([data[50] ^ 1]) + data[51:], "sha1")


def damage_index(repository: Path) -> None:
    (repository / ".git/index").write_bytes(b"DIRC noise")


def damage_config(repository: Path) -> None:
    (repository / ".git/config").write_text("[core\n")


def lock_index(repository: Path) -> None:
    (repository / ".git/index.lock").touch()


def remove_config(repository: Path) -> None:
    (repository / ".git/config").unlink()


@pytest.mark.parametrize("damage", [damage_index, damage_config, lock_index, remove_config])
def test_a_repository_that_cannot_be_repaired_keeps_none_from_it(
    damage: Callable[[Path], None], root: Path, tmp_path: Path, weenv: Weenv
) -> None:
    for name in ("a", "z"):  # one before, and one behind
        subprocess.run(["cp", "-a", root / "src", root / name], check=True)
    damage(root / "src")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (root / "src/.git").rglob("*") if path.is_file()}
    ran = weenv("group", "push", "--fix-git", "--rootfs", root, f"oci:{tmp_path}/layout:t")
    assert (ran.status, ran.out) == (1, "")
    assert "1 of 3 repositories cannot be repaired; nothing is published" in ran.err
    assert f"{root}/src" in ran.err.splitlines()[0]
    assert before == {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (root / "src/.git").rglob("*") if path.is_file()}
    for name in ("a", "z"):
        assert git(root / name, "config", "core.checkStat") == "minimal"
        assert opened_by_git_status(root / name, tmp_path) == (0, "")
    assert weenv("group", "push", "--rootfs", root, f"oci:{tmp_path}/layout:t").status == OK


def test_both_files_of_a_repair_are_replaced_or_none(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: (root / "src/.git" / name).read_bytes() for name in ("config", "index")}
    real = shutil.copystat
    for failing in range(2):
        written = itertools.count()

        def copystat(*arguments: Any, written: Any = written, failing: int = failing, **options: Any) -> None:
            if next(written) == failing:
                raise OSError(errno.ENOSPC, "full")
            real(*arguments, **options)

        monkeypatch.setattr(shutil, "copystat", copystat)
        with pytest.raises(OSError, match="full"):
            repair_index(root / "src")
        monkeypatch.undo()
        assert before == {name: (root / "src/.git" / name).read_bytes() for name in before}
        assert list((root / "src/.git").glob("*.lock")) == []


def test_what_cannot_be_repaired_is_left_as_it_is(root: Path, tmp_path: Path, check: Callable[..., Check]) -> None:
    git(root / "src", "update-index", "--split-index")
    before = (root / "src/.git/index").read_bytes(), (root / "src/.git/config").read_bytes()
    with pytest.raises(RepairRefused, match="split index"):
        repair_index(root / "src")
    assert before == ((root / "src/.git/index").read_bytes(), (root / "src/.git/config").read_bytes())
    result = check("--git", "--fix", f"oci:{tmp_path}/layout:fixed", publish(tmp_path, "task", root))
    assert "split index" in result.result["fixed"]["skipped"][0]
    (tmp_path / "real").write_bytes(before[1])
    (root / "src/.git/config").unlink()
    (root / "src/.git/config").symlink_to(tmp_path / "real")
    with pytest.raises(RepairRefused, match="expected a file of the repository itself"):
        repair_index(root / "src")
    assert (tmp_path / "real").read_bytes() == before[1]


def test_a_fixed_group_goes_from_a_layout_to_a_registry_and_within_it(root: Path, tmp_path: Path, check: Callable[..., Check]) -> None:
    base = publish(tmp_path, "base", BASE)
    task = publish(tmp_path, "task", root, role="task")
    with run_registry(tmp_path / "registry") as registry:
        first = check("--below", base, "--git", "--fix", f"{registry.host}/group:fixed", task)
        group = resolve_group(first.result["fixed"]["reference"])
        assert group.role == "task"
        assert group.layers[:-1] == resolve_group(task).layers
        again = check("--git", "--fix", f"{registry.host}/group:again", f"{registry.host}/group:fixed")
        assert "git-status-reads" not in again.codes()
        assert resolve_group(again.result["fixed"]["reference"]).layers == group.layers

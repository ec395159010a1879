"""`weenv group build`: what a recipe may say, what it makes, that it makes the same twice, when it is not run at all, and what a
failure leaves: nothing.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import strategies
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st
from layer_model import described
from merge_corners import converted, directory, file, link, opaque, whiteout
from node_process import WEENV, Node, make_base, run_node
from registry_fixture import run_registry
from strategies import write_pax
from test_group_check import git
from weenv_cli import ERROR, NOT_FOUND, OK, USAGE, Ran, isolated_weenv

from envlet.client import Client
from layerformat import Layer, convert
from registry import push_group, resolve_group
from registry.publish import Encoding
from registry.tocs import open_groups
from tools.recipes.keys import build_keys, default_mode, has_key, keys_text
from tools.recipes.layer import encode_diff, survey_diff
from tools.recipes.paths import matcher
from tools.recipes.recipe import DEFAULT_EPOCH_S, load_recipe
from tools.recipes.templates import RecipeError, Renderer

NS_PER_S = 1_000_000_000
LATEST_S = 1 << 63


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with run_node(tmp_path_factory.mktemp("node")) as node:
        yield node


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root of busybox with a project in it."""
    root = tmp_path_factory.mktemp("base") / "root"
    make_base(root)
    for applet in ("mkdir", "wc", "chmod", "echo"):
        (root / "bin" / applet).symlink_to("busybox")
    (root / "project").mkdir()
    (root / "project/old").write_text("old\n")
    (root / "project/kept").write_text("kept\n")
    (root / "tmp").chmod(0o1777)
    (root / "link").symlink_to("project")
    return root


@frozen
class Workshop:
    """A directory with recipes and a layout in it, and the command on a node."""

    home: Path
    node: Node
    weenv: Callable[..., Ran]

    def write(self, recipe: str, name: str = "recipe.toml") -> Path:
        path = self.home / name
        path.write_text(recipe)
        return path

    def build(self, *options: object, recipe: str = "recipe.toml", to: str = "result") -> Ran:
        reference = to if ":" in to else f"oci:{self.home}/groups:{to}"
        return self.weenv("group", "build", self.home / recipe, "--to", reference, "--socket", self.node.socket, *options)

    def built(self, *options: object, **where: str) -> str:
        """The reference, of a build that must succeed."""
        ran = self.build(*options, **where)
        assert ran.status == OK, ran.err
        return ran.out.strip()

    def made(self) -> int:
        """How many environments the node has made."""
        with Client(self.node.socket) as client:
            return int(client.info().statistics["created"])

    def environments(self) -> list[str]:
        with Client(self.node.socket) as client:
            return [environment.id for environment in client.list()]


@pytest.fixture
def workshop(
    node: Node, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Workshop]:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    workshop = Workshop(tmp_path, node, isolated_weenv(tmp_path / "home", monkeypatch, capfd))
    assert workshop.weenv("group", "push", f"oci:{tmp_path}/groups:base", "--rootfs", base, "--role", "base").status == OK
    yield workshop
    assert workshop.environments() == []


def contents(reference: str) -> dict[str, Any]:
    """What the layers of a group say of each path, but for the root."""
    with open_groups([resolve_group(reference)], None) as (_ranges, [layers]):
        return {os.fsdecode(path): row for layer in layers for path, row in described(layer).items() if path}


HEAD = 'name = "made"\nbase = ["oci:groups:base"]\n'
WHOLE = """
name = "greeter"
role = "task"
version = "{{ release }}-1"
base = ["oci:groups:{{ base }}"]
exclude = ["tmp/**"]

[variables]
base = "base"
release = "1.2"

[[files]]
to = "/opt/greet"
contents = "#!/bin/sh\\necho hello {{ release }}\\n"
mode = "0755"

[[files]]
from = "data"
to = "/srv"
owner = "1000:2000"

[[steps]]
run = '''
/opt/greet > work/greeting
touch /tmp/scratch
rm /project/old
'''
workdir = "/srv"

[[steps]]
run = "id -u > mine; echo $NAME > /srv/sub/name"
user = "1000:2000"
workdir = "/srv/sub"
env = { NAME = "{{ release }}" }

[config]
workdir = "/srv/work"
env = { GREETER = "{{ release }}" }
user = "1000"
entrypoint = ["/opt/greet"]
"""


def write_data(home: Path, *, umask: int = 0o022, mtime_s: int = 1_700_000_000) -> None:
    """`data` of the recipe above, as a checkout at some time with some umask leaves it."""
    before = os.umask(umask)
    try:
        (home / "data/sub").mkdir(parents=True)
        (home / "data/words").write_text("a\nb\n")
        (home / "data/run").write_text("#!/bin/sh\n")
        (home / "data/run").chmod(0o755 & ~umask)
        (home / "data/link").symlink_to("words")
    finally:
        os.umask(before)
    for path in (home / "data").rglob("*"):
        os.utime(path, (mtime_s, mtime_s), follow_symlinks=False)


# ---- what is made ----


def test_a_group_is_what_its_steps_changed(workshop: Workshop) -> None:
    workshop.write(WHOLE)
    write_data(workshop.home)
    pinned = workshop.built()
    group = resolve_group(pinned)
    assert (group.role, group.config.workdir, group.config.user) == ("task", "/srv/work", "1000")
    assert (group.config.env, group.config.entrypoint) == (("GREETER=1.2",), ("/opt/greet",))
    rows = contents(pinned)
    assert set(rows) == {
        "opt", "opt/greet", "srv", "srv/words", "srv/run", "srv/link", "srv/sub", "srv/sub/mine", "srv/sub/name", "srv/work",
        "srv/work/greeting", "project", "project/old", "tmp",
    }  # fmt: skip
    assert rows["project/old"].kind == "whiteout"
    assert (rows["opt/greet"].mode, rows["opt/greet"].uid) == (0o755, 0)
    assert [(rows[path].mode, rows[path].uid, rows[path].gid) for path in ("srv/words", "srv/run", "srv/sub")] == [
        (0o644, 1000, 2000), (0o755, 1000, 2000), (0o755, 1000, 2000),
    ]  # fmt: skip
    assert [rows[path].content for path in ("srv/work/greeting", "srv/sub/mine", "srv/sub/name")] == [b"hello 1.2\n", b"1000\n", b"1.2\n"]
    assert {row.mtime_ns for row in rows.values() if row.kind != "whiteout"} == {DEFAULT_EPOCH_S * NS_PER_S}

    environment = workshop.node("env", "create", "--group", f"oci:{workshop.home}/groups:base", pinned)
    shown = workshop.node("env", "exec", environment, "--", "sh", "-c", "pwd; cat greeting; ls /project; id -u")
    assert shown.split() == ["/srv/work", "hello", "1.2", "kept", "1000"]
    workshop.node("env", "rm", environment)


def test_the_same_recipe_gives_the_same_digest(workshop: Workshop) -> None:
    """From another checkout: other times, another umask, another directory, another number of workers."""
    workshop.write(WHOLE)
    write_data(workshop.home)
    digests = [workshop.built("-j", 1).rpartition("@")[2]]
    shutil.rmtree(workshop.home / "data")
    write_data(workshop.home, umask=0o077, mtime_s=1_800_000_000)
    digests.append(workshop.built("--cache", "scratch", "-j", 2).rpartition("@")[2])
    digests.append(workshop.built(to="elsewhere").rpartition("@")[2])
    assert len(set(digests)) == 1


def test_directories_that_are_there_stay_as_they_are(workshop: Workshop) -> None:
    """Of a tree that is put over the root, files and new directories come; /tmp stays everybody's."""
    workshop.write(HEAD + '[[files]]\nfrom = "tree"\nto = "/"\nowner = "7"\n')
    for name in ("tmp", "project", "new"):
        (workshop.home / "tree" / name).mkdir(parents=True)
    (workshop.home / "tree/tmp/x").write_text("x")
    rows = contents(workshop.built())
    assert (rows["tmp"].mode, rows["tmp"].uid, rows["tmp/x"].uid) == (0o1777, 0, 7)
    assert (rows["new"].mode, rows["new"].uid) == (0o755, 7)
    assert "project" not in rows


def test_times_are_not_later_than_the_epoch(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop.write(HEAD + 'epoch = 1000\n[[steps]]\nrun = "echo $SOURCE_DATE_EPOCH > /a; touch -d @500 /a; echo > /b"\n')
    rows = contents(workshop.built())
    assert [(rows[name].mtime_ns // NS_PER_S) for name in "ab"] == [500, 1000]
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "2000")
    rows = contents(workshop.built())
    assert [(rows[name].mtime_ns // NS_PER_S, rows[name].content) for name in "ab"] == [(500, b"2000\n"), (2000, b"\n")]
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "soon")
    assert "expected seconds since 1970, received 'soon'" in refused(workshop, USAGE)


def test_a_group_of_settings_alone(workshop: Workshop) -> None:
    """What envlet adds to a root that lacks it is not of the group."""
    workshop.write(HEAD + '[config]\nworkdir = "/not/there"\n')
    pinned = workshop.built()
    assert contents(pinned) == {}
    assert resolve_group(pinned).config.workdir == "/not/there"


def test_a_step_reaches_only_itself(workshop: Workshop) -> None:
    workshop.write(HEAD + "[[steps]]\nrun = 'ls /sys/class/net > /net; cat > /stdin'\n")
    rows = contents(workshop.built())
    assert (rows["net"].content, rows["stdin"].content) == (b"lo\n", b"")


def test_a_network_is_lent_by_a_node_that_says_so(workshop: Workshop) -> None:
    workshop.write(HEAD + "network = 'host'\n[[steps]]\nrun = 'true'\n")
    ran = workshop.build()
    assert ran.status != OK
    assert "host_network = true" in ran.err


def test_an_evaluator_may_stand_on_an_evaluator(workshop: Workshop) -> None:
    workshop.write(HEAD + 'role = "evaluator"\n[[steps]]\nrun = "echo > /eval"\n')
    workshop.built(to="judge")
    on_it = 'base = ["oci:groups:base", "oci:groups:judge"]\n[[steps]]\nrun = "echo > /more"\n'
    workshop.write('name = "more"\nrole = "evaluator"\n' + on_it)
    assert set(contents(workshop.built())) == {"more"}
    workshop.write('name = "more"\nrole = "task"\n' + on_it)
    assert "evaluator" in refused(workshop, ERROR)


def test_work_trees_are_ready_for_git_status(workshop: Workshop) -> None:
    tree = workshop.home / "tree"
    tree.mkdir()
    git(tree, "init", "-q")
    (tree / "file").write_text("x\n")
    git(tree, "add", "file")
    git(tree, "commit", "-q", "-m", "m")
    shutil.rmtree(tree / ".git/hooks", ignore_errors=True)
    recipe = HEAD + '[[files]]\nfrom = "tree"\nto = "/src"\n'
    digests = []
    for text, found in ((recipe, 1), (recipe + "[git]\nfix = true\n", 0), (recipe + "[git]\nfix = true\n", 0)):
        workshop.write(text)
        digests.append(workshop.built())
        checked = workshop.weenv("group", "check", digests[-1], "--below", f"oci:{workshop.home}/groups:base", "--git", "--format", "json")
        codes = [finding["code"] for finding in json.loads(checked.out)["findings"]]
        assert codes.count("git-status-reads") == found
    assert digests[0] != digests[1] == digests[2]
    assert len(resolve_group(digests[1]).layers) == 1


# ---- when nothing is run ----


def test_an_earlier_result_is_taken_while_its_inputs_are_the_same(workshop: Workshop, base: Path) -> None:
    def recipe(version: str, command: str) -> str:
        return HEAD + f'version = "{version}"\n[variables]\nv = "1"\n[[steps]]\nrun = "{command}"\n'

    def builds(*options: str) -> bool:
        before = workshop.made()
        workshop.built(*options)
        return workshop.made() > before

    workshop.write(recipe("1", "echo {{ v }} > /a"))
    assert builds()
    first = workshop.build()
    assert "the base groups, the variables and the version are the same" in first.err
    assert first.out.strip() == resolve_group(f"oci:{workshop.home}/groups:result").reference
    workshop.write(recipe("1", "echo other > /a"))
    assert not builds()
    assert not builds("--cache", "versioned")
    told = json.loads(workshop.build("--format", "json").out)
    assert told == {"reference": first.out.strip(), "built": False, "cache": "versioned"}
    assert builds("--cache", "scratch")
    told = json.loads(workshop.build("--set", "v=2", "--format", "json").out)
    assert (told["built"], len(told["steps"])) == (True, 1)
    assert builds()
    assert not builds()
    workshop.write(recipe("2", "echo other > /a"))
    assert builds()
    (base / "added").write_text("x")
    try:
        workshop.weenv("group", "push", f"oci:{workshop.home}/groups:base", "--rootfs", base)
    finally:
        (base / "added").unlink()
    assert builds()
    assert not builds()


def test_an_earlier_result_is_taken_while_its_locks_are_the_same(workshop: Workshop) -> None:
    workshop.write(HEAD + '[cache]\nlocks = ["lock"]\n[[files]]\nfrom = "lock"\nto = "/lock"\n')
    lock = workshop.home / "lock"
    lock.write_text("a 1.0\n")
    workshop.built()
    made = workshop.made()
    os.utime(lock, (1, 1))
    assert "lock files are the same" in workshop.build().err
    assert workshop.made() == made
    lock.write_text("a 1.1\n")
    assert contents(workshop.built())["lock"].content == b"a 1.1\n"
    assert workshop.made() == made + 1
    lock.unlink()
    assert "cache.locks[0]: expected a file or directory beside the recipe, received 'lock'" in refused(workshop, USAGE)


def test_an_earlier_result_is_taken_from_a_registry_by_any_machine(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> None:
    workshop.write(HEAD + 'version = "1"\n[[steps]]\nrun = "echo > /a"\n')
    with run_registry(tmp_path_factory.mktemp("registry")) as server:
        reference = f"{server.host}/made/group:1"
        pinned, made = workshop.built(to=reference), workshop.made()
        shutil.rmtree(workshop.home / "home", ignore_errors=True)
        assert (workshop.built(to=reference), workshop.made()) == (pinned, made)


def test_a_result_that_lost_a_layer_is_no_result(workshop: Workshop) -> None:
    workshop.write(HEAD + 'version = "1"\n[[steps]]\nrun = "echo > /a"\n')
    pinned = workshop.built()
    [layer] = resolve_group(pinned).layers
    (workshop.home / "groups/blobs/sha256" / layer.digest.removeprefix("sha256:")).unlink()
    ran = workshop.build()
    assert "lacks its layer" in ran.err
    assert (ran.out.strip(), set(contents(pinned))) == (pinned, {"a"})


def test_another_group_under_the_tag_is_no_result(workshop: Workshop, tmp_path: Path) -> None:
    workshop.write(HEAD + 'version = "1"\n[[steps]]\nrun = "echo > /a"\n')
    (tmp_path / "x.weenv").write_bytes(converted(write_pax([file(b"x")])))
    push_group(f"oci:{tmp_path}/groups:result", [tmp_path / "x.weenv"])
    ran = workshop.build()
    assert "is not of these inputs" in ran.err
    assert set(contents(ran.out.strip())) == {"a"}


def test_the_keys_say_what_they_are_keys_of(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("x")
    recipes = {}
    for name, more in (("none", ""), ("version", 'version = "1"\n'), ("both", 'version = "1"\n[cache]\nlocks = ["lock"]\n')):
        (tmp_path / name).write_text(HEAD + more)
        recipes[name] = load_recipe(tmp_path / name, {})
    assert [default_mode(recipe) for recipe in recipes.values()] == ["scratch", "versioned", "lock"]
    keys = {name: build_keys(recipe, tmp_path, ["sha256:0"]) for name, recipe in recipes.items()}
    assert [sorted(each) for each in keys.values()] == [[], ["versioned"], ["lock", "versioned"]]
    assert keys["version"]["versioned"] == keys["both"]["versioned"]
    assert keys_text(keys["none"]) is None
    assert has_key(keys_text(keys["both"]), "versioned", keys["version"])
    assert not has_key(keys_text(keys["version"]), "lock", keys["both"])
    assert not has_key(keys_text(keys["both"]), "versioned", build_keys(recipes["version"], tmp_path, ["sha256:1"]))


# ---- failures ----


def refused(workshop: Workshop, status: int, *options: object) -> str:
    """What is said of a build that must fail, and publish nothing under a new tag."""
    ran = workshop.build(*options, to="refused")
    assert (ran.status, ran.out) == (status, ""), ran.err
    assert workshop.weenv("group", "resolve", f"oci:{workshop.home}/groups:refused").status == NOT_FOUND
    return ran.err


@pytest.mark.parametrize(
    ("step", "status", "said"),
    [
        ("run = 'echo said; exit 7'", ERROR, "step 2 of 2: expected exit status 0, received 7"),
        ("run = 'false; true'", ERROR, "received 1"),
        ("run = 'kill -9 $$'", ERROR, "received 137"),
        ("run = 'sleep 100 & sleep 100'\ntimeout_s = 0.3", ERROR, "expected an end within 0.3 s (timeout_s); killed"),
        ("run = 'true'\nuser = 'nobody'", USAGE, "step 2 of 2: there is no user 'nobody'"),
        ("run = 'true'\nworkdir = '/nowhere'", ERROR, "/nowhere"),
    ],
)
def test_a_step_that_fails_publishes_nothing(workshop: Workshop, step: str, status: int, said: str) -> None:
    workshop.write(HEAD + f"[[steps]]\nrun = 'echo > /a'\n[[steps]]\n{step}\n")
    told = refused(workshop, status)
    assert said in told
    assert ("said\n" in told) == ("echo said" in step)
    assert workshop.environments() == []


def test_a_failure_leaves_the_tag_as_it_was(workshop: Workshop) -> None:
    workshop.write(HEAD + "[[steps]]\nrun = 'echo > /a'\n")
    pinned = workshop.built()
    workshop.write(HEAD + "[[steps]]\nrun = 'echo > /b; exit 1'\n")
    assert workshop.build().status == ERROR
    assert resolve_group(f"oci:{workshop.home}/groups:result").reference == pinned


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_leaves_nothing(workshop: Workshop, number: int, status: int) -> None:
    recipe = workshop.write(HEAD + "[[steps]]\nrun = 'echo begun >&2; sleep 1000'\n")
    scratch = workshop.home / "scratch"
    scratch.mkdir()
    target = f"oci:{workshop.home}/groups:cut"
    command = [WEENV, "group", "build", recipe, "--to", target, "--socket", workshop.node.socket]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(scratch)},
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    ) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        assert "begun\n" in iter(process.stderr.readline, "")
        with Client(workshop.node.socket) as client:
            [environment] = client.list()
        assert environment.labels == {"weenv.build": "made"}
        assert environment.expires_unix_s is not None  # so that it ends when nobody can remove it any more
        process.send_signal(number)
        assert (process.wait(60), process.stdout.read()) == (status, "")
    assert workshop.environments() == []
    assert list(scratch.iterdir()) == []
    assert workshop.weenv("group", "resolve", target).status == NOT_FOUND


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ("from = '../up'\nto = '/x'", "files[0].from: expected a path below the recipe's directory, without '..', received '../up'"),
        ("from = 'none'\nto = '/x'", "expected a file or directory beside the recipe, received 'none'"),
        ("from = 'fifo'\nto = '/x'", "expected a file or directory, received 'fifo'"),
        ("from = 'odd'\nto = '/x'", "received a fifo at 'fifo'"),
        ("from = 'odd'\nto = '/x'\nmode = '0644'", "files[0].mode: expected none for the directory 'odd', received '0644'"),
        ("contents = ''\nto = '/'", "files[0].to: expected the path of a file, received '/'"),
        ("contents = ''\nto = '/etc/.'", "files[0].to: expected the path of a file, received '/etc/.'"),
        ("contents = ''\nto = '/project'", "files[0].to: expected the path of a file, received '/project', which is a directory"),
        ("contents = ''\nto = '//./project'", "expected the path of a file, received '/project', which is a directory of the base groups"),
        ("contents = ''\nto = '/link'", "received '/link', which is a symlink of the base groups to 'project'"),
        ("contents = ''\nto = '/link/x'", "received '/link/x', where '/link' is a symlink of the base groups to 'project'"),
        ("from = 'tree'\nto = '/'", "expected the path of a directory, received '/link', which is a symlink of the base groups"),
        ("from = 'tree'\nto = '/project/old'", "expected the path of a directory, received '/project/old', which is a file of the base"),
        ("contents = ''\nto = '/project/old/x'", "where '/project/old' is a file of the base groups"),
        ("from = 'replacing'\nto = '/'", "expected the path of a file, received '/project', which is a directory of the base groups"),
        ("contents = ''\nto = '/n/a'\n[[files]]\ncontents = ''\nto = '/n'", "files[1].to: expected the path of a file, received '/n'"),
        ("contents = ''\nto = '/n'\n[[files]]\ncontents = ''\nto = '/n/a'", "files[1].to: expected a path through directories"),
        ("contents = ''\nto = '/etc/.wh.x'", "files[0].to: expected no name that begins with .wh., which would be a whiteout"),
        ("contents = ''\nto = '/etc/.wh..wh..opq'", "received '/etc/.wh..wh..opq'"),
        ("contents = ''\nto = '/.wh.etc/x'", "expected no name that begins with .wh."),
        ("from = 'tree'\nto = '/.wh.etc'", "expected no name that begins with .wh."),
        ("from = 'hiding'\nto = '/x'", "files[0].from: .wh.x: a name that begins with .wh. would be a whiteout"),
        ("contents = ''\nto = '/proc/x'", "files[0].to: expected a path outside /proc, /sys and /dev"),
        ("contents = ''\nto = '/./sys'", "received '/sys'"),
        ("from = 'tree'\nto = '/dev'", "which every environment mounts over, received '/dev/link'"),
    ],
)
def test_files_that_cannot_be_put_in(workshop: Workshop, files: str, said: str) -> None:
    os.mkfifo(workshop.home / "fifo")
    for name in ("odd", "tree/link", "replacing", "hiding"):
        (workshop.home / name).mkdir(parents=True)
    os.mkfifo(workshop.home / "odd/fifo")
    (workshop.home / "tree/link/x").write_text("x")
    (workshop.home / "replacing/project").symlink_to("tmp")
    (workshop.home / "hiding/.wh.x").write_text("x")
    recipe = workshop.write(HEAD + f"[[files]]\n{files}\n")
    made = workshop.made()
    told = refused(workshop, USAGE)
    assert told.startswith(f"weenv: {recipe}: files[")
    assert said in told
    assert workshop.made() == made


def test_what_files_may_replace(workshop: Workshop) -> None:
    """A file, and a symlink to none or by another; and `proc` may be in a root, as a mount point."""
    (workshop.home / "tree/proc").mkdir(parents=True)
    (workshop.home / "tree/link").symlink_to("tmp")
    (workshop.home / "tree/project").mkdir()
    (workshop.home / "tree/project/old").symlink_to("kept")
    workshop.write(HEAD + "[[files]]\nfrom = 'tree'\nto = '/'\n[[files]]\ncontents = 'a'\nto = '/bin/wc'\n")
    rows = contents(workshop.built())
    assert {path: row.kind for path, row in rows.items()} == {
        "link": "symlink", "project": "directory", "project/old": "symlink", "bin": "directory", "bin/wc": "regular",
    }  # fmt: skip


@pytest.mark.parametrize("link", ["/etc", "../outside", "tree/deep"])
@pytest.mark.parametrize(
    ("recipe", "key"),
    [
        ("[[files]]\nfrom = 's'\nto = '/x'\n", "files[0].from"),
        ("[[files]]\nfrom = 's/passwd'\nto = '/x'\n", "files[0].from"),
        ("[cache]\nlocks = ['s/passwd']\n", "cache.locks[0]"),
    ],
)
def test_a_recipe_reads_nothing_outside_its_directory(workshop: Workshop, recipe: str, key: str, link: str) -> None:
    outside, home = workshop.home / "outside", workshop.home / "recipes"
    outside.mkdir()
    (home / "tree").mkdir(parents=True)
    (outside / "passwd").write_text("secret")
    (home / "tree/deep").symlink_to("../../outside")
    (home / "s").symlink_to(link)
    path = workshop.write(HEAD.replace("oci:", "oci:../") + recipe, "recipes/recipe.toml")
    made = workshop.made()
    ran = workshop.build(recipe="recipes/recipe.toml")
    assert (ran.status, workshop.made()) == (USAGE, made)
    leads = "/etc" if link == "/etc" else str(outside)
    assert f"{path}: {key}: expected a path that stays below the recipe's directory, received 's" in ran.err
    assert f"which leads to '{leads}" in ran.err


def test_symlinks_inside_the_directory_of_a_recipe(workshop: Workshop) -> None:
    """Those that a recipe names are followed, those below a directory stay what they are, wherever they lead."""
    (workshop.home / "tree/sub").mkdir(parents=True)
    (workshop.home / "tree/sub/file").write_text("x")
    (workshop.home / "tree/sub/out").symlink_to("/etc/passwd")
    (workshop.home / "a").symlink_to("b")
    (workshop.home / "b").symlink_to(workshop.home / "tree/sub")
    workshop.write(HEAD + "[[files]]\nfrom = 'a'\nto = '/n'\n[[files]]\nfrom = 'a/file'\nto = '/f'\n[cache]\nlocks = ['a/file']\n")
    rows = contents(workshop.built())
    assert (rows["f"].content, rows["n/file"].content, rows["n/out"].kind) == (b"x", b"x", "symlink")


def test_what_the_node_refuses_is_said_of_the_recipe(workshop: Workshop) -> None:
    for text in ("network = 'host'\n", "[config]\nworkdir = '/project/old'\n", "[[steps]]\nrun = 'true'\nuser = 'nobody'\n"):
        recipe = workshop.write(HEAD + text)
        assert f"\nweenv: {recipe}: " in "\n" + refused(workshop, USAGE)


def test_options_that_do_not_fit(workshop: Workshop) -> None:
    workshop.write(HEAD + "[variables]\na = '1'\n")
    assert "--set b: expected one of [variables]" in refused(workshop, USAGE, "--set", "b=1")
    assert "expected a recipe with a 'version'" in refused(workshop, USAGE, "--cache", "versioned")
    assert "expected a recipe with 'locks'" in refused(workshop, USAGE, "--cache", "lock")
    assert workshop.build(to=f"oci:{workshop.home}/groups@sha256:{'0' * 64}").status == USAGE
    workshop.write(HEAD.replace("base\"]", 'none"]'))
    refused(workshop, NOT_FOUND)


# ---- what a recipe may say ----


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name = ", "expected TOML"),
        ("", "name: expected, but it is not there"),
        (HEAD + "stepz = []", "stepz: expected one of the keys name, base, role, version"),
        (HEAD + "[[steps]]\nrun = ''", "steps[0].run: expected `str` of length >= 1"),
        (HEAD + "[[steps]]\nrun = 'a'\n[[steps]]\nscript = 'b'", "steps[1].script: expected one of the keys run, user"),
        (HEAD + "[[steps]]\nuser = 'a'", "steps[0].run: expected, but it is not there"),
        (HEAD + "[[steps]]\nrun = 1", "steps[0].run: expected `str`, received `int`"),
        (HEAD + "[[steps]]\nrun = 'a'\ntimeout_s = inf", "steps[0].timeout_s: expected `float` <= 604800"),
        (HEAD + "[[steps]]\nrun = 'a'\ntimeout_s = nan", "steps[0].timeout_s: expected `float`"),
        (HEAD + "steps = 'a'", "steps: expected `array`, received `str`"),
        (HEAD + "steps = ['a']", "steps[0]: expected `object`, received `str`"),
        (HEAD + "config = 1979-05-27", "config: expected `object`, received `date`"),
        (HEAD + "role = 'tasks'", "role: expected one of base, task, harness, evaluator, received 'tasks'"),
        (HEAD + "[config]\nuser = 'a:b:c'", "config.user: expected USER[:GROUP], received 'a:b:c'"),
        (HEAD + "network = 'bridge'", "network: expected none or host, received 'bridge'"),
        (HEAD + "epoch = -1", "epoch: expected `int` >= 0"),
        (HEAD + "variables = 'a'", "variables: expected `object`, received `str`"),
        (HEAD + "[variables]\na = 1", "variables.a: expected a string, received 1"),
        (HEAD + "[variables]\n'a b' = ''", "variables: expected a name of letters, digits and _, received 'a b'"),
        (HEAD + "[config]\nworkdir = 'src'", "config.workdir: expected an absolute path without '..', received 'src'"),
        (HEAD + "[config]\nenv = { 'A=' = 'b' }", "config.env: expected the name of a variable, without =, received 'A='"),
        (HEAD + "[config]\nenv = { \"A\\u0000\" = 'b' }", "config.env: expected the name of a variable"),
        (HEAD + "[[steps]]\nrun = 'a'\nenv = { A = 1 }", "steps[0].env.A: expected a string, received 1"),
        (HEAD + "[[steps]]\nrun = 'a'\nworkdir = 'b'", "steps[0].workdir: expected an absolute path"),
        (HEAD + "[[files]]\nto = '/a'", "files[0]: expected one of 'from' and 'contents', received neither"),
        (HEAD + "[[files]]\nto = '/a'\nfrom = 'a'\ncontents = ''", "files[0]: expected one of 'from' and 'contents', received both"),
        (HEAD + "[[files]]\nto = '/b/../a'\ncontents = ''", "files[0].to: expected an absolute path without '..', received '/b/../a'"),
        (HEAD + "[[files]]\nto = '/..'\ncontents = ''", "files[0].to: expected an absolute path without '..'"),
        (HEAD + "[[files]]\nto = '/a'\ncontents = ''\nmode = 'rwx'", "files[0].mode: expected an octal mode such as 0644, received 'rwx'"),
        (HEAD + "[[files]]\nto = '/a'\ncontents = ''\nowner = 'root'", "files[0].owner: expected UID or UID:GID, numbers"),
        (HEAD + "exclude = ['ok', '../y']", "exclude[1]: expected a pattern of paths below the root, received '../y': no file is called"),
        (HEAD + "exclude = ['./y']", "exclude[0]: expected a pattern of paths below the root"),
        (HEAD + "exclude = ['a//b']", "received 'a//b': a name is empty"),
        (HEAD + "exclude = ['{{ v }}']\n[variables]\nv = '/'", "received '/': it has no name"),
        (HEAD + "exclude = ['tmp/[a']", "received 'tmp/[a': a bracket without its other half"),
        (HEAD + "exclude = ['tmp/.wh.a']", "a removal is meant by the name of what it removes"),
        (HEAD + "exclude = ['{{ where }}']", "exclude[0]: 'where' is undefined; expected one of [variables]: none"),
        (HEAD + "[[steps]]\nrun = '{{ a'", "steps[0].run: expected a Jinja2 template: line 1"),
        (HEAD + "[config]\nenv = { A = '{{ 1 // 0 }}' }", "config.env.A: the template failed"),
        (HEAD + "[[steps]]\nrun = \"a\\u0000b\"", "steps[0].run: expected text without NUL"),
        (HEAD + "exclude = ['{{ v }}']\n[variables]\nv = \"\\u0000\"", "exclude[0]: expected text without NUL"),
        (HEAD + "[[steps]]\nrun = '{{ \"\".__class__.__mro__ }}'", "steps[0].run: "),
    ],
)
def test_what_a_recipe_cannot_say(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(RecipeError) as raised:
        load_recipe(tmp_path / "r.toml", {})
    assert str(raised.value).startswith(f"{tmp_path}/r.toml: ")
    assert said in str(raised.value)


def test_templates_leave_the_shell_alone(tmp_path: Path) -> None:
    script = 'x="${#a[@]} ${a#b} #}"; echo {{ v }}{% if v == "1" %} one{% endif %}\n'
    assert Renderer({"v": "1"}).render(script, "run") == 'x="${#a[@]} ${a#b} #}"; echo 1 one\n'
    for text in ("{{ lipsum() }}", "{{ [1, 2] | random }}"):
        with pytest.raises(RecipeError):
            Renderer({}).render(text, "run")


@pytest.mark.parametrize(
    ("template", "received"),
    [
        ("{% for i in 'a' * 999999999 %}{% endfor %}", "at most 256 MiB"),
        ("{{ 'a' * 999999999 }}", "at most 256 MiB"),
        ("{{ '%999999999d' % 1 }}", "at most 256 MiB"),
        ("{{ 'a' | center(999999999) }}", "at most 256 MiB"),
        ("{% set x = 'aaaaaaaa' %}" + "{% set x = x ~ x %}" * 40, "at most 256 MiB"),
        ("{{ 'a' * 9000000 }}", "at most 8,388,608 characters"),
        ("{{ 9 ** (9 ** 9) }}", "at most 1 s of processor time"),
        ("{% for a in 'x' * 99999 %}" * 3 + "{% endfor %}" * 3, "at most 1 s of processor time"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "the template failed: maximum recursion depth exceeded"),
        ("{{ '\\ud800' }}", "surrogates not allowed"),
    ],
)
def test_templates_have_bounds(monkeypatch: pytest.MonkeyPatch, template: str, received: str) -> None:
    monkeypatch.setattr("tools.recipes.templates.MAX_PROCESSOR_S", 1)
    with pytest.raises(RecipeError) as raised:
        Renderer({"v": "1"}).render_all([("a", "{{ v }}"), ("b", template), ("c", "plain")])
    assert str(raised.value).startswith("b: ")
    assert received in str(raised.value)


def test_texts_are_rendered_where_they_stand(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(
        'name = "{{ v }}"\nbase = ["plain", "{{ v }}2"]\nexclude = ["{{ v }}3"]\nepoch = 7\n'
        '[variables]\nv = "{{ x }}"\n[config]\nenv = { A = "{{ v }}4", B = "b" }\ncmd = ["{{ v }}5"]\n'
    )
    recipe = load_recipe(tmp_path / "r.toml", {"v": "w"})
    assert (recipe.name, recipe.base, recipe.exclude, recipe.epoch) == ("{{ v }}", ("plain", "w2"), ("w3",), 7)
    assert (recipe.config.env, recipe.config.cmd, recipe.variables) == ({"A": "w4", "B": "b"}, ("w5",), {"v": "w"})


# ---- the layer of a diff ----


def layer_of(tar: bytes, path: Path, *, epoch_s: int = LATEST_S, excluded: Callable[[bytes], bool] = lambda _path: False) -> bytes:
    diff = io.BytesIO(tar)
    encode_diff(diff, survey_diff(diff, epoch_s, excluded), path, Encoding(), epoch_s=epoch_s, jobs=1)
    return path.read_bytes()


@given(strategies.layers())
def test_of_a_diff_with_nothing_to_leave_out_the_layer_is_its_conversion(
    tmp_path_factory: pytest.TempPathFactory, layer: strategies.Layer
) -> None:
    scratch = tmp_path_factory.mktemp("layer")
    (scratch / "tar").write_bytes(write_pax(layer))
    convert(scratch / "tar", scratch / "converted")
    assert layer_of(write_pax(layer), scratch / "made") == (scratch / "converted").read_bytes()


@given(
    st.lists(st.tuples(st.sampled_from(b"abcdefgh"), st.integers(0, 3)), unique_by=lambda pair: pair[0]),
    st.sets(st.sampled_from(b"abcdefgh")),
)
def test_names_that_stay_keep_contents_and_links(
    tmp_path_factory: pytest.TempPathFactory, names: list[tuple[int, int]], excluded: set[int]
) -> None:
    """Names of four files, some of them left out: those that stay are names of the same files."""
    first: dict[int, bytes] = {}
    members = []
    for name, number in names:
        path = bytes([name])
        members.append(link(path, first[number]) if number in first else file(path, b"contents %d" % number))
        first.setdefault(number, path)
    path = tmp_path_factory.mktemp("layer") / "made"
    layer_of(write_pax(members), path, excluded=lambda found: found != b"" and found[0] in excluded)
    kept = {bytes([name]): number for name, number in names if name not in excluded}
    with Layer.open(path) as layer:
        rows = {name: row for name, row in described(layer).items() if name}
    assert {name: row.content for name, row in rows.items()} == {name: b"contents %d" % number for name, number in kept.items()}
    for name, number in kept.items():
        alike = tuple(sorted(other for other, same in kept.items() if same == number))
        assert rows[name].group in ((), alike) if len(alike) == 1 else rows[name].group == alike


def test_removals_are_excluded_by_what_they_remove(tmp_path: Path) -> None:
    tar = write_pax([directory(b"d"), whiteout(b"d/gone"), directory(b"d/e"), opaque(b"d/e"), whiteout(b"left"), file(b"d/x")])
    layer_of(tar, tmp_path / "made", excluded=matcher(["d/gone", "d/e/**", "/d/x"]))
    with Layer.open(tmp_path / "made") as layer:
        rows = described(layer)
    assert set(rows) == {b"", b"d", b"d/e", b"left"}
    assert not rows[b"d/e"].opaque


def pyc(flags: int, mtime_s: int) -> bytes:
    return struct.pack("<4sIII", b"\xa7\r\r\n", flags, mtime_s, 10) + b"code"


@pytest.mark.parametrize(
    ("path", "data", "stays"),
    [
        (b"__pycache__/m.cpython-311.pyc", pyc(0, 2001), False),
        (b"__pycache__/m.cpython-311.pyc", pyc(0, 2000), True),
        (b"__pycache__/m.cpython-311.pyc", pyc(3, 2001), True),
        (b"__pycache__/m.cpython-311.pyc", b"short", True),
        (b"__pycache__/m.txt", pyc(0, 2001), True),
        (b"m.pyc", pyc(0, 2001), True),
    ],
    ids=["later", "not later", "by hash", "short", "other name", "without source"],
)
def test_compiled_python_of_this_build_is_left_out(tmp_path: Path, path: bytes, data: bytes, stays: bool) -> None:
    tar = write_pax([directory(b"p"), directory(b"p/__pycache__"), file(b"p/" + path, data), link(b"p/other", b"p/" + path)])
    layer_of(tar, tmp_path / "made", epoch_s=2000)
    with Layer.open(tmp_path / "made") as layer:
        rows = described(layer)
    assert (b"p/" + path in rows) is stays
    assert rows[b"p/other"].content == data


@pytest.mark.parametrize(
    ("pattern", "matched", "others"),
    [
        ("tmp/**", ["tmp/a", "tmp/a/b", "tmp/.wh..wh..opq"], ["tmp", "tmpfile", "a/tmp/b"]),
        ("/var/cache", ["var/cache", "var/cache/apt/x"], ["var/cached", "var"]),
        ("**/*.log", ["a.log", "var/log/b.log", "a.log/inside"], ["a.logs", "log"]),
        ("a/*/c", ["a/b/c", "a/b/c/d"], ["a/c", "a/b/b/c"]),
        ("a/**/c", ["a/c", "a/b/c", "a/b/b/c"], ["ac", "a/b"]),
        ("f?.[x]", ["fa.[x]"], ["f/.[x]", "fa.x", "f.[x]"]),
        ("é", ["é"], ["e"]),
    ],
)
def test_patterns(pattern: str, matched: list[str], others: list[str]) -> None:
    is_excluded = matcher([pattern])
    assert [path for path in [*matched, *others] if is_excluded(path.encode())] == matched
    assert not matcher([])(b"tmp/a")

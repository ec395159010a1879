"""`weenv catalog`: a data set over two git repositories becomes two groups and a catalog; each task's environment is what git
makes of its commit and mutation, and holds nothing else; what is wrong with a data set or a catalog is said and nothing done.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st
from node_process import Node, make_base, run_node
from registry_fixture import run_registry
from test_group_check import git
from weenv_cli import ERROR, INTEGRITY, NOT_FOUND, OK, USAGE, Ran, isolated_weenv

from envlet.catalog import MAX_COMMAND_BYTES, CatalogError, Task, read_catalog, read_header
from envlet.client import Client
from layerformat import convert
from registry import push_group
from tools.catalog.commands import fits, init_commands, write_file
from tools.catalog.config import load_config, tag_of
from tools.catalog.tasks import reread_tasks, survey_tasks
from tools.exits import CommandError

ROOT_GIT = ("git", "-c", "safe.directory=/src", "-C", "/src")
CONFIG = """
recipe = "repository.toml"
url = "./{{ repository }}"

[harnesses]
solver = "oci:groups:harness"

[evaluators.check]
group = "oci:groups:evaluator"
command = ["/eval/check"]

[repositories."acme/Adder"]
[repositories."acme/text"]
variables = { greeting = "hello" }
"""
RECIPE = """
name = "repository"
version = "1"
base = ["oci:groups:base"]

[variables]
repository = ""
greeting = ""

[[steps]]
run = "echo {{ greeting }} {{ repository }} > /greeting"
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with run_node(tmp_path_factory.mktemp("node")) as node:
        yield node


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root of busybox with this machine's git and the libraries that it is linked with."""
    root = tmp_path_factory.mktemp("base") / "root"
    make_base(root)
    for applet in ("mkdir", "echo"):
        (root / "bin" / applet).symlink_to("busybox")
    program = shutil.which("git")
    assert program is not None
    linked = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    for path in (program, *re.findall(r"(/\S+) \(0x", linked)):
        target = root / path.removeprefix("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return root


@frozen
class DataSet:
    """A directory with two repositories, a configuration, and tasks over them; the command on a node."""

    home: Path
    node: Node
    weenv: Callable[..., Ran]

    @property
    def catalog(self) -> Path:
        return self.home / "catalog.jsonl"

    def sources(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.home / "tasks.jsonl").read_text().splitlines()]

    def write(self, *tasks: dict[str, Any]) -> None:
        (self.home / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))

    def build(self, *options: object, to: str = "made") -> Ran:
        files = (self.home / "tasks.jsonl", "--config", self.home / "catalog.toml", "--out", self.catalog)
        return self.weenv("catalog", "build", *files, "--to", f"oci:{self.home}/{to}", "--socket", self.node.socket, *options)

    def built(self, *options: object, to: str = "made") -> dict[str, Any]:
        ran = self.build("--format", "json", *options, to=to)
        assert ran.status == OK, ran.err
        return dict(json.loads(ran.out))

    def tasks(self) -> dict[str, Task]:
        return {task.id: task for task in read_catalog(self.catalog)}

    def made(self) -> int:
        """How many environments the node has made."""
        with Client(self.node.socket) as client:
            return int(client.info().statistics["created"])


def commits_of(repository: Path) -> list[str]:
    """The oldest first."""
    return git(repository, "rev-list", "--reverse", "main").splitlines()


def commit_files(repository: Path, files: dict[str, str], message: str) -> str:
    for name, text in files.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(text)
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "-m", message)
    return git(repository, "rev-parse", "HEAD")


def edited(repository: Path, commit: str, files: dict[str, str]) -> str:
    """The diff that these contents make of a commit."""
    git(repository, "checkout", "--quiet", "--force", commit)
    for name, text in files.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(text)
    git(repository, "add", "--all")
    diff = git(repository, "diff", "--cached", "--binary")
    git(repository, "reset", "--quiet", "--hard", "main")
    git(repository, "checkout", "--quiet", "main")
    return diff + "\n"


def make_repositories(home: Path) -> None:
    adder, text = home / "acme/Adder", home / "acme/text"
    for repository in (adder, text):
        repository.mkdir(parents=True)
        git(repository, "init", "--quiet", "--initial-branch=main")
    commit_files(adder, {"add.sh": "echo $(($1 + $2))\n", "old": "old\n", "lib/a": "a\n" * 100}, "first")
    commit_files(adder, {"add.sh": "echo $(($1 + $2 + 0))\n", "new": "new\n", "lib/a": "b\n" * 100}, "second")
    git(adder, "rm", "--quiet", "old")
    commit_files(adder, {"add.sh": "echo $(($1 + $2 + $3))\n"}, "the fix of everything")
    commit_files(text, {"words": "one\ntwo\nthree\n", "run": "#!/bin/sh\n", "é": "naïve\n", "empty": ""}, "words")
    (text / "run").chmod(0o755)
    (text / "link").symlink_to("words")
    commit_files(text, {}, "a mode and a link")


def make_tasks(home: Path) -> list[dict[str, Any]]:
    """Commits, mutations, both; inline and from a file; small, and larger than what an argument holds."""
    adder, text = home / "acme/Adder", home / "acme/text"
    first, second, _third = commits_of(adder)
    words = commits_of(text)[1]
    wrong = edited(adder, second, {"add.sh": "echo $(($1 - $2))\n", "added/by": "it's\n"})
    (home / "patches").mkdir()
    (home / "patches/two.diff").write_text(edited(text, words, {"words": "one\ntoo\nthree\n", "é": "naive"}))
    large = "".join(f"line {number}: it's '{number}'\n" for number in range(20_000))
    larger = edited(text, words, {"large": large})
    inline = {"command": ["grep", "-x", "two", "words"], "files": {"/eval/deep/list": "it's a list"}}
    return [
        {"id": "adder-1", "repository": "acme/Adder", "commit": first, "evaluator": "check"},
        {"id": "adder-2", "repository": "acme/Adder", "commit": second, "mutation": wrong, "evaluator": "check", "metadata": {"level": 2}},
        {"id": "text-1", "repository": "acme/text", "commit": words, "mutation": {"file": "patches/two.diff"}, "evaluator": inline},
        {"id": "text-2", "repository": "acme/text", "commit": words, "mutation": larger, "evaluator": inline},
    ]  # fmt: skip


@pytest.fixture(scope="module")
def originals(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what data sets are made of and none of them changes: groups, repositories, patches, and tasks."""
    home = tmp_path_factory.mktemp("originals")
    roots = {"base": base, "harness": home / "harness", "evaluator": home / "evaluator"}
    for name, path, script in (
        ("harness", "opt/solve", "sed -i 's/ - / + /' /src/add.sh\n"),
        ("evaluator", "eval/check", '[ "$(sh /src/add.sh 20 22)" = 42 ] && echo reward 1\n'),
    ):
        (roots[name] / path).parent.mkdir(parents=True)
        (roots[name] / path).write_text(f"#!/bin/sh\n{script}")
        (roots[name] / path).chmod(0o755)
    for role, root in roots.items():
        convert(root, home / f"{role}.weenv")
        push_group(f"oci:{home}/groups:{role}", [home / f"{role}.weenv"], role=role)
    make_repositories(home)
    (home / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in make_tasks(home)))
    return home


@pytest.fixture
def data(
    node: Node, originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[DataSet]:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    for name in ("groups", "acme", "patches"):
        (tmp_path / name).symlink_to(originals / name)
    shutil.copy(originals / "tasks.jsonl", tmp_path)
    (tmp_path / "catalog.toml").write_text(CONFIG)
    (tmp_path / "repository.toml").write_text(RECIPE)
    yield DataSet(tmp_path, node, isolated_weenv(tmp_path / "home", monkeypatch, capfd))
    with Client(node.socket) as client:
        assert client.list() == []


# ---- what is made ----


def expected_tree(data: DataSet, task: dict[str, Any], scratch: Path) -> str:
    """What git says of the task's state, outside and in the most direct way."""
    worktree = scratch / task["id"]
    git(scratch, "clone", "--quiet", str(data.home / task["repository"]), str(worktree))
    git(worktree, "checkout", "--quiet", task["commit"])
    mutation = task.get("mutation")
    if mutation is not None:
        patch = (data.home / mutation["file"]).read_text() if isinstance(mutation, dict) else mutation
        git(worktree, "apply", stdin=patch.encode())
    git(worktree, "add", "--all")
    return git(worktree, "write-tree")


def output_of(client: Client, environment: str, *argv: str) -> str:
    result = client.exec(environment, argv)
    assert result.exit_code == 0, result.stderr.decode()
    return result.stdout.decode().strip()


def test_each_task_is_its_commit_and_mutation_and_nothing_else(data: DataSet, tmp_path: Path) -> None:
    result = data.built("--verify")
    assert (result["artefacts"], result["groups"]) == (5, {"base": 1, "task": 2, "evaluator": 1, "harness": 1})
    assert (result["one_image_per_task"], result["one_image_per_task_and_harness"], result["built"]) == (4, 4, 2)
    sources = data.sources()
    (tmp_path / "clones").mkdir()
    tasks = data.tasks()
    assert list(tasks) == [source["id"] for source in sources]
    for source in sources:
        task = tasks[source["id"]]
        expected = expected_tree(data, source, tmp_path / "clones")
        assert task.tree == expected
        with Client(data.node.socket) as client, tempfile.NamedTemporaryFile(dir=tmp_path) as diff:
            made = client.create(task.execution_plan(), init=task.init_commands())
            assert made.workdir == "/src"
            assert output_of(client, made.id, *ROOT_GIT, "status", "--porcelain") == ""
            output_of(client, made.id, *ROOT_GIT, "add", "--all")
            assert output_of(client, made.id, *ROOT_GIT, "write-tree") == expected
            assert output_of(client, made.id, *ROOT_GIT, "rev-parse", "HEAD^{tree}") == expected
            assert (output_of(client, made.id, *ROOT_GIT, "rev-parse", "HEAD") == task.commit) is ("mutation" not in source)
            client.diff(made.id, diff.fileno())
            client.delete(made.id)
            check_leaks(data, task, Path(diff.name))
    assert (tasks["adder-2"].metadata, tasks["text-1"].metadata) == ({"level": 2}, {})


def check_leaks(data: DataSet, task: Task, diff: Path) -> None:
    """Nothing beyond HEAD is in the state that init leaves, as `group check --git` sees it."""
    state = f"oci:{data.home}/states:{task.id}"
    assert data.weenv("group", "push", state, "--tar", diff).status == OK
    below = [word for reference in task.execution_plan() for word in ("--below", reference)]
    answer = data.weenv("group", "check", state, *below, "--git", "--format", "json")
    git_findings = [finding for finding in json.loads(answer.out)["findings"] if finding["code"].startswith("git")]
    of_packing = {"git-status-reads", "git-message"}  # what this test does to the state; and the task's own message
    assert [finding for finding in git_findings if finding["code"] not in of_packing] == []
    with Client(data.node.socket) as client:
        made = client.create([*task.execution_plan(), state])
        commits = output_of(client, made.id, *ROOT_GIT, "cat-file", "--batch-all-objects", "--batch-check=%(objecttype)")
        client.delete(made.id)
    assert commits.split().count("commit") == 1


def test_the_groups_before_init_do_leak(data: DataSet) -> None:
    """The check above can fail: without init, the other commits are found."""
    data.built()
    task = data.tasks()["adder-2"]
    answer = data.weenv("group", "check", task.groups.task, "--below", *task.groups.base, "--git", "--format", "json")
    assert "git-ref" in {finding["code"] for finding in json.loads(answer.out)["findings"]}


def test_what_is_not_sealed_is_left_as_it_is(data: DataSet) -> None:
    """HEAD is the commit, the mutation is in the index; a commit that is alone needs no sealing."""
    (data.home / "catalog.toml").write_text(CONFIG.replace('[repositories."acme/Adder"]', '[repositories."acme/Adder"]\nseal = false'))
    text = data.sources()[2]
    data.write(data.sources()[1], {**text, "id": "text-0", "mutation": None}, text)
    data.built()
    unsealed, alone, sealed = data.tasks().values()
    assert [len(task.init) for task in (unsealed, alone, sealed)] == [2, 1, 3]
    with Client(data.node.socket) as client:
        made = client.create(unsealed.execution_plan(), init=unsealed.init_commands())
        assert output_of(client, made.id, *ROOT_GIT, "rev-parse", "HEAD") == unsealed.commit
        assert output_of(client, made.id, *ROOT_GIT, "status", "--porcelain").split() == ["M", "add.sh", "A", "added/by"]
        client.delete(made.id)


def test_a_solution_is_judged(data: DataSet, tmp_path: Path) -> None:
    data.built()
    header, tasks = read_header(data.catalog), data.tasks()
    assert [*header.harnesses] == ["solver"]

    def verdict(task: Task, *solve: str) -> int:
        with Client(data.node.socket) as client, tempfile.TemporaryFile(dir=tmp_path) as solution:
            execution = client.create(task.execution_plan(header.harnesses["solver"]), init=task.init_commands())
            output_of(client, execution.id, *solve)
            client.diff(execution.id, solution.fileno())
            solution.seek(0)
            evaluation = client.create(
                task.evaluation_plan(), role="evaluation", apply_fd=solution.fileno(), init=task.eval.init_commands()
            )
            if task.groups.evaluator is None:
                assert output_of(client, evaluation.id, "cat", "/eval/deep/list") == "it's a list"
            status = client.exec(evaluation.id, task.eval.command).exit_code
            for environment in (execution, evaluation):
                client.delete(environment.id)
        return status

    assert [verdict(tasks["adder-2"], *solve) for solve in (("/opt/solve",), ("true",))] == [0, 1]
    assert [verdict(tasks["text-1"], *solve) for solve in (("sed", "-i", "s/too/two/", "words"), ("true",))] == [0, 1]


def test_what_is_there_is_taken(data: DataSet) -> None:
    """Another run builds nothing; a commit more builds its repository only; elsewhere the same digests come out."""
    assert data.built()["built"] == 2
    catalog, made = data.catalog.read_bytes(), data.made()
    assert (data.built()["built"], data.made(), data.catalog.read_bytes()) == (0, made, catalog)
    assert data.built(to="elsewhere")["built"] == 2
    digests = [{task.groups.task.rpartition("@")[2] for task in map_of(text)} for text in (catalog, data.catalog.read_bytes())]
    assert digests[0] == digests[1]
    tasks = data.sources()
    data.write(*tasks, {**tasks[0], "id": "adder-3", "commit": commits_of(data.home / "acme/Adder")[2]})
    result = data.built()
    assert (result["built"], result["taken"]) == (1, 1)
    assert f"oci:{data.home}/made:{tag_of('acme/text')}@" in data.tasks()["text-1"].groups.task


def map_of(catalog: bytes) -> list[Task]:
    with tempfile.NamedTemporaryFile() as file:
        file.write(catalog)
        file.flush()
        return list(read_catalog(Path(file.name)))


def test_a_step_sees_the_repository_and_its_variables(data: DataSet) -> None:
    data.built()
    task = data.tasks()["text-1"]
    with Client(data.node.socket) as client:
        made = client.create(task.execution_plan())
        assert output_of(client, made.id, "cat", "/greeting") == "hello acme/text"
        assert output_of(client, made.id, *ROOT_GIT, "status", "--porcelain") == ""
        client.delete(made.id)


# ---- refusals ----


def refused(data: DataSet, status: int, *options: object) -> str:
    """What is said of a build that must not do anything."""
    made = data.made()
    ran = data.build(*options)
    assert (ran.status, ran.out, data.made()) == (status, "", made), ran.err
    assert not (data.home / "made").exists()
    assert not data.catalog.exists()
    return ran.err


COMMIT = "0123456789" * 4
DIFF = "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "expected a JSON object"),
        ("", "expected a JSON object, received an empty line"),
        ("[]", "expected `object`, received `array`"),
        ({}, "object missing required field `id`"),
        ({"id": 1}, "id: expected `str`, received `int`"),
        ({"id": "a b"}, "id: expected 1 to 256 characters of ASCII without spaces, received 'a b'"),
        ({"repo": "x"}, "object contains unknown field `repo`"),
        ({"repository": "acme/tex"}, "repository: expected one of [repositories] of the configuration, received 'acme/tex'"),
        ({"commit": "main"}, "commit: expected a whole name of git, 40 hexadecimal digits, received 'main'"),
        ({"commit": None}, "commit: expected 'commit', 'mutation' or both, received neither"),
        ({"commit": None, "mutation": DIFF}, "commit: expected one, for repositories.acme/text of the configuration has none"),
        ({"mutation": "a change"}, "mutation: expected a unified diff, received 'a change'"),
        ({"mutation": DIFF + "\0"}, "mutation: expected text without NUL, received"),
        ({"mutation": {"file": "../x"}}, "mutation.file: expected a path below the directory of the tasks, without '..', received '../x'"),
        ({"mutation": {"file": "none"}}, "mutation.file: expected a file, received 'none': No such file"),
        ({"mutation": DIFF + "+" * (1 << 20)}, "mutation: expected at most 1048576 bytes, received 1048610"),
        ({"metadata": {"x": "y" * (8 << 20)}}, "expected at most 8388608 bytes, received more; what comes after it is not read"),
        ({"evaluator": "chekc"}, "evaluator: expected one of [evaluators] of the configuration (check), received 'chekc'"),
        ({"evaluator": {"name": "x"}}, "evaluator.name: expected one of [evaluators]"),
        ({"evaluator": {"files": {}}}, "evaluator.command: expected one"),
        ({"evaluator": {"command": []}}, "evaluator.command: expected `array` of length >= 1"),
        ({"evaluator": {"command": ["a"], "files": {"/a/../b": ""}}}, "evaluator: files: expected an absolute path"),
        ({"evaluator": {"command": ["a"], "files": {f"/{n}": "" for n in range(257)}}}, "evaluator.files: expected files that 256"),
        ({"metadata": []}, "metadata: expected `object`, received `array`"),
    ],
)  # fmt: skip
def test_bad_lines(data: DataSet, line: str | dict[str, Any], said: str) -> None:
    good = {"id": "x", "repository": "acme/text", "commit": COMMIT, "evaluator": "check"}
    if isinstance(line, dict):
        line = json.dumps({**good, **line} if line else {})
    (data.home / "tasks.jsonl").write_text(f"{json.dumps({**good, 'id': 'first'})}\n{line}\n")
    message = refused(data, USAGE)
    assert f"{data.home}/tasks.jsonl: line 2: {said}" in message
    assert "1 problem; nothing is built" in message


def test_every_bad_line_is_counted_and_the_first_are_shown(data: DataSet) -> None:
    data.write(*[{"id": "same", "repository": "acme/text", "commit": COMMIT, "evaluator": "check"}] * 31)
    message = refused(data, USAGE, "--dry-run")
    assert "line 21: id: expected one of its own, received 'same', as in line 1" in message
    assert "line 22" not in message
    assert "and 10 more\n30 problems; nothing is built" in message


def test_the_prefix_has_no_tag(data: DataSet) -> None:
    data.write({"id": "x", "repository": "acme/text", "commit": COMMIT, "evaluator": "check"})
    ran = data.build(to="made:tag")
    assert (ran.status, ran.out) == (USAGE, "")
    assert "expected a PREFIX without a tag" in ran.err
    assert not any(data.home.glob("made*"))


def test_mutations_that_do_not_apply_are_found_before_anything_is_built(data: DataSet) -> None:
    tasks = data.sources()
    data.write(*tasks, {**tasks[3], "id": "bad-1", "mutation": DIFF}, {**tasks[3], "id": "bad-2", "mutation": "--- a\n"})
    message = refused(data, USAGE, "--verify")
    assert "line 5: mutation: expected a diff that applies to" in message
    assert "received: error: x: does not exist in index" in message
    assert "line 6: mutation: expected a diff that applies to" in message
    assert "2 problems; nothing is built" in message


def test_a_commit_that_is_not_there(data: DataSet) -> None:
    data.write({"id": "x", "repository": "acme/text", "commit": COMMIT, "evaluator": "check"})
    for options in ((), ("--verify",)):
        ran = data.build(*options)
        assert (ran.status, ran.out) == (ERROR, "")
        assert "acme/text: expected its commit from its 'url', received: fatal: " in ran.err
        assert COMMIT in ran.err
        assert not data.catalog.exists()


def test_tasks_that_change_while_they_are_used(data: DataSet) -> None:
    config, path = load_config(data.home / "catalog.toml"), data.home / "tasks.jsonl"
    survey = survey_tasks(path, config)
    assert [task.id for task in reread_tasks(path, config, survey)] == [source["id"] for source in data.sources()]
    data.write(*data.sources()[:3])
    with pytest.raises(CommandError, match=f"expected sha256 {survey.sha256} as at first, received [0-9a-f]{{64}}: it was changed"):
        list(reread_tasks(path, config, survey))


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (CONFIG, "recipe = ", "expected TOML"),
        ("[harnesses]", "[harness]", "catalog.toml: object contains unknown field `harness`"),
        ('url = "./{{ repository }}"', "", "repositories.acme/Adder.url: expected one, here or for all, received none"),
        ('recipe = "repository.toml"', "", "repositories.acme/Adder.recipe: expected one, here or for all, received none"),
        ("greeting =", "greting =", "repositories.acme/text.variables.greting: expected one of [variables] of"),
        ("greeting =", "path =", "repositories.acme/text.variables.path: expected another name, for this one is set"),
        ("{{ repository }}", "{{ repo }}", "repositories.acme/Adder.url: 'repo' is undefined"),
        ('command = ["/eval/check"]', "command = []", "command: expected `array` of length >= 1"),
        ("[harnesses]", 'path = "src/"\n[harnesses]', "path: expected an absolute path of at most 1,000 characters"),
        ('version = "1"', "", "expected a 'version', or 'locks' in [cache]"),
        ('version = "1"', 'version = "1"\nrole = "base"', "role: expected 'task' or none, received 'base'"),
        ("[[steps]]", "[[stepz]]", "repository.toml: stepz: expected one of the keys"),
    ],
)
def test_bad_configurations(data: DataSet, before: str, after: str, said: str) -> None:
    name, text = ("catalog.toml", CONFIG) if before in CONFIG else ("repository.toml", RECIPE)
    assert before in text
    (data.home / name).write_text(text.replace(before, after, 1))
    assert said in refused(data, USAGE)


def test_an_evaluator_that_is_not_called_one(data: DataSet) -> None:
    (data.home / "catalog.toml").write_text(CONFIG.replace("groups:evaluator", "groups:harness"))
    assert "expected the role evaluator, received harness" in refused(data, USAGE)


def test_where_the_catalog_goes_is_looked_at_first(data: DataSet) -> None:
    assert "expected a directory that is there" in refused(data, NOT_FOUND, "--out", data.home / "none/catalog.jsonl")


def test_a_build_that_failed_goes_on(data: DataSet) -> None:
    """The first repository's group stays; the second is built when its recipe can be."""
    (data.home / "repository.toml").write_text(RECIPE + "[[steps]]\nrun = '[ \"{{ greeting }}\" != hello ]'\n")
    ran = data.build()
    assert (ran.status, ran.out) == (ERROR, "")
    assert "step 2 of 2: expected exit status 0, received 1; nothing is published" in ran.err
    assert not data.catalog.exists()
    (data.home / "catalog.toml").write_text(CONFIG.replace('"hello"', '"good day"'))
    result = data.built()
    assert (result["built"], result["taken"]) == (1, 1)


def test_groups_in_a_registry(data: DataSet, tmp_path_factory: pytest.TempPathFactory) -> None:
    with run_registry(tmp_path_factory.mktemp("registry")) as registry:
        files = (data.home / "tasks.jsonl", "--config", data.home / "catalog.toml", "--out", data.catalog)
        ran = data.weenv("catalog", "build", *files, "--to", f"{registry.host}/set", "--socket", data.node.socket)
        assert ran.status == OK, ran.err
        task = data.tasks()["text-1"]
        assert task.groups.task.startswith(f"{registry.host}/set/{tag_of('acme/text')}:latest@sha256:")
        with Client(data.node.socket) as client:
            made = client.create(task.execution_plan(), init=task.init_commands())
            assert output_of(client, made.id, "cat", "words") == "one\ntoo\nthree"
            client.delete(made.id)


def test_groups_that_must_be_there(data: DataSet) -> None:
    (data.home / "catalog.toml").write_text(CONFIG.replace("groups:harness", "groups:none"))
    assert "no group has the tag 'none'" in refused(data, NOT_FOUND)


# ---- counts ----


def test_the_papers_numbers(data: DataSet) -> None:
    """39,471 tasks over 131 repositories (SWE-Smith-Python): 133 artefacts and the harnesses."""
    names = [f"owner/repository-{number}" for number in range(131)]
    sections = "".join(f'[repositories."{name}"]\ncommit = "{COMMIT}"\n' for name in names)
    harnesses = "".join(f'h{number} = "oci:groups:h{number}"\n' for number in range(7))
    config = CONFIG.partition("[repositories")[0].replace("[harnesses]\n", f"[harnesses]\n{harnesses}")
    (data.home / "catalog.toml").write_text(config + sections)
    data.write(*(
        {"id": f"task-{number}", "repository": names[number % 131], "mutation": DIFF, "evaluator": "check"} for number in range(39_471)
    ))  # fmt: skip
    result = data.built("--dry-run")
    assert (result["tasks"], result["repositories"], result["artefacts"]) == (39_471, 131, 133 + 8)
    assert (result["one_image_per_task"], result["one_image_per_task_and_harness"]) == (39_471, 39_471 * 8)
    shown = data.build("--dry-run").out
    assert re.search(r"^artefacts +141  1 base \+ 131 task \+ 1 evaluator \+ 8 harness$", shown, re.MULTILINE)
    assert not data.catalog.exists()


# ---- a look at a catalog ----


def test_show_and_stats(data: DataSet) -> None:
    built = data.built()
    stats = json.loads(data.weenv("catalog", "stats", data.catalog, "--format", "json").out)
    assert stats == {name: built[name] for name in stats}
    shown = data.weenv("catalog", "show", "adder-2", data.catalog)
    first, second = data.tasks()["adder-2"], data.tasks()["text-1"]
    assert shown.out.splitlines()[0] == f"adder-2  acme/Adder at {first.commit}"
    assert f"group {first.groups.evaluator}\n" in shown.out
    assert shown.out.splitlines()[-1] == "eval  /eval/check"
    described = json.loads(data.weenv("catalog", "show", "text-1", data.catalog, "--format", "json").out)
    assert (described["groups"], tuple(described["eval"]["command"])) == (
        {"base": list(second.groups.base), "task": second.groups.task}, second.eval.command,
    )  # fmt: skip
    assert "no task has the id 'text-9'" in assert_status(data.weenv("catalog", "show", "text-9", data.catalog), NOT_FOUND)


def assert_status(ran: Ran, status: int) -> str:
    assert (ran.status, ran.out) == (status, ""), ran.err
    return ran.err


PINNED = f"oci:/groups:x@sha256:{'0' * 64}"
HEADER = {"catalog": 1, "tasks": 1, "tasks_sha256": "0" * 64}
LINE = {
    "id": "x", "repository": "r", "commit": COMMIT, "groups": {"base": [PINNED], "task": PINNED}, "init": [["true"]],
    "eval": {"command": ["true"]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "line 1: expected a JSON object, received an empty line"),
        ([{**HEADER, "catalog": 2}, LINE], "line 1: catalog: expected version 1, received 2"),
        ([LINE], "line 1: object missing required field `catalog`"),
        ([HEADER], "expected 1 tasks, as its header says, received 0"),
        ([{**HEADER, "tasks": 2}, LINE, LINE], "line 3: id: expected one of its own, received 'x', as in line 2"),
        ([HEADER, {**LINE, "groups": {"base": ["oci:/groups:x"], "task": PINNED}}],
         "line 2: groups: base: expected REF@sha256:… with 64 hexadecimal digits, received 'oci:/groups:x'"),
        ([HEADER, {**LINE, "init": [[]]}], "line 2: init[0]: expected `array` of length >= 1"),
        ([{**HEADER, "harnesses": {"h": "x"}}, LINE], "line 1: harnesses: expected REF@sha256:…"),
        ([HEADER, {**LINE, "init": [["a", "\0"]]}], "line 2: init: expected text without NUL"),
        ([HEADER, "{"], "line 2: expected a JSON object"),
    ],
)
def test_what_is_no_catalog(tmp_path: Path, data_free_weenv: Callable[..., Ran], lines: list[Any], said: str) -> None:
    path = tmp_path / "catalog.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    with pytest.raises(CatalogError) as raised:
        list(read_catalog(path))
    assert str(raised.value).startswith(f"{path}: {said}")
    assert said in assert_status(data_free_weenv("catalog", "stats", path), INTEGRITY)


@pytest.fixture
def data_free_weenv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    return isolated_weenv(tmp_path / "home", monkeypatch, capsys)


def test_fields_of_a_later_writer_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "c").write_text(f"{json.dumps({**HEADER, 'new': 1})}\n{json.dumps({**LINE, 'new': 1})}\n")
    assert [task.id for task in read_catalog(tmp_path / "c")] == ["x"]


# ---- texts in commands ----


@given(st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0")), st.sampled_from([1, 40_000]))
def test_texts_arrive_as_they_are(tmp_path_factory: pytest.TempPathFactory, text: str, times: int) -> None:
    path = tmp_path_factory.mktemp("text") / "it's a/deep one"
    commands = write_file(str(path), text * times)
    assert fits(commands)
    for command in commands:
        subprocess.run(command, check=True)
    assert path.read_bytes().decode() == text * times


@pytest.mark.parametrize("character", ["'", "a", "é", "\n"])
def test_the_largest_mutation_fits(character: str) -> None:
    """Also when all of it must be quoted, in a repository at a long path."""
    commands = init_commands("/" + "'" * 900, COMMIT, character * ((1 << 20) // len(character.encode())), seal=True)
    assert fits(commands)
    assert max(len(word.encode()) for command in commands for word in command) <= MAX_COMMAND_BYTES


def test_names_become_tags_that_differ() -> None:
    names = ["a/b", "A/b", "a-b", "a/b/", "é", "è", "x" * 300, "x" * 301]
    tags = [tag_of(name) for name in names]
    assert len(set(tags)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", tag) and len(tag) <= 128 for tag in tags)

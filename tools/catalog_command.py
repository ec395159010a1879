"""`weenv catalog …`: a data set of tasks becomes groups of repositories and a catalog for rollout servers; and a look at one."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import frozen

from tools import exits, output, publishing, settings
from tools.build_command import anchored, build_group, resolve_beside
from tools.node_commands import add_socket

if TYPE_CHECKING:
    from envlet.catalog import Task
    from registry import Group
    from tools.catalog.config import CatalogConfig, Repository
    from tools.catalog.counts import Counts
    from tools.catalog.sources import Source
    from tools.catalog.tasks import Survey, TaskSource
    from tools.recipes.files import Tree
    from tools.recipes.keys import CacheMode

_DEFAULT_CATALOG = Path("catalog.jsonl")
_BATCH = 256
"""Tasks that are verified at once: what is kept of a data set in memory."""

T = TypeVar("T")


def register(commands: Any) -> None:
    parser = commands.add_parser("catalog", help="a data set of tasks: groups of its repositories, and a catalog of its tasks")
    sub = parser.add_subparsers(dest="catalog_command", required=True, metavar="COMMAND")

    build = sub.add_parser(
        "build",
        help="package the repositories of TASKS.jsonl and write the catalog (docs/catalog.md)",
        description="Every repository becomes one group with all the commits that its tasks need; what is particular to a task are "
        "init commands in the catalog. Groups that are there already are taken, so a build that was cut off goes on.",
    )
    build.add_argument("tasks", type=Path, metavar="TASKS.jsonl")
    build.add_argument("--config", type=Path, required=True, metavar="CATALOG.toml")
    build.add_argument("--to", required=True, metavar="PREFIX", help="oci:DIR or HOST[:PORT]/REPO: where the repositories' groups go")
    build.add_argument("--out", type=Path, default=_DEFAULT_CATALOG, metavar="FILE", help="default: %(default)s")
    build.add_argument("--dry-run", action="store_true", help="check the lines and print the counts; nothing is fetched or built")
    build.add_argument(
        "--verify", action="store_true",
        help="before anything is built, apply every mutation to its commit; the catalog then has the name of each task's state",
    )  # fmt: skip
    build.add_argument("--cpu", type=output.parse_cores, metavar="N", help="cores of a build's environment")
    build.add_argument("--memory", type=output.parse_memory, metavar="SIZE")
    publishing.add_jobs(build)
    output.add_format(build)
    add_socket(build)
    build.set_defaults(run=run_build)

    show = sub.add_parser("show", help="one task of a catalog")
    show.add_argument("id", metavar="ID")
    _add_catalog(show)
    output.add_format(show)
    show.set_defaults(run=run_show)

    stats = sub.add_parser("stats", help="check a whole catalog and count what it needs")
    _add_catalog(stats)
    output.add_format(stats)
    stats.set_defaults(run=run_stats)


def _add_catalog(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("catalog", type=Path, nargs="?", default=_DEFAULT_CATALOG, metavar="FILE", help="default: %(default)s")


# ---- build ----


@frozen
class _Plan:
    """All that is known before anything is fetched."""

    tasks: Path
    config: CatalogConfig
    directory: Path
    survey: Survey
    sources: dict[str, Source]

    def references(self, names: Sequence[str]) -> list[str]:
        """References of the configuration, where relative layouts begin at its directory."""
        return list(dict.fromkeys(anchored(name, self.directory) for name in names))

    def evaluators(self) -> dict[str, str]:
        """By name, the groups of evaluators that a task needs."""
        return {
            name: spec.group for name, spec in self.config.evaluators.items() if name in self.survey.evaluators and spec.group is not None
        }

    def base(self, repository: Repository) -> list[str]:
        return [anchored(name, repository.recipe_path.parent) for name in repository.recipe.base]

    def counts(self) -> Counts:
        from tools.catalog.counts import Counts

        return Counts(
            tasks=self.survey.tasks,
            repositories=len(self.sources),
            base=len({reference for source in self.sources.values() for reference in self.base(source.repository)}),
            task=len(self.sources),
            evaluator=len(self.references(list(self.evaluators().values()))),
            harness=len(self.references(list(self.config.harnesses.values()))),
        )


@frozen
class _Packaged:
    """The groups that tasks are made of, pinned: base and task by repository, the others by name."""

    base: dict[str, tuple[str, ...]]
    task: dict[str, str]
    evaluators: dict[str, str]
    harnesses: dict[str, str]
    built: int


def run_build(arguments: argparse.Namespace) -> int:
    publishing.check_jobs(arguments.jobs)
    plan = _plan(arguments)
    counts = plan.counts()
    result = counts.described()
    if not arguments.dry_run:
        with exits.terminable(), tempfile.TemporaryDirectory(prefix="weenv-catalog-") as scratch:
            packaged = _build(arguments, plan, Path(scratch))
        result |= {
            "catalog": str(arguments.out),
            "built": packaged.built,
            "taken": len(plan.sources) - packaged.built,
        }
    if arguments.format == "json":
        output.print_json(result)
    else:
        counts.print()
    return exits.OK


def _plan(arguments: argparse.Namespace) -> _Plan:
    """CommandError for everything that is wrong with the files; nothing was done by then."""
    from registry.group import parse_target
    from tools.catalog.config import load_config, open_repository
    from tools.catalog.sources import choose_source
    from tools.catalog.tasks import survey_tasks

    if not arguments.out.parent.is_dir():
        raise exits.CommandError(f"--out {arguments.out}: expected a directory that is there, received one that is not", exits.NOT_FOUND)
    config = load_config(arguments.config)
    survey = survey_tasks(arguments.tasks, config)
    epoch_s = settings.source_date_epoch()
    sources = {
        name: choose_source(open_repository(config, name, arguments.config, epoch_s), commits) for name, commits in survey.commits.items()
    }
    for source in sources.values():
        parse_target(publishing.target(arguments.to, source.repository.tag, None), "task")
    return _Plan(arguments.tasks, config, arguments.config.parent, survey, sources)


def _build(arguments: argparse.Namespace, plan: _Plan, scratch: Path) -> _Packaged:
    """Resolves what must be there, verifies if asked, builds what is not there, and writes the catalog."""
    from tools.recipes.environment import Place

    harnesses = _pinned_by_name(plan.config.harnesses, plan.directory, {"harness", None})
    evaluators = _pinned_by_name(plan.evaluators(), plan.directory, {"evaluator"})
    base = _resolve_bases(plan)
    trees = _verify(plan, scratch, arguments.jobs) if arguments.verify else None
    place = Place(settings.socket_path(arguments.socket), arguments.cpu, arguments.memory)
    task: dict[str, str] = {}
    built = 0
    for number, (name, source) in enumerate(plan.sources.items(), 1):
        output.say(f"{number} of {len(plan.sources)}: {name}")
        keyed = source.keyed()
        outcome = build_group(
            keyed.recipe,
            keyed.recipe_path,
            publishing.target(arguments.to, keyed.tag, None),
            base[name],
            _cache_mode(keyed),
            place,
            arguments.jobs,
            _tree_maker(source, scratch),
        )
        task[name] = anchored(outcome.reference, Path.cwd())
        built += outcome.built
    packaged = _Packaged(
        {name: tuple(group.reference for group in groups) for name, groups in base.items()}, task, evaluators, harnesses, built
    )
    _write(arguments.out, plan, packaged, trees)
    return packaged


def _cache_mode(repository: Repository) -> CacheMode:
    from tools.recipes.keys import default_mode

    return default_mode(repository.recipe)


def _pinned_by_name(references: dict[str, str], directory: Path, roles: Set[str | None]) -> dict[str, str]:
    """CommandError for a group of another role: an evaluator without its role would not be refused where it is not to be seen."""
    groups = resolve_beside(list(references.values()), directory)
    for name, group in zip(references, groups, strict=True):
        if group.role not in roles:
            wanted = " or ".join(sorted(role for role in roles if role is not None))
            raise exits.CommandError(f"{name}: {group.reference}: expected the role {wanted}, received {group.role or 'none'}", exits.USAGE)
    return {name: group.reference for name, group in zip(references, groups, strict=True)}


def _resolve_bases(plan: _Plan) -> dict[str, tuple[Group, ...]]:
    """By repository. Each group is asked for once."""
    wanted = {reference for source in plan.sources.values() for reference in plan.base(source.repository)}
    resolved = dict(zip(sorted(wanted), resolve_beside(sorted(wanted), Path()), strict=True))
    return {
        name: tuple(resolved[reference] for reference in plan.base(source.repository)) for name, source in plan.sources.items()
    }


def _tree_maker(source: Source, scratch: Path) -> Callable[[Path], Sequence[Tree]]:
    """What makes the tree of a repository, unless verification has."""
    from tools.catalog.sources import fetch_tree
    from tools.recipes.files import Tree

    def make(build_scratch: Path) -> Sequence[Tree]:
        path = scratch / source.repository.tag
        if not path.exists():
            path = build_scratch / "repository"
            fetch_tree(source, path)
        return (Tree(path, source.repository.path),)

    return make


# ---- verification ----


def _verify(plan: _Plan, scratch: Path, jobs: int) -> list[str]:
    """Fetches every repository and applies every mutation; git's names of the states, in the order of the tasks. CommandError
    with all that does not apply.
    """
    from tools.catalog.sources import GitRefused, Verifier, fetch_tree
    from tools.catalog.tasks import Problems, reread_tasks

    verifiers = {}
    for number, (name, source) in enumerate(plan.sources.items(), 1):
        output.say(f"fetching {number} of {len(plan.sources)}: {name}")
        tree, own = scratch / source.repository.tag, scratch / f"verify-{source.repository.tag}"
        fetch_tree(source, tree)
        own.mkdir()
        verifiers[name] = Verifier(tree, own)
    problems = Problems(plan.tasks)

    def verify(task: TaskSource) -> str | GitRefused:
        try:
            return verifiers[task.repository].tree_of(task.commit, task.mutation)
        except GitRefused as error:
            return error

    trees: list[str] = []
    with ThreadPoolExecutor(jobs) as pool:
        for batch in _batches(reread_tasks(plan.tasks, plan.config, plan.survey)):
            for task, outcome in zip(batch, pool.map(verify, batch), strict=True):
                if isinstance(outcome, GitRefused):
                    problems.add(task.line, f"mutation: expected a diff that applies to {task.commit}, received: {outcome}")
                else:
                    trees.append(outcome)
            output.say(f"verified {len(trees) + problems.count} of {plan.survey.tasks} tasks")
    problems.check()
    return trees


def _batches(items: Iterator[T]) -> Iterator[list[T]]:
    while batch := list(islice(items, _BATCH)):
        yield batch


# ---- the catalog ----


def _write(path: Path, plan: _Plan, packaged: _Packaged, trees: list[str] | None) -> None:
    """The whole file, or the one that was there. CommandError, OSError."""
    from envlet.catalog import VERSION, Header, encode_line
    from tools.catalog.tasks import reread_tasks

    header = Header(catalog=VERSION, tasks=plan.survey.tasks, tasks_sha256=plan.survey.sha256, harnesses=packaged.harnesses)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            file.write(encode_line(header))
            for number, task in enumerate(reread_tasks(plan.tasks, plan.config, plan.survey)):
                file.write(encode_line(_task(task, plan, packaged, trees[number] if trees is not None else None)))
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            unfinished.unlink()
        raise


def _task(task: TaskSource, plan: _Plan, packaged: _Packaged, tree: str | None) -> Task:
    """A line of the catalog."""
    from envlet.catalog import Evaluation, Groups, Task

    source = plan.sources[task.repository]
    return Task(
        id=task.id,
        repository=task.repository,
        commit=task.commit,
        groups=Groups(
            base=packaged.base[task.repository],
            task=packaged.task[task.repository],
            evaluator=packaged.evaluators[task.evaluator] if task.evaluator is not None else None,
        ),
        init=task.init(source.repository.path, seal=source.repository.seal and not (source.alone and task.mutation is None)),
        eval=Evaluation(command=task.judging, init=task.evaluation_init()),
        tree=tree,
        metadata=task.metadata,
    )


# ---- a look at one ----


def run_show(arguments: argparse.Namespace) -> int:
    import msgspec

    from envlet.catalog import read_catalog

    task = next((task for task in read_catalog(arguments.catalog) if task.id == arguments.id), None)
    if task is None:
        raise exits.CommandError(f"{arguments.catalog}: no task has the id '{arguments.id}'", exits.NOT_FOUND)
    if arguments.format == "json":
        output.print_json(msgspec.to_builtins(task))
        return exits.OK
    print(f"{task.id}  {task.repository} at {task.commit}")
    for reference in task.evaluation_plan():
        print(f"group {reference}")
    if task.tree is not None:
        print(f"tree  {task.tree}")
    for what, commands in (("init", task.init_commands()), ("eval", [*task.eval.init_commands(), shlex.join(task.eval.command)])):
        for command in commands:
            print(f"{what}  {command}")
    return exits.OK


def run_stats(arguments: argparse.Namespace) -> int:
    counts = _count(arguments.catalog)
    if arguments.format == "json":
        output.print_json(counts.described())
    else:
        counts.print()
    return exits.OK


def _count(path: Path) -> Counts:
    """What a catalog needs, of which every line is read. CatalogError, OSError."""
    from envlet.catalog import read_catalog, read_header
    from tools.catalog.counts import Counts

    header = read_header(path)
    tasks: Counter[str] = Counter()
    groups: dict[str, set[str]] = {"base": set(), "task": set(), "evaluator": set()}
    for task in read_catalog(path):
        tasks[task.repository] += 1
        groups["base"].update(task.groups.base)
        groups["task"].add(task.groups.task)
        groups["evaluator"].update([task.groups.evaluator] if task.groups.evaluator is not None else [])
    numbers = {role: len(references) for role, references in groups.items()}
    return Counts(tasks=tasks.total(), repositories=len(tasks), harness=len(set(header.harnesses.values())), **numbers)

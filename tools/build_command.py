"""`weenv group build RECIPE`: a group made from a recipe in an environment of this node, without docker."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from attrs import evolve, frozen

from tools import check_command, exits, output, publishing, settings
from tools.node_commands import add_socket

if TYPE_CHECKING:
    from registry import Group, GroupConfig
    from tools.recipes.environment import Place
    from tools.recipes.files import Tree
    from tools.recipes.keys import CacheMode
    from tools.recipes.recipe import Recipe
    from weefs.merge import View


def register(commands: Any) -> None:
    build = commands.add_parser(
        "build",
        help="run a recipe (docs/recipes.md) in an environment and publish what is different then; prints REF@sha256:…",
        description="The recipe's files are put into a fresh environment of its base groups, its steps run there without a network, "
        "and the difference becomes one layer. A step that fails publishes nothing. Steps print to stderr.",
    )
    build.add_argument("recipe", type=Path, metavar="RECIPE", help="a TOML file")
    build.add_argument("--to", required=True, metavar="REF", help="where it is published, and where an earlier result is looked for")
    build.add_argument(
        "--cache", choices=("scratch", "versioned", "lock"),
        help="take an earlier result never; while base groups, variables and the recipe's version are the same; or while its lock files "
        "are, too (default: the last that the recipe has what it needs for)",
    )  # fmt: skip
    build.add_argument(
        "--set", dest="variables", type=output.parse_variable, action="append", default=[], metavar="K=V",
        help="a variable of the recipe; repeatable",
    )  # fmt: skip
    build.add_argument("--cpu", type=output.parse_cores, metavar="N", help="cores")
    build.add_argument("--memory", type=output.parse_memory, metavar="SIZE")
    publishing.add_jobs(build)
    output.add_format(build)
    add_socket(build)
    build.set_defaults(run=run)


@frozen
class _Build:
    """What is built, from what, and where it goes."""

    recipe: Recipe
    path: Path
    reference: str
    base: tuple[Group, ...]
    keys: str | None
    jobs: int


@frozen
class Built:
    """A group that was built, or was there: its pinned reference, which cache was asked, and the seconds of the steps that ran."""

    reference: str
    built: bool
    cache: CacheMode
    steps_wall_s: tuple[float, ...] = ()


def run(arguments: argparse.Namespace) -> int:
    from registry.group import parse_target
    from tools.recipes.environment import Place
    from tools.recipes.keys import check_mode, default_mode
    from tools.recipes.recipe import load_recipe

    publishing.check_jobs(arguments.jobs)
    recipe = load_recipe(arguments.recipe, dict(arguments.variables), settings.source_date_epoch())
    parse_target(arguments.to, recipe.role)  # refused before anything is run
    mode: CacheMode = arguments.cache or default_mode(recipe)
    check_mode(mode, recipe)
    place = Place(settings.socket_path(arguments.socket), arguments.cpu, arguments.memory)
    with exits.terminable():
        base = resolve_beside(recipe.base, arguments.recipe.parent)
        return _print(arguments, build_group(recipe, arguments.recipe, arguments.to, base, mode, place, arguments.jobs))


def build_group(
    recipe: Recipe,
    path: Path,
    reference: str,
    base: tuple[Group, ...],
    mode: CacheMode,
    place: Place,
    jobs: int,
    make_trees: Callable[[Path], Sequence[Tree]] = lambda _scratch: (),
) -> Built:
    """Takes the earlier result, or runs the recipe of the file `path` and publishes.

    `make_trees`: makes, in a scratch directory, what is put in besides the recipe's files; called only when something is
    built. CommandError, RegistryError, EnvletError and their kinds.
    """
    from tools.recipes.keys import build_keys, keys_text
    from tools.recipes.recipe import named

    with named(path):
        keys = build_keys(recipe, path.parent, [group.digest for group in base])
    earlier = None if mode == "scratch" else _find_earlier(reference, mode, keys)
    if earlier is not None:
        output.say(f"{earlier}: {_SAME[mode]} as when it was built; nothing is run")
        return Built(earlier, False, mode)
    build = _Build(recipe, path, reference, base, keys_text(keys), jobs)
    with named(path), tempfile.TemporaryDirectory(prefix="weenv-build-") as scratch:
        pinned, steps = _build(build, place, Path(scratch), make_trees(Path(scratch)))
    return Built(pinned, True, mode, tuple(steps))


_SAME = {
    "versioned": "the base groups, the variables and the version are the same",
    "lock": "the base groups, the variables, the version and the lock files are the same",
}


def _print(arguments: argparse.Namespace, built: Built) -> int:
    result: dict[str, Any] = {"reference": built.reference, "built": built.built, "cache": built.cache}
    if built.built:
        result["steps"] = [{"wall_s": wall_s} for wall_s in built.steps_wall_s]
    if arguments.format == "json":
        output.print_json(result)
    else:
        print(built.reference)
    return exits.OK


def resolve_beside(references: Sequence[str], directory: Path) -> tuple[Group, ...]:
    """Groups that a file in `directory` names. RegistryError and its kinds."""
    from registry import resolve_group

    return tuple(resolve_group(anchored(text, directory), credentials=settings.credentials()) for text in references)


def anchored(text: str, directory: Path) -> str:
    """A reference where the relative path of a layout begins at `directory`. InvalidReference."""
    from registry import LayoutReference, parse_reference

    parsed = parse_reference(text)
    if isinstance(parsed, LayoutReference):
        parsed = evolve(parsed, directory=(directory / parsed.directory).absolute())
    return str(parsed)


def _find_earlier(reference: str, mode: CacheMode, keys: dict[CacheMode, str]) -> str | None:
    """What the target means now, if it was built from the same and is there with all its layers."""
    from registry import IntegrityError, NotFound, RegistryError, parse_reference, resolve_group
    from registry.target import open_target
    from tools.recipes.keys import has_key

    try:
        group = resolve_group(reference, credentials=settings.credentials())
    except NotFound:
        output.say(f"{reference}: there is no earlier result")
        return None
    except RegistryError as error:
        if type(error) not in (RegistryError, IntegrityError):
            raise  # a registry that is away or refuses us: publishing would fail too, only later
        output.say(f"weenv: {error}; it is built anew")
        return None
    if not has_key(group.build, mode, keys):
        output.say(f"{reference}: the earlier result is not of these inputs ({mode})")
        return None
    with open_target(parse_reference(reference), settings.credentials()) as target:
        missing = [layer.digest for layer in group.layers if not target.has_blob(layer.digest)]
    if missing:
        output.say(f"weenv: {reference}: the earlier result lacks its layer {missing[0]}; it is built anew")
        return None
    return group.reference


def _build(build: _Build, place: Place, scratch: Path, trees: Sequence[Tree]) -> tuple[str, list[float]]:
    """Runs the recipe and publishes; the reference with its digest, and the seconds of each step."""
    from registry.publish import GroupSource, describe_file
    from tools.recipes.environment import run_steps
    from tools.recipes.files import write_files

    with (scratch / "files.tar").open("w+b") as files, (scratch / "diff.tar").open("w+b") as diff:
        has_files = bool(build.recipe.files or trees)
        if has_files:
            write_files(build.recipe, build.path.parent, _view(build.base), files, trees)
            files.seek(0)
        groups = [group.reference for group in build.base]
        steps = run_steps(build.recipe, groups, files if has_files else None, place, diff)
        layer = _encode(build, scratch, diff)
    group = GroupSource(
        build.reference,
        (describe_file(layer, build.recipe.name),),
        role=build.recipe.role,
        config=_config(build.recipe),
        runs_on=build.base[-1].runs_on,
        build=build.keys,
    )
    pinned, _outcomes = publishing.publish([group], build.jobs)
    return pinned[0], steps


def _view(base: Sequence[Group]) -> View:
    """What the base groups have at each path: their metadata is fetched, no contents."""
    from tools.check.filesystem import deep_trees
    from tools.check.opening import open_plan
    from weefs.merge import View

    with open_plan(base[:-1], base[-1], settings.credentials()) as plan, deep_trees():
        return View(plan.layers)


def _encode(build: _Build, scratch: Path, diff: BinaryIO) -> Path:
    """The layer of a diff, and what was left out said on stderr."""
    from registry.publish import Encoding
    from tools.recipes.git import repair_indexes
    from tools.recipes.layer import encode_diff, survey_diff
    from tools.recipes.paths import matcher

    recipe, encoding = build.recipe, Encoding()
    survey = survey_diff(diff, recipe.epoch, matcher(recipe.exclude))
    if survey.excluded:
        output.say(f"{len(survey.excluded)} entries excluded")
    if survey.stale:
        output.say(f"{len(survey.stale)} compiled Python files left out, which name the time of this build")
    layer = scratch / "layer.weenv"
    made = encode_diff(diff, survey, layer, encoding, epoch_s=recipe.epoch, jobs=build.jobs)
    if recipe.git.fix:
        repair, members = repair_indexes(layer, build.base, scratch, settings.credentials())
        check_command.say_repairs(repair)
        if members:
            made = encode_diff(diff, survey, layer, encoding, epoch_s=recipe.epoch, jobs=build.jobs, replaced=members)
    output.say(f"{made.entries} entries, {output.size(made.content_size)} of files: {output.size(made.blob_size)}")
    return layer


def _config(recipe: Recipe) -> GroupConfig:
    from registry import GroupConfig

    config = recipe.config
    env = tuple(f"{name}={value}" for name, value in config.env.items())
    return GroupConfig(env, config.workdir, config.user, config.entrypoint, config.cmd)

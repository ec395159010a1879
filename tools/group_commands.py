"""`weenv group …`: push, resolve, tree; the others register themselves."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from tools import build_command, check_command, exits, group_diff, output, publishing, settings, totar_command

if TYPE_CHECKING:
    from registry import Group
    from registry.publish import LayerSource


def register(commands: Any) -> None:
    parser = commands.add_parser("group", help="publish layer groups and look at them")
    sub = parser.add_subparsers(dest="group_command", required=True, metavar="COMMAND")

    push = sub.add_parser("push", help="publish layers, base first, under a reference; prints REF@sha256:…")
    push.add_argument("reference", metavar="REF")
    push.add_argument(
        "--layer", dest="layers", type=_layer, action="append", metavar="FILE", help="a layer; repeatable, base first"
    )
    push.add_argument(
        "--tar", dest="layers", type=_tar, action="append", metavar="FILE",
        help="a tar, compressed or not, converted to one layer; repeatable, also among --layer",
    )  # fmt: skip
    push.add_argument("--rootfs", type=Path, metavar="DIR", help="a directory, converted to the only layer")
    push.add_argument(
        "--role", choices=("base", "task", "harness", "evaluator"), help="evaluator: refused in execution environments"
    )
    push.add_argument(
        "--env",
        type=output.parse_variable,
        action="append",
        default=[],
        metavar="K=V",
        help="for the environment's processes",
    )
    push.add_argument("--workdir", type=output.parse_absolute, metavar="D", help="where the environment's commands start")
    push.add_argument("--user", type=_user, metavar="USER[:GROUP]", help="as whom they run")
    push.add_argument(
        "--fix-git", action="store_true", help="first repair the git indexes in --rootfs, in place, as `group check --git --fix` would"
    )
    publishing.add_recipe(push)
    publishing.add_jobs(push)
    push.set_defaults(run=run_push)

    resolve = sub.add_parser("resolve", help="a reference to its digest and layers")
    resolve.add_argument("reference", metavar="REF")
    output.add_format(resolve)
    resolve.set_defaults(run=run_resolve)

    tree = sub.add_parser("tree", help="a group and its layers, drawn")
    tree.add_argument("reference", metavar="REF")
    output.add_format(tree)
    tree.set_defaults(run=run_tree)

    build_command.register(sub)

    check_command.register(sub)

    group_diff.register(sub)
    totar_command.register(sub)


def _layer(text: str) -> tuple[str, Path]:
    return "layer", Path(text)


def _tar(text: str) -> tuple[str, Path]:
    return "tar", Path(text)


def _user(text: str) -> str:
    """As an environment will read it."""
    from envlet.errors import EnvletError
    from envlet.users import split_user

    if not text:
        raise argparse.ArgumentTypeError("expected USER[:GROUP], received nothing")
    try:
        split_user(text)
    except EnvletError as error:
        raise argparse.ArgumentTypeError(error.message) from error
    return text


def run_push(arguments: argparse.Namespace) -> int:
    from registry import GroupConfig
    from registry.group import parse_target
    from registry.publish import GroupSource

    publishing.check_jobs(arguments.jobs)
    parse_target(arguments.reference, arguments.role)  # refused before anything is read
    config = GroupConfig(
        env=tuple(f"{name}={value}" for name, value in arguments.env), workdir=arguments.workdir, user=arguments.user
    )
    with exits.terminable():
        group = GroupSource(arguments.reference, _sources(arguments), role=arguments.role, config=config)
        pinned, _outcomes = publishing.publish([group], arguments.jobs, recipe=arguments.recipe)
    print(*pinned)
    return exits.OK


def _sources(arguments: argparse.Namespace) -> tuple[LayerSource, ...]:
    """What the group is made of, in the order of the command line. CommandError, RegistryError."""
    from registry.publish import DirectorySource, describe_file, describe_tar

    if (arguments.layers is None) == (arguments.rootfs is None):
        received = "neither" if arguments.layers is None else "both"
        raise exits.CommandError(f"expected --layer and --tar, or --rootfs, received {received}", exits.USAGE)
    if arguments.fix_git and arguments.rootfs is None:
        raise exits.CommandError("--fix-git: expected --rootfs, whose repositories it repairs; for a group, see `group check`", exits.USAGE)
    if arguments.recipe and not any(kind == "tar" for kind, _ in arguments.layers or ()):
        raise exits.CommandError("--recipe: expected --tar, whose bytes it gives back, received none", exits.USAGE)
    if arguments.rootfs is not None:
        if not arguments.rootfs.is_dir():
            raise exits.CommandError(f"--rootfs {arguments.rootfs}: expected a directory; a tar is given with --tar", exits.USAGE)
        if arguments.fix_git:
            _fix_git(arguments.rootfs)
        return (DirectorySource(arguments.rootfs),)
    return tuple(describe_file(path) if kind == "layer" else describe_tar(path) for kind, path in arguments.layers)


def _fix_git(root: Path) -> None:
    """Repairs what can be repaired, and says it. CommandError when something could not be: then nothing is published."""
    from tools.check.git_repair import repair_tree

    repaired = repair_tree(root)
    check_command.say_repairs(repaired)
    if repaired.refused:
        raise exits.CommandError(
            f"--fix-git: {len(repaired.refused)} of {len(repaired.refused) + len(repaired.repairs)} repositories cannot be repaired; "
            "nothing is published: mend them, or push without --fix-git, for the others are repaired"
        )


def _resolve(arguments: argparse.Namespace) -> Group:
    from registry import resolve_group

    return resolve_group(arguments.reference, credentials=settings.credentials())


def _describe(group: Group) -> dict[str, Any]:
    origins = {one.layer.digest: {"origin": attrs.asdict(one.origin)} for one in group.conversions}
    return {
        "reference": group.reference,
        "digest": group.digest,
        "role": group.role,
        "source": group.source,
        "size_bytes": sum(layer.size_bytes for layer in group.layers),
        "config": attrs.asdict(group.config),
        "layers": [attrs.asdict(layer) | origins.get(layer.digest, {}) for layer in group.layers],
    }


def run_resolve(arguments: argparse.Namespace) -> int:
    group = _resolve(arguments)
    if arguments.format == "json":
        output.print_json(_describe(group))
    else:
        print(group.reference)
        for layer in group.layers:
            print(layer.digest)
    return exits.OK


def run_tree(arguments: argparse.Namespace) -> int:
    group = _resolve(arguments)
    described = _describe(group)
    if arguments.format == "json":
        output.print_json(described)
        return exits.OK
    print(f"{group.reference}  {group.role or 'no role'}, {output.size(described['size_bytes'])}")
    lines = [
        f"{name} {value}" for name, value in (("workdir", group.config.workdir), ("user", group.config.user)) if value
    ]
    commands = (("entrypoint", group.config.entrypoint), ("cmd", group.config.cmd))
    lines += [f"{name} {shlex.join(words) or 'none'}" for name, words in commands if words is not None]
    lines += [f"env {variable}" for variable in group.config.env]
    lines += [
        f"layer {layer.digest}  {output.size(layer.size_bytes)}"
        + (f", metadata {output.size(layer.toc_size_bytes)}" if layer.toc_size_bytes is not None else "")
        for layer in group.layers
    ]
    for number, line in enumerate(lines):
        print(f"{'└─' if number == len(lines) - 1 else '├─'} {line}")
    return exits.OK

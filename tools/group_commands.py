"""`weenv group …`: push, resolve, tree."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from tools import exits, output, settings
from tools.layer_commands import progress_bar

if TYPE_CHECKING:
    from registry import Group


def register(commands: Any) -> None:
    parser = commands.add_parser("group", help="publish layer groups and look at them")
    sub = parser.add_subparsers(dest="group_command", required=True, metavar="COMMAND")

    push = sub.add_parser("push", help="publish layers, base first, under a reference; prints REF@sha256:…")
    push.add_argument("reference", metavar="REF")
    source = push.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--layer", type=Path, action="append", default=[], metavar="FILE", help="a layer; repeatable, base first"
    )
    source.add_argument("--rootfs", type=Path, metavar="DIR", help="a directory, converted to one layer")
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
    push.add_argument("--workdir", metavar="D", help="where the environment's commands start")
    push.add_argument("--user", metavar="USER[:GROUP]", help="as whom they run")
    push.add_argument(
        "-j", "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="workers of the conversion"
    )
    push.set_defaults(run=run_push)

    resolve = sub.add_parser("resolve", help="a reference to its digest and layers")
    resolve.add_argument("reference", metavar="REF")
    output.add_format(resolve)
    resolve.set_defaults(run=run_resolve)

    tree = sub.add_parser("tree", help="a group and its layers, drawn")
    tree.add_argument("reference", metavar="REF")
    output.add_format(tree)
    tree.set_defaults(run=run_tree)


def run_push(arguments: argparse.Namespace) -> int:
    from registry import GroupConfig, push_group

    config = GroupConfig(
        env=tuple(f"{name}={value}" for name, value in arguments.env), workdir=arguments.workdir, user=arguments.user
    )
    with tempfile.TemporaryDirectory(prefix="weenv-push-") as scratch:
        layers = arguments.layer
        if arguments.rootfs is not None:
            layers = [_convert(arguments.rootfs, Path(scratch) / "rootfs.weenv", arguments.jobs)]
        print(
            push_group(
                arguments.reference, layers, role=arguments.role, config=config, credentials=settings.credentials()
            )
        )
    return exits.OK


def _convert(rootfs: Path, layer: Path, jobs: int) -> Path:
    from layerformat import convert

    if not rootfs.is_dir():
        raise exits.CommandError(
            f"--rootfs {rootfs}: expected a directory; a tar goes through `weenv layer convert` and --layer",
            exits.USAGE,
        )
    with progress_bar() as progress:
        report = convert(rootfs, layer, jobs=jobs, progress=progress)
    for warning in report.warnings:
        output.say(f"weenv: {warning}")
    output.say(
        f"{report.layer.entries} entries, {output.size(report.layer.content_size)} of files: "
        f"{output.size(report.bytes_out)}"
    )
    return layer


def _resolve(arguments: argparse.Namespace) -> Group:
    from registry import resolve_group

    return resolve_group(arguments.reference, credentials=settings.credentials())


def _describe(group: Group) -> dict[str, Any]:
    return {
        "reference": group.reference,
        "digest": group.digest,
        "role": group.role,
        "source": group.source,
        "size_bytes": sum(layer.size_bytes for layer in group.layers),
        "config": {"env": list(group.config.env), "workdir": group.config.workdir, "user": group.config.user},
        "layers": [attrs.asdict(layer) for layer in group.layers],
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
    lines += [f"env {variable}" for variable in group.config.env]
    lines += [
        f"layer {layer.digest}  {output.size(layer.size_bytes)}"
        + (f", metadata {output.size(layer.toc_size_bytes)}" if layer.toc_size_bytes is not None else "")
        for layer in group.layers
    ]
    for number, line in enumerate(lines):
        print(f"{'└─' if number == len(lines) - 1 else '├─'} {line}")
    return exits.OK

"""`weenv image …`: split, an ordinary image to layer groups."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from tools import exits, output, publishing, settings

if TYPE_CHECKING:
    from registry import GroupConfig
    from registry.images import Image
    from registry.publish import GroupSource
    from registry.splitting import GroupSpec


def register(commands: Any) -> None:
    parser = commands.add_parser("image", help="ordinary images of docker and OCI")
    sub = parser.add_subparsers(dest="image_command", required=True, metavar="COMMAND")

    split = sub.add_parser(
        "split",
        help="publish an image's layers as layer groups; prints REF@sha256:… of each",
        description="Environment variables, working directory, user, entrypoint and command go to the group in whose "
        "layers' history they were set. Everything is published, or nothing.",
    )
    split.add_argument(
        "source", metavar="SRC", help="oci:DIR[:TAG], an archive of docker save or OCI, or HOST[:PORT]/REPO[:TAG][@DIGEST]"
    )
    split.add_argument(
        "--group", dest="groups", action="append", required=True, metavar="NAME=LAYERS",
        help="layers from 0, the base: 0-3, 4,5, 6- or all; repeatable, base first; a role when NAME is one",
    )  # fmt: skip
    split.add_argument(
        "--to", required=True, metavar="PREFIX",
        help="HOST[:PORT]/PATH: groups are PATH/NAME:TAG; oci:DIR: they are oci:DIR:NAME, with --tag oci:DIR:NAME-TAG",
    )  # fmt: skip
    split.add_argument("--tag", metavar="TAG", help="(default in a registry: latest)")
    split.add_argument("--platform", metavar="OS/ARCH[/VARIANT]", help="which image of an index (default: this machine's)")
    publishing.add_recipe(split)
    publishing.add_jobs(split)
    output.add_format(split)
    split.set_defaults(run=run_split)


def run_split(arguments: argparse.Namespace) -> int:
    from registry.conversions import Conversions
    from registry.images import open_image, parse_platform
    from registry.splitting import SplitError, parse_spec

    publishing.check_jobs(arguments.jobs)
    try:
        specs = [parse_spec(text) for text in arguments.groups]
    except SplitError as error:
        raise exits.CommandError(f"--group {error}", exits.USAGE) from error
    references = [publishing.target(arguments.to, spec.name, arguments.tag) for spec in specs]
    platform = parse_platform(arguments.platform) if arguments.platform else None
    with (
        exits.terminable(),
        Conversions(settings.conversions_path()).workspace() as scratch,
        open_image(arguments.source, platform, scratch, settings.credentials()) as image,
    ):
        groups, messages = split_image(image, specs, references)
        for message in messages:
            output.say(f"weenv: {image.name}: {message}")
        pinned, outcomes = publishing.publish(groups, arguments.jobs, recipe=arguments.recipe)
    if arguments.format == "json":
        output.print_json(
            {
                "image": {"name": image.name, "digest": image.digest, "platform": str(image.platform)},
                "groups": [
                    {
                        "name": spec.name,
                        "reference": reference,
                        "role": group.role,
                        "config": attrs.asdict(group.config),
                        "layers": [publishing.described(one) for one in outcomes if one.reference == group.reference],
                    }
                    for spec, group, reference in zip(specs, groups, pinned, strict=True)
                ],
                "messages": messages,
            }
        )
    else:
        for reference in pinned:
            print(reference)
    return exits.OK


def split_image(
    image: Image, specs: Sequence[GroupSpec], references: Sequence[str]
) -> tuple[list[GroupSource], tuple[str, ...]]:
    """The groups of an image, and what is worth telling. CommandError for specifications that do not fit the image."""
    from registry.attribution import attribute
    from registry.manifest import ROLES
    from registry.publish import GroupSource, ImageTar
    from registry.splitting import SplitError, split_layers

    try:
        ranges = split_layers(specs, len(image.layers))
    except SplitError as error:
        raise exits.CommandError(f"{image.name}: {error}", exits.USAGE) from error
    attribution = attribute(image.config, image.history, ranges)
    unkept = [f"groups do not keep this of its configuration: {', '.join(image.unkept)}"] if image.unkept else []
    doubts = [f"environments do not understand this of its configuration: {doubt}" for doubt in _doubts(image.config)]
    groups = [
        GroupSource(
            reference,
            tuple(ImageTar(image, image.layers[number]) for number in layers),
            role=spec.name if spec.name in ROLES else None,
            config=config,
            runs_on=image.platform,
        )
        for spec, reference, layers, config in zip(specs, references, ranges, attribution.configs, strict=True)
    ]
    return groups, (*attribution.messages, *unkept, *doubts)


def _doubts(config: GroupConfig) -> Iterator[str]:
    """What `group push` refuses; an image's layers are good without it."""
    from envlet.errors import EnvletError
    from envlet.users import split_user

    if config.workdir is not None and not config.workdir.startswith("/"):
        yield f"the working directory {config.workdir!r}, which is no absolute path"
    try:
        split_user(config.user or "")
    except EnvletError as error:
        yield f"the user: {error.message}"

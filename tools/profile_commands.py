"""`weenv profile …`: what this node knows of what is read of layers; publishing it beside a group. From the cache directory, beside the
daemon and without one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tools import exits, output, settings

if TYPE_CHECKING:
    from weefs.profiles import Profile

SHOWN_DIGEST = 19
PREFIX = "sha256:"


def register(commands: Any) -> None:
    parser = commands.add_parser("profile", help="what is read of layers, and is fetched ahead therefore (docs/fill.md)")
    sub = parser.add_subparsers(dest="profile_command", required=True, metavar="COMMAND")

    show = sub.add_parser("show", help="what this node knows")
    show.add_argument("what", metavar="REF|LAYER", help="a group's reference, or the beginning of a layer's digest")
    output.add_format(show)
    show.set_defaults(run=run_show)

    export = sub.add_parser("export", help="the same as a document that can be published")
    export.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    export.set_defaults(run=run_export)

    publish = sub.add_parser("publish", help="publish it beside the group, for nodes that have never seen it; prints the artifact's digest")
    publish.set_defaults(run=run_publish)
    for command in (export, publish):
        command.add_argument("reference", metavar="REF")
    for command in (show, export, publish):
        command.add_argument("--cache", type=Path, metavar="DIR", help="the node's (default: $WEENV_CACHE, /var/lib/weenv/cache)")


def _profiles(arguments: argparse.Namespace, what: str) -> list[Profile]:
    """Of a group's layers, base first, or of one layer. CommandError: there is none."""
    from registry import resolve_group
    from weefs.profiles import ProfileStore

    cache = settings.cache_path(arguments.cache)
    store = ProfileStore(cache)
    bare = what.removeprefix(PREFIX)
    if bare and not bare.strip("0123456789abcdef"):
        found = [one for one in store.all() if one.layer.startswith(PREFIX + bare)]
        if len(found) > 1:
            raise exits.CommandError(f"{what}: expected the beginning of one layer's digest, received that of {len(found)}", exits.USAGE)
    else:
        digests = dict.fromkeys(layer.digest for layer in resolve_group(what, credentials=settings.credentials()).layers)
        found = [profile for digest in digests if (profile := store.load(digest)) is not None]
    if not found:
        raise exits.CommandError(
            f"{what}: {cache} has no profile of it; run an environment with it and delete it, or wait a minute", exits.NOT_FOUND
        )
    return found


def run_show(arguments: argparse.Namespace) -> int:
    found = _profiles(arguments, arguments.what)
    if arguments.format == "json":
        output.print_json(msgspec.to_builtins(found))
        return exits.OK
    rows = [
        (
            one.layer[:SHOWN_DIGEST],
            f"{len(one.chunks)} of {one.layer_chunks}",
            output.size(one.raw_bytes),
            one.runs,
            "" if one.hit_rate is None else f"{one.hit_rate:.0%}",
            one.origin,
        )
        for one in found
    ]
    output.print_table(("LAYER", "CHUNKS", "SIZE", "RUNS", "HITS", "ORIGIN"), rows)
    return exits.OK


def run_export(arguments: argparse.Namespace) -> int:
    from weefs.profiles import document_of

    arguments.output.write_bytes(document_of(_profiles(arguments, arguments.reference)))
    return exits.OK


def run_publish(arguments: argparse.Namespace) -> int:
    from registry import parse_reference
    from registry.referrers import attach, read_subject
    from weefs.profiles import ARTIFACT_TYPE, DOCUMENT_TYPE, document_of

    data = document_of(_profiles(arguments, arguments.reference))
    reference, credentials = parse_reference(arguments.reference), settings.credentials()
    print(attach(reference, read_subject(reference, credentials), ARTIFACT_TYPE, DOCUMENT_TYPE, data, credentials))
    return exits.OK

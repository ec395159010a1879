"""`weenv group totar`: a layer of a group as a tar, or as the very tar that it was made from."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools import exits, settings

if TYPE_CHECKING:
    from registry import Group


def register(sub: Any) -> None:
    totar = sub.add_parser("totar", help="a layer of a group as a tar on stdout")
    totar.add_argument("reference", metavar="REF")
    totar.add_argument("--layer", type=int, metavar="N", help="from 0, the base; not needed when there is only one")
    totar.add_argument(
        "--recipe", action="store_true", help="the tar that was pushed with --recipe, byte for byte: its recipe is fetched, and checked"
    )
    totar.set_defaults(run=run_totar)


def run_totar(arguments: argparse.Namespace) -> int:
    from layerformat import Recipe, export_tar
    from registry import pull_blob, resolve_group
    from registry.tocs import open_groups

    if sys.stdout.isatty():
        raise exits.CommandError("a tar does not go to a terminal; send stdout to a file or a pipe", exits.USAGE)
    credentials = settings.credentials()
    group = resolve_group(arguments.reference, credentials=credentials)
    number = _number(group, arguments.layer)
    recipe = None
    if arguments.recipe:
        recipes = {one.layer.digest: one.origin.recipe for one in group.conversions}
        recipe = recipes.get(group.layers[number].digest)
        if recipe is None:
            raise exits.CommandError(
                f"{group.reference}: layer {number} was published without a recipe; push its tar again with --recipe, "
                "or leave --recipe out for a tar whose extraction is the same",
                exits.NOT_FOUND,
            )
    with open_groups([group], credentials) as (_ranges, [layers]):
        if recipe is None:
            export_tar(layers[number], sys.stdout.buffer)
            return exits.OK
        with tempfile.TemporaryDirectory(prefix="weenv-recipe-") as scratch:
            path = Path(scratch) / "recipe"
            pull_blob(group.source, recipe.digest, recipe.size_bytes, path, credentials=credentials)
            with Recipe.open(path) as opened:
                opened.write_tar(layers[number], sys.stdout.buffer)
    return exits.OK


def _number(group: Group, wanted: int | None) -> int:
    count = len(group.layers)
    if wanted is None and count > 1:
        raise exits.CommandError(f"{group.reference}: expected --layer 0 to {count - 1}, as it has {count} layers", exits.USAGE)
    number = wanted or 0
    if not 0 <= number < count:
        raise exits.CommandError(f"{group.reference}: expected --layer 0 to {count - 1}, received {number}", exits.NOT_FOUND)
    return number

"""`weenv cache …`: df, ls. Reads the cache directory itself, so it works beside the daemon and without one."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from tools import exits, output, settings


def register(commands: Any) -> None:
    parser = commands.add_parser("cache", help="this node's cache")
    sub = parser.add_subparsers(dest="cache_command", required=True, metavar="COMMAND")
    for name, run, text in (("df", run_df, "how much room it takes"), ("ls", run_ls, "its layers")):
        command = sub.add_parser(name, help=text)
        command.add_argument("--cache", type=Path, metavar="DIR", help="(default: $WEENV_CACHE, /var/lib/weenv/cache)")
        output.add_format(command)
        command.set_defaults(run=run)


def _cache(arguments: argparse.Namespace) -> Path:
    """The cache that is meant. CommandError: there is none, or the socket says that another node's is."""
    path = settings.cache_path(arguments.cache)
    if arguments.cache is None and (socket := settings.other_node()) is not None:
        raise exits.CommandError(
            f"$WEENV_SOCKET is {socket}: its daemon's cache is not known here; say which with --cache DIR", exits.USAGE
        )
    if not (path / "layers").is_dir():
        raise exits.CommandError(
            f"{path}: expected a node's cache (a directory with layers/ in it), "
            f"received {'a directory without it' if path.is_dir() else 'no directory'}; say which with --cache DIR",
            exits.NOT_FOUND,
        )
    return path


def run_df(arguments: argparse.Namespace) -> int:
    from weefs.cachedir import list_layers

    path = _cache(arguments)
    layers = list(list_layers(path))
    result = {
        "path": str(path),
        "layers": len(layers),
        "disk_bytes": sum(layer.disk_bytes for layer in layers),
        "content_bytes": sum(layer.record.content_bytes for layer in layers),
        "present_chunks": sum(layer.present_chunks for layer in layers),
        "chunks": sum(layer.record.chunks for layer in layers),
    }
    if arguments.format == "json":
        output.print_json(result)
        return exits.OK
    row = (result["path"], result["layers"], output.size(sum(layer.disk_bytes for layer in layers)),
           output.size(sum(layer.record.content_bytes for layer in layers)),
           f"{result['present_chunks']}/{result['chunks']}")  # fmt: skip
    output.print_table(("CACHE", "LAYERS", "ON DISK", "CONTENTS", "CHUNKS"), [row])
    return exits.OK


def run_ls(arguments: argparse.Namespace) -> int:
    from weefs.cachedir import list_layers

    layers = list(list_layers(_cache(arguments)))
    if arguments.format == "json":
        output.print_json(
            [
                {
                    "digest": layer.record.digest,
                    "source": layer.record.source,
                    "size_bytes": layer.record.size_bytes,
                    "content_bytes": layer.record.content_bytes,
                    "disk_bytes": layer.disk_bytes,
                    "chunks": layer.record.chunks,
                    "present_chunks": layer.present_chunks,
                    "used_unix_s": layer.used_s,
                }
                for layer in layers
            ]
        )
        return exits.OK
    rows = [
        (
            layer.record.digest[:19],
            output.size(layer.record.content_bytes),
            output.size(layer.disk_bytes),
            output.share(layer.present_chunks, layer.record.chunks),
            output.duration(time.time() - layer.used_s),
            layer.record.source,
        )
        for layer in layers
    ]
    output.print_table(("LAYER", "CONTENTS", "ON DISK", "PRESENT", "USED AGO", "SOURCE"), rows)
    return exits.OK

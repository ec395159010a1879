"""`weenv cache …`: looks at a node's cache, and tidies it.

`df`, `ls`, `pin` and `unpin` use the directory itself, beside the daemon and without one. `verify` and `gc` have the daemon do it that
serves from the directory, if there is one. `prefetch` (prefetch_command.py) needs a daemon.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from tools import exits, output, prefetch_command, settings
from tools.node_commands import add_socket

if TYPE_CHECKING:
    from envlet.client import Client
    from envlet.types import CheckedLayer, CollectedLayer
    from weefs.cachedir import CacheDirectory, CachedLayer

R = TypeVar("R")
SHOWN_DIGEST = 19
PREFIX = "sha256:"


def register(commands: Any) -> None:
    parser = commands.add_parser("cache", help="this node's cache")
    sub = parser.add_subparsers(dest="cache_command", required=True, metavar="COMMAND")
    made = {
        name: sub.add_parser(name, help=text)
        for name, text in (
            ("df", "how much room it takes"),
            ("ls", "its layers"),
            ("verify", "compare what is in it with its digests, and drop what is damaged"),
            ("gc", "remove layers that nothing uses, those first that were unused for longest"),
            ("pin", "layers that shall neither be evicted nor removed"),
            ("unpin", "the opposite"),
        )
    }
    for name, command in made.items():
        command.add_argument("--cache", type=Path, metavar="DIR", help="(default: $WEENV_CACHE, /var/lib/weenv/cache)")
        output.add_format(command)
        command.set_defaults(run={"df": run_df, "ls": run_ls, "verify": run_verify, "gc": run_gc, "pin": run_pin, "unpin": run_pin}[name])
    for name in ("verify", "gc"):
        add_socket(made[name])
    made["verify"].add_argument("layer", nargs="?", metavar="LAYER", help="a digest or its beginning (default: all)")
    made["gc"].add_argument("--to", type=output.parse_size, default=0, metavar="SIZE", help="what the cache may take then (default: 0)")
    made["gc"].add_argument("--dry-run", action="store_true", help="say what would be removed, and remove nothing")
    for name in ("pin", "unpin"):
        made[name].add_argument("layers", nargs="+", metavar="LAYER|REF", help="a digest or its beginning, or a group's reference")
    prefetch_command.register(sub)
    made["unpin"].set_defaults(unpin=True)
    made["pin"].set_defaults(unpin=False)


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


def _served(path: Path) -> set[str]:
    """The digests of the layers that a running daemon has open, if it serves from this cache."""
    from envlet.client import Client
    from envlet.errors import ConnectionLost

    try:
        with Client(settings.socket_path(None), connect_timeout_s=1.0) as client:
            plane = client.info().statistics["data_plane"]
    except (OSError, ConnectionLost):
        return set()
    return set(plane["layers"]) if plane["serving"] and Path(plane["cache"]["path"]).samefile(path) else set()


def run_df(arguments: argparse.Namespace) -> int:
    from weefs.cachedir import list_layers
    from weefs.room import disk_bytes

    path = _cache(arguments)
    layers = list(list_layers(path))
    served = _served(path)
    images = [disk_bytes(image) for image in (path / "erofs").glob("*.erofs")]
    unused = [layer for layer in layers if layer.record.digest not in served and not layer.pinned]
    result = {
        "path": str(path),
        "layers": len(layers),
        "layers_served": len(served),
        "layers_pinned": sum(layer.pinned for layer in layers),
        "disk_bytes": sum(layer.disk_bytes for layer in layers),
        "reclaimable_bytes": sum(layer.disk_bytes for layer in unused),
        "content_bytes": sum(layer.record.content_bytes for layer in layers),
        "present_chunks": sum(layer.present_chunks for layer in layers),
        "chunks": sum(layer.record.chunks for layer in layers),
        "images": len(images),
        "images_disk_bytes": sum(images),
    }
    if arguments.format == "json":
        output.print_json(result)
        return exits.OK
    disk, free = sum(layer.disk_bytes for layer in layers), sum(layer.disk_bytes for layer in unused)
    rows = [
        ("Layers", len(layers), len(served), output.size(disk), f"{output.size(free)} ({output.share(free, disk)})"),
        ("Images of metadata", len(images), "", output.size(sum(images)), ""),
    ]
    output.print_table(("TYPE", "TOTAL", "ACTIVE", "SIZE", "RECLAIMABLE"), rows)
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
                    "pinned": layer.pinned,
                }
                for layer in layers
            ]
        )
        return exits.OK
    rows = [
        (
            layer.record.digest[:SHOWN_DIGEST],
            output.size(layer.record.content_bytes),
            output.size(layer.disk_bytes),
            output.share(layer.present_chunks, layer.record.chunks),
            output.duration(time.time() - layer.used_s),
            "yes" if layer.pinned else "",
            layer.record.source,
        )
        for layer in layers
    ]
    output.print_table(("LAYER", "CONTENTS", "ON DISK", "PRESENT", "USED AGO", "PINNED", "SOURCE"), rows)
    return exits.OK


def _by_whoever_serves(
    arguments: argparse.Namespace, path: Path, ask: Callable[[Client], R], do: Callable[[CacheDirectory], R]
) -> R:
    """Has the daemon do it that serves from this cache; without one, does it here. CommandError: it is another's."""
    from envlet.client import Client
    from weefs.cachedir import CacheDirectory
    from weefs.errors import CacheError

    try:
        cache = CacheDirectory.open(path)
    except CacheError:
        with Client(settings.socket_path(arguments.socket)) as client:
            plane = client.info().statistics["data_plane"]
            if not plane["serving"] or not Path(plane["cache"]["path"]).samefile(path):
                of = plane["cache"]["path"] if plane["serving"] else "nothing now"
                raise exits.CommandError(
                    f"{path}: a process serves from it, and the daemon that answers serves from {of}; say which with --socket PATH"
                ) from None
            return ask(client)
    try:
        return do(cache)
    finally:
        cache.close()


def _find(layers: Sequence[CachedLayer], text: str) -> CachedLayer:
    """The one whose digest begins so. CommandError."""
    wanted = text if text.startswith(PREFIX) else PREFIX + text
    found = [layer for layer in layers if layer.record.digest.startswith(wanted)]
    if len(found) != 1:
        raise exits.CommandError(
            f"{text}: expected the beginning of one layer's digest, received that of {len(found) or 'none'} in the cache",
            exits.USAGE if found else exits.NOT_FOUND,
        )
    return found[0]


def run_verify(arguments: argparse.Namespace) -> int:
    """Status 5 (integrity) if something was damaged."""
    from envlet.types import CheckedLayer
    from weefs.cachedir import list_layers, verify_directory

    path = _cache(arguments)
    layers = list(list_layers(path))
    chosen = [_find(layers, arguments.layer)] if arguments.layer else layers

    def ask(client: Client) -> list[CheckedLayer]:
        return [*client.verify(chosen[0].record.digest if arguments.layer else None).layers]

    def do(_cache: CacheDirectory) -> list[CheckedLayer]:
        checked = [(layer.record.digest, *verify_directory(layer.path)) for layer in chosen]
        return [CheckedLayer(digest=digest, good=good, damaged=damaged) for digest, good, damaged in checked]

    checked = _by_whoever_serves(arguments, path, ask, do)
    if arguments.format == "json":
        output.print_json(msgspec.to_builtins(checked))
    else:
        output.print_table(("LAYER", "GOOD", "DAMAGED"), [(one.digest[:SHOWN_DIGEST], one.good, one.damaged) for one in checked])
    return exits.INTEGRITY if any(one.damaged for one in checked) else exits.OK


def run_gc(arguments: argparse.Namespace) -> int:
    from envlet.types import CollectedLayer
    from weefs.room import collect

    def ask(client: Client) -> list[CollectedLayer]:
        return [*client.collect(arguments.to, arguments.dry_run).layers]

    def do(cache: CacheDirectory) -> list[CollectedLayer]:
        removed = asyncio.run(collect(cache, arguments.to, dry_run=arguments.dry_run))
        return msgspec.convert(msgspec.to_builtins(removed), list[CollectedLayer])

    removed = _by_whoever_serves(arguments, _cache(arguments), ask, do)
    if arguments.format == "json":
        output.print_json(msgspec.to_builtins(removed))
        return exits.OK
    rows = [
        (one.digest[:SHOWN_DIGEST], output.size(one.disk_bytes), output.duration(time.time() - one.used_unix_s), one.source)
        for one in removed
    ]
    if rows:
        output.print_table(("LAYER", "ON DISK", "USED AGO", "SOURCE"), rows)
    freed = output.size(sum(one.disk_bytes for one in removed))
    print(f"{freed} would be free" if arguments.dry_run else f"{freed} are free")
    return exits.OK


def run_pin(arguments: argparse.Namespace) -> int:
    from weefs.cachedir import list_layers

    layers = list(list_layers(_cache(arguments)))
    chosen = {layer.record.digest: layer for text in arguments.layers for layer in _layers_of(layers, text)}
    for layer in chosen.values():
        if arguments.unpin:
            (layer.path / "pinned").unlink(missing_ok=True)
        else:
            (layer.path / "pinned").touch()
    if arguments.format == "json":
        output.print_json([*chosen])
    else:
        for digest in chosen:
            print(digest)
    return exits.OK


def _layers_of(layers: Sequence[CachedLayer], text: str) -> list[CachedLayer]:
    """Of a digest's beginning, or of a group. CommandError: not all are in the cache."""
    bare = text.removeprefix(PREFIX)
    if bare and not bare.strip("0123456789abcdef"):
        return [_find(layers, text)]
    from registry import resolve_group

    known = {layer.record.digest: layer for layer in layers}
    wanted = [layer.digest for layer in resolve_group(text, credentials=settings.credentials()).layers]
    missing = [digest for digest in wanted if digest not in known]
    if missing:
        raise exits.CommandError(f"{text}: its layer {missing[0]} is not in the cache; start an environment with it first", exits.NOT_FOUND)
    return [known[digest] for digest in wanted]

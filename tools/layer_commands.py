"""`weenv layer …`: convert, inspect, ls, cat, verify, fsck, totar."""

from __future__ import annotations

import argparse
import os
import stat
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import attrs

from tools import exits, fsck_command, output, publishing

if TYPE_CHECKING:
    from layerformat import Inode, Layer


def register(commands: Any) -> None:
    parser = commands.add_parser("layer", help="make layers and look into them")
    sub = parser.add_subparsers(dest="layer_command", required=True, metavar="COMMAND")

    convert = sub.add_parser("convert", help="a tar (plain, gzip, zstd, xz) or a directory to a layer")
    convert.add_argument("src", metavar="SRC", help="- is a tar on stdin")
    convert.add_argument("dst", metavar="DST")
    publishing.add_jobs(convert)
    convert.add_argument("--level", type=int, metavar="L", help="of zstd, 1 to 19 (default 7)")
    convert.add_argument(
        "--max-entries", type=int, metavar="N", help="refuse a source with more (default 4,000,000)"
    )
    convert.add_argument("--recipe", metavar="FILE", help="also write what `totar --recipe` needs to give the tar back byte for byte")
    convert.add_argument(
        "--chunk-size",
        type=output.parse_size,
        default=None,
        metavar="SIZE",
        help="a multiple of 4K, 64K to 256K make sense",
    )
    output.add_format(convert)
    convert.set_defaults(run=run_convert)

    inspect = sub.add_parser("inspect", help="what a layer holds, in numbers")
    inspect.add_argument("file", metavar="FILE")
    output.add_format(inspect)
    inspect.set_defaults(run=run_inspect)

    ls = sub.add_parser("ls", help="list a layer's entries, below PATH")
    ls.add_argument("file", metavar="FILE")
    ls.add_argument("path", metavar="PATH", nargs="?", default="/")
    output.add_format(ls)
    ls.set_defaults(run=run_ls)

    cat = sub.add_parser("cat", help="a file's contents on stdout")
    cat.add_argument("file", metavar="FILE")
    cat.add_argument("path", metavar="PATH")
    cat.set_defaults(run=run_cat)

    verify = sub.add_parser("verify", help="check every byte; exit 5 and say what is wrong, where")
    verify.add_argument("file", metavar="FILE")
    verify.set_defaults(run=run_verify)

    fsck_command.register(sub)

    totar = sub.add_parser("totar", help="a tar on stdout whose extraction equals the original's")
    totar.add_argument("file", metavar="FILE")
    totar.add_argument("--recipe", metavar="RECIPE", help="of `convert --recipe`: the original tar, byte for byte")
    totar.set_defaults(run=run_totar)


def run_convert(arguments: argparse.Namespace) -> int:
    from layerformat import DEFAULT_CHUNK_SIZE, DEFAULT_LEVEL, DEFAULT_MAX_ENTRIES, convert

    publishing.check_jobs(arguments.jobs)
    chunk_size = DEFAULT_CHUNK_SIZE if arguments.chunk_size is None else arguments.chunk_size
    if chunk_size % 4096 or not 4096 <= chunk_size <= 16 << 20:
        raise exits.CommandError(f"--chunk-size: expected a multiple of 4,096 up to 16 MiB, received {chunk_size}", exits.USAGE)
    level = DEFAULT_LEVEL if arguments.level is None else arguments.level
    if not 1 <= level <= 19:
        raise exits.CommandError(f"--level: expected 1 to 19, received {level}", exits.USAGE)
    max_entries = DEFAULT_MAX_ENTRIES if arguments.max_entries is None else arguments.max_entries
    if arguments.dst == "-":
        raise exits.CommandError("DST: expected the name of a file; a layer does not go to stdout", exits.USAGE)
    begin = time.perf_counter()
    source = _standard_input() if arguments.src == "-" else arguments.src
    with exits.terminable(), publishing.progress_bar() as progress:
        report = convert(
            source,
            arguments.dst,
            jobs=arguments.jobs,
            level=level,
            chunk_size=chunk_size,
            max_entries=max_entries,
            recipe=arguments.recipe,
            progress=progress,
        )
    wall_s = time.perf_counter() - begin
    for warning in report.warnings:
        output.say(f"weenv: {warning}")
    if arguments.format == "json":
        layer = attrs.asdict(report.layer)
        output.print_json(
            {
                "source": report.source_kind,
                "bytes_in": report.bytes_in,
                "bytes_out": report.bytes_out,
                "wall_s": wall_s,
                "diff_id": report.diff_id,
                "recipe_bytes": None if report.recipe is None else report.recipe.size,
                **layer,
            }
        )
        return exits.OK
    content = report.layer.content_size
    print(f"{report.layer.blob_digest}  {arguments.dst}")
    output.say(
        f"{report.layer.entries} entries, {output.size(content)} of files in {report.layer.chunks} chunks: "
        f"{output.size(report.bytes_out)} ({output.share(report.bytes_out, content)}), "
        f"metadata {output.size(report.layer.toc_size)}, {output.duration(wall_s)}"
    )
    if report.recipe is not None:
        output.say(f"recipe {arguments.recipe}: {output.size(report.recipe.size)}, the tar is {report.recipe.diff_id}")
    return exits.OK


def _standard_input() -> BinaryIO:
    if sys.stdin is None or sys.stdin.isatty():
        raise exits.CommandError("-: expected a tar on stdin, received a terminal or nothing; give a file or a pipe", exits.USAGE)
    file = open(sys.stdin.fileno(), "rb", closefd=False)  # noqa: SIM115 - the conversion closes it
    if not file.peek(1):
        raise exits.CommandError("-: expected a tar on stdin, received nothing; what should have written it failed")
    return file


def run_inspect(arguments: argparse.Namespace) -> int:
    from layerformat import Layer

    with Layer.open(arguments.file) as layer:
        toc, footer = layer.toc, layer.footer
        kinds = {
            "directories": 0,
            "files": 0,
            "symlinks": 0,
            "devices": 0,
            "fifos and sockets": 0,
            "links into lower layers": 0,
        }
        for inode in toc.inodes:
            kinds[_kind(inode)] += 1
        names = len(toc.dirents)
        result = {
            "file": str(arguments.file),
            "size_bytes": Path(arguments.file).stat().st_size,
            "version": 1,
            "chunk_size": toc.header.chunk_size,
            "chunks": len(toc.chunks),
            "content_bytes": toc.header.content_size,
            "stream_bytes": toc.header.stream_size,
            "toc_offset": footer.toc_offset,
            "toc_bytes": footer.toc_stored_size,
            "toc_raw_bytes": footer.toc_raw_size,
            "toc_digest": f"sha256:{footer.toc_sha256.hex()}",
            "names": names,
            "whiteouts": sum(dirent.inode is None for dirent in toc.dirents),
            "inodes": kinds,
        }
    if arguments.format == "json":
        output.print_json(result)
        return exits.OK
    for name, value in result.items():
        if name == "inodes":
            value = ", ".join(f"{number} {kind}" for kind, number in kinds.items() if number)
        elif name.endswith("_bytes") or name == "chunk_size":
            value = f"{value} ({output.size(int(str(value)))})"
        print(f"{name.replace('_', ' '):15} {value}")
    return exits.OK


_TYPES = {
    stat.S_IFDIR: "directory", stat.S_IFREG: "file", stat.S_IFLNK: "symlink", stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device", stat.S_IFIFO: "fifo", stat.S_IFSOCK: "socket",
}  # fmt: skip


def _kind(inode: Inode) -> str:
    if inode.is_lower_link:
        return "links into lower layers"
    kinds = {"directory": "directories", "file": "files", "symlink": "symlinks"}
    kinds |= {"character device": "devices", "block device": "devices"}
    return kinds.get(_type(inode), "fifos and sockets")


def _type(inode: Inode) -> str:
    if inode.is_lower_link:
        return "lower link"
    return _TYPES[stat.S_IFMT(inode.mode)]


def find(layer: Layer, path: str) -> int:
    number = layer.lookup(os.fsencode(path).strip(b"/"))
    if number is None:
        raise exits.CommandError(f"{path}: the layer does not hold it", exits.NOT_FOUND)
    return number


def run_ls(arguments: argparse.Namespace) -> int:
    from layerformat import Layer

    with Layer.open(arguments.file) as layer:
        top = os.fsencode(arguments.path).strip(b"/")
        find(layer, arguments.path)
        rows = []
        for path, number in layer.walk():
            if top and path != top and not path.startswith(top + b"/"):
                continue
            rows.append(_row(layer, path, number))
    if arguments.format == "json":
        output.print_json(rows)
        return exits.OK
    for row in rows:
        target = f" -> {row['target']}" if row["target"] is not None else ""
        owner = f"{row['uid']}:{row['gid']}"
        mtime = row["mtime"].partition(".")[0].lstrip("@") if row["mtime"] else "-" * 19
        print(f"{row['mode']}  {owner:>9}  {row['size_bytes']:>10}  {mtime}  {row['path']}{target}")
    return exits.OK


def _row(layer: Layer, path: bytes, number: int | None) -> dict[str, Any]:
    from layerformat import printable

    if number is None:
        return {"path": printable(path, whole=True), "type": "whiteout", "mode": "w---------", "uid": 0, "gid": 0, "size_bytes": 0,
                "mtime": None, "target": None, "inode": None, "xattrs": []}  # fmt: skip
    inode = layer.inode(number)
    target = layer.toc.target(number) if inode.is_symlink or inode.is_lower_link else None
    return {
        "path": printable(path, whole=True) or "/",
        "type": _type(inode),
        "mode": "h---------" if inode.is_lower_link else stat.filemode(inode.mode),
        "uid": inode.uid,
        "gid": inode.gid,
        "size_bytes": inode.size if inode.is_regular else 0,
        "mtime": _exact_time(inode),
        "target": printable(target, whole=True) if target is not None else None,
        "inode": number,
        "xattrs": sorted(printable(name, whole=True) for name in layer.toc.xattrs(number)),
    }


def _time(seconds: int) -> str:
    try:
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return str(seconds)


def _exact_time(inode: Inode) -> str:
    """RFC 3339 to the nanosecond; a year that no calendar here has as @SECONDS."""
    text = _time(inode.mtime_s)
    return f"{text}.{inode.mtime_ns:09}Z" if "T" in text else f"@{text}.{inode.mtime_ns:09}"


def run_cat(arguments: argparse.Namespace) -> int:
    from layerformat import Layer

    with Layer.open(arguments.file) as layer:
        number = find(layer, arguments.path)
        inode = layer.inode(number)
        if not inode.is_regular:
            kind = "a link to a file of a lower layer" if inode.is_lower_link else f"a {_type(inode)}"
            raise exits.CommandError(f"{arguments.path}: expected a regular file, it is {kind}")
        for piece in layer.read_file(number):
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
    return exits.OK


def run_verify(arguments: argparse.Namespace) -> int:
    from layerformat import Layer

    with Layer.open(arguments.file) as layer:
        problems = layer.verify()
        for problem in problems:
            print(problem)
        if problems:
            output.say(
                f"weenv: {arguments.file}: {len(problems)} of {len(layer.toc.chunks)} chunks are damaged; "
                "fetch the layer again, or convert it again from its source"
            )
            return exits.INTEGRITY
        print(f"{arguments.file}: {len(layer.toc.chunks)} chunks, {output.size(layer.toc.header.content_size)} of files, all whole")
    return exits.OK


def run_totar(arguments: argparse.Namespace) -> int:
    from layerformat import Layer, Recipe, export_tar

    if sys.stdout.isatty():
        raise exits.CommandError("a tar does not go to a terminal; send stdout to a file or a pipe", exits.USAGE)
    with Layer.open(arguments.file) as layer:
        if arguments.recipe is None:
            export_tar(layer, sys.stdout.buffer)
        else:
            with Recipe.open(arguments.recipe) as recipe:
                recipe.write_tar(layer, sys.stdout.buffer)
    return exits.OK

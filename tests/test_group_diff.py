"""`weenv group diff` against a comparison that reads everything, and what it reads itself."""

from __future__ import annotations

import io
import json
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from merge_corners import directory, file, link, opaque, symlink, whiteout
from registry_fixture import Proxy, RegistryServer
from strategies import Layer as Members
from strategies import Member, encode_layer, layer_stacks, make_content
from weefs_harness import open_layers
from weenv_cli import INTEGRITY, NOT_FOUND, OK, Weenv

from layerformat import Layer, UnsupportedEntry
from registry import push_group, resolve_group
from tools.group_diff import compare
from weefs.merge import File, PlanRefused, View

# ---- the same answer as by reading everything ----

Facts = dict[str, object]
"""What a path is, by the words of the command."""


def facts(layers: Sequence[Layer]) -> dict[bytes, Facts]:
    """All there is to know of every path of a merged view, contents read."""
    view = View(layers)
    nodes = dict(view.walk())
    found: dict[bytes, Facts] = {}
    for path, node in nodes.items():
        inode, layer = node.inode, layers[node.layer]
        names = {other for other, one in nodes.items() if one is node} if isinstance(node, File) and node.names > 1 else set()
        found[path] = {
            "type": stat.S_IFMT(inode.mode),
            "contents": b"".join(layer.read_file(node.number)) if inode.is_regular else None,
            "target": layer.toc.target(node.number) if inode.is_symlink else None,
            "device": inode.rdev,
            "mode": stat.S_IMODE(inode.mode),
            "owner": (inode.uid, inode.gid),
            "mtime": inode.total_mtime_ns,
            "xattrs": layer.toc.xattrs(node.number),
            "links": names,
        }
    return found


def expected_changes(old: dict[bytes, Facts], new: dict[bytes, Facts]) -> list[tuple[str, bytes, set[str]]]:
    changes: list[tuple[str, bytes, set[str]]] = []
    for path in sorted(old.keys() | new.keys()):
        if path not in new or path not in old:
            changes.append(("D" if path in old else "A", path, set()))
        elif what := {name for name in old[path] if old[path][name] != new[path][name]}:
            changes.append(("M", path, (what & {"type", "links"}) if "type" in what else what))
    return changes


def check(old: Sequence[bytes], new: Sequence[bytes]) -> None:
    old_layers, new_layers = open_layers(list(old)), open_layers(list(new))
    found = [(change.kind, change.path, set(change.what)) for change in compare(old_layers, new_layers).changes]
    assert found == expected_changes(facts(old_layers), facts(new_layers))


def is_whole(stack: Sequence[Members]) -> bool:
    try:
        View(open_layers([encode_layer(layer) for layer in stack]))
    except (PlanRefused, UnsupportedEntry):
        return False
    return True


@st.composite
def versions(draw: st.DrawFn) -> tuple[list[Members], list[Members]]:
    """A stack, and one that has some of its entries and others."""
    old = draw(layer_stacks(max_layers=2).filter(is_whole))
    other = draw(layer_stacks(max_layers=2))
    mixed = [[member for member in layer if draw(st.integers(0, 3))] for layer in old] + other[: draw(st.integers(0, 2))]
    new = [[_touched(draw, member) for member in layer] for layer in mixed]
    return old, new if is_whole(new) else old


def _touched(draw: st.DrawFn, member: Member) -> Member:
    """The member, or with one byte of its data, its mode or its time changed."""
    way = draw(st.integers(0, 9))
    if way == 0 and member.data:
        at = draw(st.integers(0, len(member.data) - 1))
        return attrs.evolve(member, data=member.data[:at] + bytes([member.data[at] ^ 1]) + member.data[at + 1 :])
    if way == 1:
        return attrs.evolve(member, entry=attrs.evolve(member.entry, mtime_ns=member.entry.mtime_ns ^ 1))
    return member


@given(versions(), st.sampled_from([4096, 8192, 65536]))
def test_the_difference_is_what_reading_everything_finds(stacks: tuple[list[Members], list[Members]], chunk_size: int) -> None:
    old, new = stacks
    check([encode_layer(layer) for layer in old], [encode_layer(layer, chunk_size=chunk_size) for layer in new])


BIG = make_content(100_000, 1, False)
SPARSE = Member(attrs.evolve(file(b"f").entry, size=100_000, sparse=((8192, 4096),)), BIG[:4096])
CASES: dict[str, tuple[list[Members], list[Members]]] = {
    "nothing": ([[file(b"a")]], [[file(b"a")]]),
    "the last byte of a large file": ([[file(b"f", BIG)]], [[file(b"f", BIG[:-1] + b"!")]]),
    "the same data in two layers": ([[file(b"a"), file(b"f", BIG)]], [[file(b"f", BIG)], [file(b"a")]]),
    "a hole and zeros": ([[SPARSE]], [[file(b"f", bytes(8192) + BIG[:4096] + bytes(100_000 - 12288))]]),
    "a hole and one byte that is not zero": ([[SPARSE]], [[file(b"f", bytes(8192) + BIG[:4096] + bytes(99_999 - 12288) + b"\1")]]),
    "whiteouts and opaque directories": (
        [[directory(b"d"), file(b"d/a"), file(b"d/b"), file(b"x")]],
        [[directory(b"d"), file(b"d/a"), file(b"d/b"), file(b"x")], [opaque(b"d"), file(b"d/c"), whiteout(b"x")]],
    ),
    "a file becomes a directory": ([[file(b"p")]], [[directory(b"p"), file(b"p/q")]]),
    "two names of one file, and two files": ([[file(b"a"), link(b"b", b"a")]], [[file(b"a"), file(b"b")]]),
    "a symlink that leads elsewhere": ([[symlink(b"s", b"a")]], [[symlink(b"s", b"b")]]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chunk_size", [8192, 65536])
def test_named_cases(name: str, chunk_size: int) -> None:
    old, new = CASES[name]
    check([encode_layer(layer) for layer in old], [encode_layer(layer, chunk_size=chunk_size) for layer in new])


def test_links_into_a_group_below_are_compared_as_links() -> None:
    one, two, three = ([[link(b"name", target)]] for target in (b"below/a", b"below/a", b"below/b"))
    blobs = [[encode_layer(layer) for layer in stack] for stack in (one, two, three)]
    assert compare(open_layers(blobs[0]), open_layers(blobs[1])).changes == ()
    [change] = compare(open_layers(blobs[0]), open_layers(blobs[2])).changes
    assert (change.path, change.what) == (b"name", ("target",))


# ---- what is read, and the numbers ----


class CountingFile(io.BytesIO):
    """A blob that remembers how much of it was read."""

    read_bytes = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.read_bytes += len(data)
        return data


def test_contents_are_read_only_where_metadata_does_not_decide() -> None:
    """Equal chunks and whole chunks that differ decide; a small file gathered otherwise does not."""
    base = [file(b"same", BIG), file(b"changed", BIG[::-1]), file(b"small", b"s" * 100), file(b"other", b"o" * 100)]
    large = [base[0], file(b"changed", b"x" * 100_000), *base[2:]]
    gathered = [*base[:3], file(b"other", b"!" * 100)]
    for new, reads in ((base, 0), (large, 0), (gathered, 2)):
        files = [CountingFile(encode_layer(layer)) for layer in (base, new)]
        layers = [Layer.open(one) for one in files]
        for one in files:
            one.read_bytes = 0
        compare([layers[0]], [layers[1]])
        [last] = [layer.toc.chunks[-1].stored_size for layer in layers[:1]]
        assert sum(one.read_bytes > 0 for one in files) == reads
        assert all(one.read_bytes <= 2 * last for one in files)


def push(directory: Path, reference: str, name: str, stack: list[Members]) -> str:
    paths = []
    for number, layer in enumerate(stack):
        paths.append(directory / f"{name}-{number}")
        paths[-1].write_bytes(encode_layer(layer))
    return push_group(reference, paths)


OLD = [[directory(b"d"), file(b"d/big", BIG), file(b"d/small", b"small"), file(b"gone", b"12345")]]
NEW = [OLD[0], [file(b"d/small", b"SMALL"), file(b"new", BIG[:9000]), whiteout(b"gone")]]


@pytest.mark.parametrize("kind", ["registry", "layout"])
def test_the_command_shows_paths_and_what_a_node_must_fetch(
    weenv: Weenv, proxy: Proxy, server: RegistryServer, tmp_path: Path, kind: str
) -> None:
    base = f"{proxy.host}/diff/x" if kind == "registry" else f"oci:{tmp_path}/l"
    old, new = push(tmp_path, f"{base}:old", "old", OLD), push(tmp_path, f"{base}:new", "new", NEW)
    proxy.seen.clear()
    ran = weenv("group", "diff", f"{base}:old", f"{base}:new")
    assert ran.status == OK, ran.err
    lines = ran.out.splitlines()
    assert lines[:3] == ["M d/small  contents", "D gone", "A new"]
    with Layer.open(tmp_path / "old-0") as lower, Layer.open(tmp_path / "new-1") as upper:
        toc = upper.footer.toc_stored_size
        held = {chunk.sha256 for chunk in lower.toc.chunks}
        chunks = {chunk.sha256: chunk.stored_size for chunk in upper.toc.chunks if chunk.sha256 not in held}
        assert 0 < len(chunks) < len(upper.toc.chunks)  # the beginning of d/big stands at the beginning of new
    told: dict[str, Any] = json.loads(weenv("group", "diff", old, new, "--format", "json").out)
    assert (told["from"], told["to"]) == (old, new)
    assert told["changes"][0] == {"kind": "M", "path": "d/small", "what": ["contents"], "from": "file", "to": "file"}
    assert told["summary"] == {
        "added_paths": 1, "removed_paths": 1, "modified_paths": 1,
        "added_files": 1, "added_bytes": 9000, "removed_files": 1, "removed_bytes": 5, "modified_files": 1, "modified_bytes": 5,
        "fetch_chunks": len(chunks), "fetch_chunk_bytes": sum(chunks.values()), "fetch_toc_bytes": toc,
        "fetch_bytes": sum(chunks.values()) + toc, "size_bytes": sum(layer.size_bytes for layer in resolve_group(new).layers),
    }  # fmt: skip
    back = json.loads(weenv("group", "diff", new, old, "--format", "json", "--summary").out)
    assert "changes" not in back
    assert (back["summary"]["fetch_bytes"], back["summary"]["removed_files"]) == (0, 1)
    assert weenv("group", "diff", old, new, "--summary").out.splitlines() == lines[3:]
    if kind == "registry":
        layers = {layer.digest: layer for layer in resolve_group(new).layers}
        ranges = [one for one in proxy.blob_reads() if one.path.rpartition("/")[2] in layers]
        assert ranges
        assert all(one.range is not None for one in ranges)
        first = [one for one in ranges if one.path.endswith(resolve_group(new).layers[0].digest)]
        assert max(one.received_bytes for one in first) < layers[resolve_group(new).layers[0].digest].size_bytes / 2


def test_equal_groups_cost_nothing(weenv: Weenv, tmp_path: Path) -> None:
    reference = push(tmp_path, f"oci:{tmp_path}/l:t", "one", OLD)
    ran = weenv("group", "diff", reference, reference)
    assert ran.status == OK
    assert ran.out.splitlines()[-1].startswith("to fetch  0 B of ")
    assert not [line for line in ran.out.splitlines() if line[:2] in ("A ", "D ", "M ")]


def test_failures_have_their_status(weenv: Weenv, tmp_path: Path) -> None:
    reference = push(tmp_path, f"oci:{tmp_path}/l:t", "one", OLD)
    assert weenv("group", "diff", reference, f"oci:{tmp_path}/l:absent").status == NOT_FOUND
    other = push(tmp_path, f"oci:{tmp_path}/l:o", "two", [[*OLD[0][:2], file(b"d/small", b"sMALL"), OLD[0][3]]])
    layer = resolve_group(other).layers[0]
    blob = tmp_path / "l/blobs/sha256" / layer.digest.removeprefix("sha256:")
    data = bytearray(blob.read_bytes())
    with Layer.open(io.BytesIO(bytes(data))) as opened:
        last = opened.toc.chunks[-1]
    data[last.blob_offset] ^= 0xFF
    blob.write_bytes(data)
    assert weenv("group", "diff", reference, other).status == INTEGRITY  # the chunk that had to be read
    assert layer.toc_offset is not None
    data[layer.toc_offset + 20] ^= 0xFF
    blob.write_bytes(data)
    ran = weenv("group", "diff", reference, other)
    assert (ran.status, layer.digest in ran.err) == (INTEGRITY, True)

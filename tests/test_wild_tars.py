"""Every row of the table (wild_tars.py): by itself, against `umoci unpack`, and against overlayfs over what GNU tar extracted."""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import os
import stat
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
import pytest
import zstandard
from layer_model import described, expected
from merge_corners import compare, is_hollow, is_implicit, models_of, topmost_is_implicit, without_attributes
from oci_image import LAYER, ImageSpec, digest
from raw_tars import TIME_S, archive, directory, file, link
from strategies import SMALL_CHUNK, Layer, Member
from unpacked_layers import Unpacked, kernel, umoci, umoci_image
from weefs_harness import MountedCore, Row, mounted_core, open_layers, tree_rows
from wild_tars import SAME, Case, Differs, Fails, NotAsked, Refusal, Same, Unpacks, Verdict, rows

from layerformat import Layer as LayerFile
from layerformat import (
    LayerError,
    Recipe,
    RecipeWriter,
    SourceError,
    Toc,
    encode,
    export_tar,
    read_tar,
    restore_toc,
)
from layerformat import convert as convert_source
from weefs.core import CoreError, check_toc
from weefs.merge import Directory, PlanRefused, View

ROWS = rows()
CASES = [row for row in ROWS if isinstance(row, Case)]
REFUSALS = [row for row in ROWS if isinstance(row, Refusal)]


@pytest.fixture(scope="module")
def mounted() -> Iterator[MountedCore]:
    with mounted_core() as mounted:
        yield mounted


@attrs.frozen
class Converted:
    """A layer, the recipe of its archive, and what was odd."""

    blob: bytes
    recipe: bytes
    warnings: tuple[str, ...]

    def open(self) -> LayerFile:
        return LayerFile.open(io.BytesIO(self.blob))


def convert(tar: bytes) -> Converted:
    """LayerError."""
    blob, recipe, warnings = io.BytesIO(), io.BytesIO(), list[str]()
    writer = RecipeWriter(recipe)
    entries = read_tar(io.BytesIO(tar), warn=warnings.append, literal=writer.literal)
    report = encode(entries, blob, chunk_size=SMALL_CHUNK, recipe=writer)
    writer.finish(bytes.fromhex(report.toc_digest.removeprefix("sha256:")), hashlib.sha256(tar).digest())
    return Converted(blob.getvalue(), recipe.getvalue(), tuple(warnings))


def members(tar: bytes) -> Layer:
    return [Member(entry, data.read(entry.data_size)) for entry, data in read_tar(io.BytesIO(tar))]


def raw_toc(layer: LayerFile, blob: bytes) -> bytes:
    footer = layer.footer
    return restore_toc(blob[footer.toc_offset : footer.toc_offset + footer.toc_stored_size], footer.toc_raw_size)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layer_says_what_its_archive_said(case: Case) -> None:
    check_conversion(case)


def check_conversion(case: Case) -> None:
    """Both readers accept it, the model agrees, exporting it and converting that gives it again, its recipe gives the archive's bytes."""
    for tar in case.stack:
        converted = convert(tar)
        layer = converted.open()
        assert layer.verify() == []
        toc = raw_toc(layer, converted.blob)
        check_toc(toc)
        Toc.parse(toc)
        assert described(layer) == expected(members(tar))
        exported, again = io.BytesIO(), io.BytesIO()
        export_tar(layer, exported)
        assert described(convert(exported.getvalue()).open()) == described(layer)
        Recipe(io.BytesIO(converted.recipe), "recipe").write_tar(layer, again)
        assert again.getvalue() == tar
    if case.warns:
        assert any(case.warns in warning for warning in converted.warnings)
    else:
        assert converted.warnings == ()


def shown(mounted: MountedCore, blobs: Sequence[bytes]) -> dict[bytes, Row]:
    slot, path = mounted.add_plan(blobs)
    try:
        return tree_rows(path)
    finally:
        mounted.core.remove_plan(slot)


def judged(ours: dict[bytes, Row], judge: Unpacked, view: View, implied: set[bytes]) -> set[tuple[bytes, str]]:
    """Where a judge differs, but for what no archive says: the attributes of `implied` directories, the times of directories in which the
    judge had to make something, directories' link counts, and directories that only a whiteout asks for.
    """
    mine, theirs = dict(ours), dict(judge.rows)
    for path, node in view.walk():
        if not isinstance(node, Directory):
            continue
        if is_hollow(node) and path not in theirs:
            mine.pop(path, None)
            continue
        for side in (mine, theirs):
            if path in side:
                side[path] = attrs.evolve(side[path], nlink=0)
                if path in implied:
                    side[path] = without_attributes(side[path])
        if path in theirs and judge.touched(theirs[path]):
            theirs[path] = attrs.evolve(theirs[path], mtime_ns=mine[path].mtime_ns)
    others = {path for path in mine.keys() & theirs.keys() if stat.S_IFMT(mine[path].mode) != stat.S_IFMT(theirs[path].mode)}
    return {(found.path, "" if found.path in others else found.what) for found in compare(mine, theirs)}


def check(verdict: Verdict, judge: Unpacked, differences: set[tuple[bytes, str]]) -> None:
    match verdict:
        case Fails(message):
            assert judge.error
            assert message in judge.error
        case Differs(where):
            assert judge.error == ""
            assert differences == where
        case Same():
            assert judge.error == ""
            assert differences == set()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_stack_is_what_the_judges_say(mounted: MountedCore, case: Case) -> None:
    check_judges(mounted, case)


def check_judges(mounted: MountedCore, case: Case) -> None:
    blobs = [convert(tar).blob for tar in case.stack]
    ours = shown(mounted, blobs)
    view = View(open_layers(blobs))
    for path, attributes in case.shows.items():
        assert (path in ours) == (attributes is not None), path
        for name, value in (attributes or {}).items():
            assert getattr(ours[path], name) == value, (path, name)
    implied = {path for path, node in view.walk() if isinstance(node, Directory) and is_implicit(node)}
    models = models_of([members(tar) for tar in case.stack])
    if not isinstance(case.umoci, NotAsked):
        judge = umoci(case.stack)
        check(case.umoci, judge, judged(ours, judge, view, implied))
    if not isinstance(case.kernel, NotAsked):
        judge = kernel(case.stack)
        also = {path for path in ours if topmost_is_implicit(models, path)}
        check(case.kernel, judge, judged(ours, judge, view, implied | also))


@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
def test_what_cannot_be_meant_is_refused(mounted: MountedCore, refusal: Refusal) -> None:
    if refusal.in_plan:
        with pytest.raises(CoreError, match=refusal.message):
            mounted.add_plan([convert(tar).blob for tar in refusal.stack])
        with pytest.raises(PlanRefused, match=refusal.message):
            View(open_layers([convert(tar).blob for tar in refusal.stack]))
    else:
        with pytest.raises(LayerError, match=refusal.message):
            convert(refusal.stack[-1])
    match refusal.umoci:
        case Fails(message):
            error = umoci(refusal.stack).error
            assert error
            assert message in error
        case Unpacks():
            assert umoci(refusal.stack).error == ""


def test_every_difference_is_decided() -> None:
    """What a judge does differently has its paragraph in the records of decisions."""
    decisions = Path(__file__).parent.parent / "docs" / "decisions"
    for row in ROWS:
        verdicts = [row.umoci, row.kernel] if isinstance(row, Case) else [row.umoci]
        differs = any(isinstance(verdict, Differs | Unpacks) for verdict in verdicts)
        differs |= isinstance(row, Case) and any(isinstance(verdict, Fails) for verdict in verdicts)
        assert bool(row.decision) == (differs or isinstance(row.umoci, NotAsked)), row
        if row.decision:
            record, paragraph = row.decision.split(": ")
            (path,) = decisions.glob(f"{record}-*.md")
            assert f"\n| {paragraph} |" in path.read_text() or f"as `{paragraph}`" in path.read_text(), row


# Archives that other programs make


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a file of every kind, sparse ones, and attributes."""
    root = tmp_path_factory.mktemp("tree")
    (root / "d").mkdir()
    (root / "d" / "f").write_bytes(b"data" * 3000)
    (root / ("n" * 120)).write_bytes(b"a long name")
    (root / "d" / "s").symlink_to("../" + "t" * 120)
    os.link(root / "d" / "f", root / "l")
    os.mkfifo(root / "p", 0o640)
    os.mknod(root / "c", 0o20600, os.makedev(1, 3))
    os.chmod(root / "d", 0o2775)
    for name, size, places in (("hole", 1 << 20, ()), ("end", 1 << 20, (0, 300_000)), ("many", 1 << 20, range(8192, 1 << 20, 32_768))):
        with open(root / name, "wb") as file:
            file.truncate(size)
            for place in places:
                file.seek(place)
                file.write(b"%07d." % place * 512)
    os.link(root / "end", root / "also the end")
    os.setxattr(root / "d" / "f", "user.note", b"a=b\n\0")
    for path in (root / "d" / "f", root / "d", root):
        os.utime(path, ns=(0, 1_600_000_000_123_456_789))
    return root


GNU_TAR_OPTIONS = [
    ["--format=gnu"],
    ["--format=posix"],
    ["--format=gnu", "--sparse"],
    ["--format=oldgnu", "--sparse"],
    *(["--format=posix", "--sparse", f"--sparse-version={version}"] for version in ("0.0", "0.1", "1.0")),
    ["--format=posix", "--xattrs"],
]


@pytest.mark.parametrize("options", GNU_TAR_OPTIONS, ids=" ".join)
def test_what_gnu_tar_makes(mounted: MountedCore, tree: Path, options: list[str]) -> None:
    command = ["tar", "-c", *options, "--sort=name", "--numeric-owner", "-C", str(tree), "."]
    tar = subprocess.run(command, check=True, capture_output=True).stdout
    old_sparse = "--sparse" in options and "--format=posix" not in options
    xattrs = ((b"user.note", b"a=b\n\0"),) if "--xattrs" in options else ()
    shows: dict[bytes, dict[str, object] | None] = {
        b"d/f": {"nlink": 2, "xattrs": xattrs},
        b"hole": {"content": bytes(1 << 20)},
        b"end": {"content": (tree / "end").read_bytes(), "group": (b"also the end", b"end")},
        b"many": {"content": (tree / "many").read_bytes()},
    }
    case = Case("made by GNU tar", " ".join(options), (tar,), shows=shows, umoci=Fails("unknown typeflag") if old_sparse else SAME)
    check_conversion(case)
    check_judges(mounted, case)


# However it is compressed


def gzip_with(name: str = "", time: int = 0) -> Callable[[bytes], bytes]:
    def compress(data: bytes) -> bytes:
        file = io.BytesIO()
        with gzip.GzipFile(name, "wb", fileobj=file, mtime=time) as member:
            member.write(data)
        return file.getvalue()

    return compress


def cut(compress: Callable[[bytes], bytes], between: bytes = b"") -> Callable[[bytes], bytes]:
    """In pieces of 700 bytes, each compressed by itself."""
    return lambda data: between + between.join(compress(data[at : at + 700]) for at in range(0, len(data), 700)) + between


zstd = zstandard.ZstdCompressor(write_checksum=True).compress
SKIPPABLE = b"\x5f\x2a\x4d\x18\3\0\0\0abc"
FORMS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "plain": ("", lambda data: data),
    "gzip": ("+gzip", gzip_with()),
    "gzip, stored": ("+gzip", lambda data: gzip.compress(data, 0)),
    "gzip with a name and a time": ("+gzip", gzip_with("layer.tar", TIME_S)),
    "gzip in members": ("+gzip", cut(gzip_with())),
    "gzip in members with names": ("+gzip", cut(gzip_with("part", TIME_S))),
    "gzip with empty members between": ("+gzip", cut(gzip_with(), gzip.compress(b""))),
    "zstd": ("", zstd),
    "zstd in frames": ("", cut(zstd)),
    "zstd with skippable frames": ("", cut(zstd, SKIPPABLE)),
    "zstd with empty frames": ("", cut(zstd, zstd(b""))),
    "xz": ("", lzma.compress),
    "xz in streams": ("", cut(lzma.compress)),
    "xz in streams with padding": ("", lambda data: cut(lzma.compress)(data) + bytes(8)),
}
"""By name: the suffix of the media type when umoci 0.4.7 reads it, and the compressor."""


@pytest.mark.parametrize("form", FORMS)
def test_however_it_is_compressed(tmp_path: Path, form: str) -> None:
    """The layer is the plain archive's, and umoci unpacks what it reads to the same tree."""
    tar = archive(directory(b"./"), directory(b"d"), file(b"d/f", b"data" * 3000), link(b"l", b"d/f")) + b"behind the end"
    suffix, compress = FORMS[form]
    stored = compress(tar)
    (tmp_path / "source").write_bytes(stored)
    convert_source(tmp_path / "source", tmp_path / "layer", chunk_size=SMALL_CHUNK)
    assert (tmp_path / "layer").read_bytes() == convert(tar).blob
    if suffix or form == "plain":
        image = ImageSpec([stored], kinds=[""], media_types={0: LAYER + suffix}, diff_ids=[digest(tar)])
        assert umoci_image(image).error == ""
        assert umoci_image(image).rows == umoci([tar]).rows


@pytest.mark.parametrize("form", [form for form in FORMS if form != "plain"])
def test_damage_in_a_compressed_archive_is_refused(tmp_path: Path, form: str) -> None:
    stored = FORMS[form][1](archive(file(b"f", b"data" * 3000)))
    for damaged in (stored[: len(stored) // 2], stored[:-9], stored + b"garbage", stored[:-30] + b"\xff\xff" + stored[-28:]):
        (tmp_path / "source").write_bytes(damaged)
        with pytest.raises(SourceError):
            convert_source(tmp_path / "source", tmp_path / "layer")
        assert not (tmp_path / "layer").exists()

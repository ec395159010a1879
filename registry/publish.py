"""Publishing groups from what is to be converted first, without doing anything twice.

A layer with a digest of its own (a tar, an image's layer) is converted unless its conversion is known: from the
manifest that the target's tag means now, or from this machine's `Conversions`. What is known and at the target is
neither read nor sent; what is known and still here is sent. Layers are converted one after the other, and one thread
sends the finished ones meanwhile. Tags move at the very end, when every layer of every group is at its target: a push
that fails or is cut off publishes nothing, and the next one goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Literal, Protocol, cast

import attrs

from layerformat import DEFAULT_CHUNK_SIZE, DEFAULT_LEVEL, ENCODER, ConvertReport, Layer, LayerError
from registry.conversions import Conversions, Kept, digest_of_file
from registry.credentials import Credentials
from registry.errors import IntegrityError, NotFound, RegistryError, needing_temporary_space
from registry.group import Group, describe_layer, parse_target, resolve_group
from registry.image_stores import Blob
from registry.images import Image, ImageLayer
from registry.manifest import (
    Conversion,
    GroupConfig,
    LayerDescriptor,
    Origin,
    Platform,
    RecipeDescriptor,
    build_config,
    build_manifest,
    digest_of,
    digest_of_stream,
    recipes_of,
)
from registry.reference import Reference, with_digest
from registry.target import Target, open_target
from registry.tocs import open_groups, stored_chunks

_QUEUED_UPLOADS = 16


@attrs.frozen
class Encoding:
    """The parameters that the bytes of a layer depend on, and whether a recipe is made with it."""

    level: int = DEFAULT_LEVEL
    chunk_size: int = DEFAULT_CHUNK_SIZE
    recipe: bool = False

    def __str__(self) -> str:
        return f"{ENCODER} level={self.level} chunk={self.chunk_size}"


# ---- what is published ----


@attrs.frozen
class LayerFile:
    """A layer as `weenv layer convert` makes it; make it with `describe_file`. `title`: for messages; None: its path."""

    path: Path
    layer: LayerDescriptor
    title: str | None = None

    @property
    def name(self) -> str:
        return self.title or str(self.path)


@attrs.frozen
class DirectorySource:
    """A directory: it has no digest, so it is converted every time."""

    path: Path


class TarSource(Protocol):
    """A tar, plain or compressed, known by its digest. NotFound, IntegrityError."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    @property
    def digest(self) -> str:
        """Of what is stored."""
        ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def diff_id(self) -> str | None:
        """What the decompressed tar must be, when that is said somewhere."""
        ...

    def blob(self, scratch: Path) -> AbstractContextManager[BinaryIO]:
        """As `ImageStore.blob`."""
        ...

    def stored_size(self) -> int | None:
        """As `ImageStore.size`."""
        ...


@attrs.frozen
class TarFile:
    """A tar of the file system; make it with `describe_tar`."""

    path: Path
    digest: str
    size_bytes: int
    diff_id: str | None = None

    @property
    def name(self) -> str:
        return str(self.path)

    @contextlib.contextmanager
    def blob(self, scratch: Path) -> Iterator[BinaryIO]:
        with self.path.open("rb", buffering=0) as file:
            yield cast(BinaryIO, file)

    def stored_size(self) -> int | None:
        return self.size_bytes


@attrs.frozen
class ImageTar:
    """A layer of an image."""

    image: Image
    layer: ImageLayer

    @property
    def name(self) -> str:
        return f"layer {self.layer.number} of {self.image.name}"

    @property
    def digest(self) -> str:
        return self.layer.digest

    @property
    def size_bytes(self) -> int:
        return self.layer.size_bytes

    @property
    def diff_id(self) -> str | None:
        return self.layer.diff_id

    def blob(self, scratch: Path) -> AbstractContextManager[BinaryIO]:
        return self.image.store.blob(self.layer.digest, self.layer.size_bytes, scratch)

    def stored_size(self) -> int | None:
        return self.image.store.size(self.layer.digest)


LayerSource = LayerFile | DirectorySource | TarSource


@attrs.frozen
class GroupSource:
    """A group to be published under a reference; layers base first. `runs_on` None: this machine's platform. `build`: keys
    of what it was built from."""

    reference: str
    layers: tuple[LayerSource, ...]
    role: str | None = None
    config: GroupConfig = attrs.field(factory=GroupConfig)
    runs_on: Platform | None = None
    build: str | None = None


def describe_file(path: Path, title: str | None = None) -> LayerFile:
    """Reads a layer file, for its digest and whether every chunk is whole: what is published damaged is damaged for all. NotFound,
    IntegrityError.
    """
    described = describe_layer(path)
    with Layer.open(path) as layer:
        problems = layer.verify()
    if problems:
        more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise IntegrityError(f"{path}: {problems[0]}{more}; `weenv layer fsck` says what that costs")
    return LayerFile(path, described, title)


def describe_tar(path: Path) -> TarFile:
    """Reads a tar once for its digest. NotFound, RegistryError."""
    try:
        with path.open("rb") as file:
            digest = digest_of_stream(file)
            return TarFile(path, digest, file.tell())
    except FileNotFoundError:
        raise NotFound(f"{path}: there is no such file") from None
    except OSError as error:
        raise RegistryError(f"{path}: {error.strerror}") from error


# ---- what is told ----

Done = Literal["converted", "converted before", "already there", "given"]
"""`converted before`: by an earlier push that was cut off, or for another target."""


@attrs.frozen
class Shared:
    """What a layer has in common with the group that the tag meant before: different chunks, and their stored bytes."""

    chunks: int
    bytes: int
    of_chunks: int
    of_bytes: int


@attrs.frozen
class LayerOutcome:
    """What became of one layer. `bytes_in` is None when it is not known without reading."""

    reference: str
    name: str
    digest: str
    done: Done
    bytes_in: int | None
    bytes_out: int
    wall_s: float
    shared: Shared | None
    warnings: tuple[str, ...] = ()


class Convert(Protocol):
    """`layerformat.convert` with the parameters of the `Encoding`."""

    def __call__(self, source: Path | BinaryIO, layer: Path, *, diff_id: bool, recipe: Path | None) -> ConvertReport:
        """Converts a source to a layer at a path; `diff_id`: the report is to have it; `recipe`: where to write one. LayerError,
        OSError."""
        ...


# ---- publishing ----


def publish_groups(
    groups: Sequence[GroupSource],
    *,
    conversions: Conversions,
    convert: Convert,
    encoding: Encoding,
    report: Callable[[LayerOutcome], None],
    credentials: Credentials | None = None,
) -> list[str]:
    """Publishes groups, all or none; returns REF@sha256:… of each. RegistryError and its kinds, LayerError, OSError.

    `report` is called when what is to be done about a layer is clear; it may still be on its way.
    """
    parsed = [parse_target(group.reference, group.role) for group in groups]
    for group in groups:
        if not group.layers:
            raise RegistryError(f"{group.reference}: expected at least one layer, received none")
    with contextlib.ExitStack() as stack:
        work = stack.enter_context(_workspace(groups, conversions))
        uploads = stack.enter_context(_Uploads(credentials))
        settler = _Settler(conversions, convert, encoding, work, uploads)
        stack.callback(settler.close)
        places = [
            _Place(group.reference, reference, stack.enter_context(open_target(reference, credentials)),
                   _Previous(group.reference, credentials))
            for group, reference in zip(groups, parsed, strict=True)
        ]  # fmt: skip
        settled: list[list[_Settled]] = []
        for group, place in zip(groups, places, strict=True):
            settled.append([])
            for source in group.layers:
                uploads.check()
                layer, outcome = settler.settle(source, place)
                settled[-1].append(layer)
                report(outcome)
        uploads.finish()
        pinned = [_publish(*one) for one in zip(groups, places, settled, strict=True)]
        settler.release()
    return pinned


def _workspace(groups: Sequence[GroupSource], conversions: Conversions) -> AbstractContextManager[Path]:
    """Where layers are made: beside where those are kept that can be found again."""
    sources = [layer for group in groups for layer in group.layers]
    if all(isinstance(source, LayerFile | DirectorySource) for source in sources):
        return _temporary_directory()
    return conversions.workspace()


@contextlib.contextmanager
def _temporary_directory() -> Iterator[Path]:
    with needing_temporary_space(), tempfile.TemporaryDirectory(prefix="weenv-push-") as directory:
        yield Path(directory)


def _publish(group: GroupSource, place: _Place, layers: Sequence[_Settled]) -> str:
    descriptors = tuple(layer.descriptor for layer in layers)
    origins = tuple(layer.origin for layer in layers)
    config = build_config(group.config, descriptors, group.runs_on, recipes_of(origins))
    manifest = build_manifest(config, descriptors, group.role, origins, group.build)
    previous = place.previous.group
    if previous is None or previous.digest != digest_of(manifest):
        place.target.publish(place.reference.tag, config, manifest)
    return str(with_digest(place.reference, digest_of(manifest)))


@attrs.frozen
class _Settled:
    """A layer that is at its target or on its way there."""

    descriptor: LayerDescriptor
    origin: Origin | None


@attrs.frozen
class _Step:
    """What was done about a layer; `path` is its file when that is here."""

    name: str
    done: Done
    layer: LayerDescriptor
    origin: Origin | None = None
    bytes_in: int | None = None
    path: Path | None = None
    warnings: tuple[str, ...] = ()


@attrs.frozen
class _Place:
    """Where a layer goes: the group's reference as given and parsed, its target, and what its tag means now."""

    name: str
    reference: Reference
    target: Target
    previous: _Previous


class _Previous:
    """What a target's tag means before it moves."""

    def __init__(self, reference: str, credentials: Credentials | None) -> None:
        self._credentials = credentials
        self._chunks: dict[bytes, int] | None = None
        self.group: Group | None = None
        try:
            self.group = resolve_group(reference, credentials=credentials)
        except NotFound:
            return
        except RegistryError as error:
            if type(error) not in (RegistryError, IntegrityError):
                raise  # a registry that is away or refuses us: the push would fail too, only later
            # something else has that tag, or what has it is damaged: pushing replaces it

    def conversion(self, source: str, encoder: str) -> Conversion | None:
        """What the group says that was converted from a source."""
        known = self.group.conversions if self.group is not None else ()
        found = (one for one in known if (one.origin.source, one.origin.encoder) == (source, encoder))
        return next(found, None)

    def shared(self, layer: Path) -> tuple[Shared | None, tuple[str, ...]]:
        """What a layer file shares with the group; the metadata of that is read once. Or why it cannot be said."""
        if self.group is None:
            return None, ()
        try:
            if self._chunks is None:
                with open_groups([self.group], self._credentials) as (_ranges, [layers]):
                    self._chunks = stored_chunks(layers)
        except RegistryError as error:
            return None, (f"what is shared with the previous group is not known: {error}",)
        with Layer.open(layer) as opened:
            fresh = stored_chunks([opened])
        common = {digest: size for digest, size in fresh.items() if digest in self._chunks}
        return Shared(len(common), sum(common.values()), len(fresh), sum(fresh.values())), ()


class _Settler:
    """Decides for one layer after the other what is to be done, and does it. Owner of the kept files' locks."""

    def __init__(
        self, conversions: Conversions, convert: Convert, encoding: Encoding, work: Path, uploads: _Uploads
    ) -> None:
        self._conversions = conversions
        self._convert = convert
        self._encoder = str(encoding)
        self._recipe = encoding.recipe
        self._work = work
        self._uploads = uploads
        self._kept: list[Kept] = []
        self._made = 0

    def close(self) -> None:
        for kept in self._kept:
            kept.close()

    def release(self) -> None:
        """Everything is published."""
        for kept in self._kept:
            self._conversions.release(kept)

    def settle(self, source: LayerSource, at: _Place) -> tuple[_Settled, LayerOutcome]:
        """One layer, at its target or queued for it when this returns."""
        begin = time.perf_counter()
        if isinstance(source, LayerFile):
            step = self._give(source, at)
        elif isinstance(source, DirectorySource):
            step = self._convert_directory(source, at)
        else:
            step = self._find(source, at) or self._convert_and_send(source, at)
        shared, unknown = at.previous.shared(step.path) if step.path is not None else (None, ())
        outcome = LayerOutcome(
            reference=at.name,
            name=step.name,
            digest=step.layer.digest,
            done=step.done,
            bytes_in=step.bytes_in,
            bytes_out=step.layer.size_bytes,
            wall_s=time.perf_counter() - begin,
            shared=shared,
            warnings=(*step.warnings, *unknown),
        )
        return _Settled(step.layer, step.origin), outcome

    def _give(self, source: LayerFile, at: _Place) -> _Step:
        layer = source.layer
        if at.target.has_blob(layer.digest):
            return _Step(source.name, "already there", layer)
        self._uploads.add(at.reference, source.path, layer.digest, layer.size_bytes)
        return _Step(source.name, "given", layer, path=source.path)

    def _convert_directory(self, source: DirectorySource, at: _Place) -> _Step:
        path = self._scratch()
        with _naming(str(source.path)):
            report = self._convert(source.path, path, diff_id=False, recipe=None)
        layer = _descriptor(report)
        self._uploads.add(at.reference, path, layer.digest, layer.size_bytes)
        return _Step(str(source.path), "converted", layer, None, report.bytes_in, path, report.warnings)

    def _find(self, source: TarSource, at: _Place) -> _Step | None:
        """A conversion that is known, if it is at the target or can be sent there."""
        known = at.previous.conversion(source.digest, self._encoder)
        if known is not None and self._is_at(at, known):
            return self._known(source, "already there", known, at)
        kept = self._conversions.find(source.digest, self._encoder)
        if kept is None:
            return None
        self._kept.append(kept)
        if self._is_at(at, kept.conversion):
            return self._known(source, "already there", kept.conversion, at)
        if kept.path is None or (self._recipe and kept.recipe_path is None):
            return None
        if not kept.is_whole():
            return None
        self._send(kept, at)
        step = self._known(source, "converted before", kept.conversion, at, recipe_is_sent=kept.recipe_path is not None)
        return attrs.evolve(step, path=kept.path)

    def _is_at(self, at: _Place, known: Conversion) -> bool:
        """Whether the target has all of a conversion, the recipe if one is wanted."""
        if not at.target.has_blob(known.layer.digest):
            return False
        recipe = known.origin.recipe
        return not self._recipe or (recipe is not None and at.target.has_blob(recipe.digest))

    def _send(self, kept: Kept, at: _Place) -> None:
        layer, recipe = kept.conversion.layer, kept.conversion.origin.recipe
        assert kept.path is not None
        self._uploads.add(at.reference, kept.path, layer.digest, layer.size_bytes)
        if recipe is not None and kept.recipe_path is not None:
            self._uploads.add(at.reference, kept.recipe_path, recipe.digest, recipe.size_bytes)

    def _known(
        self, source: TarSource, done: Done, known: Conversion, at: _Place, *, recipe_is_sent: bool = False
    ) -> _Step:
        _check_size(source)
        _check_diff_id(source, known.origin.diff_id)
        origin, recipe = known.origin, known.origin.recipe
        if recipe is not None and not recipe_is_sent and not at.target.has_blob(recipe.digest):
            origin = attrs.evolve(origin, recipe=None)
        return _Step(source.name, done, known.layer, origin, source.size_bytes)

    def _convert_and_send(self, source: TarSource, at: _Place) -> _Step:
        kept, warnings = self._convert_tar(source)
        self._kept.append(kept)
        assert kept.path is not None
        layer, origin = kept.conversion.layer, kept.conversion.origin
        self._send(kept, at)
        return _Step(source.name, "converted", layer, origin, source.size_bytes, kept.path, warnings)

    def _convert_tar(self, source: TarSource) -> tuple[Kept, tuple[str, ...]]:
        """Converts and verifies: the digest of what was read, and of the tar in it."""
        path = self._scratch()
        recipe = path.with_suffix(".recipe") if self._recipe else None
        with source.blob(self._work) as stored:
            blob = Blob(stored, source.name, source.digest, source.size_bytes)
            try:
                with _naming(source.name):
                    report = self._convert(cast(BinaryIO, blob), path, diff_id=True, recipe=recipe)
            except LayerError:
                blob.verify()  # damaged on its way is the better answer
                raise
            blob.verify()
        assert report.diff_id is not None  # as it was asked for
        _check_diff_id(source, report.diff_id)
        described = None if recipe is None else RecipeDescriptor(digest_of_file(recipe), recipe.stat().st_size)
        conversion = Conversion(_descriptor(report), Origin(source.digest, self._encoder, report.diff_id, described))
        return self._conversions.add(path, recipe, conversion), report.warnings

    def _scratch(self) -> Path:
        self._made += 1
        return self._work / f"{self._made}.weenv"


def _descriptor(report: ConvertReport) -> LayerDescriptor:
    made = report.layer
    return LayerDescriptor(
        made.blob_digest, made.blob_size, made.toc_offset, made.toc_size, made.toc_raw_size, made.toc_digest
    )


@contextlib.contextmanager
def _naming(source: str) -> Iterator[None]:
    """A refusal of contents says of which source they are."""
    try:
        yield
    except LayerError as error:
        if str(error).startswith(source):
            raise
        raise LayerError(f"{source}: {error}") from error


def _check_size(source: TarSource) -> None:
    """What is not read is still as long as its manifest says."""
    received = source.stored_size()
    if received not in (None, source.size_bytes):
        raise IntegrityError(f"{source.name}: expected {source.size_bytes} bytes with {source.digest}, received {received} bytes")


def _check_diff_id(source: TarSource, received: str) -> None:
    if source.diff_id not in (None, received):
        raise IntegrityError(f"{source.name}: expected a tar with the diff id {source.diff_id}, received {received}")


class _Uploads:
    """One thread that sends layers and recipes to their targets, in order. A context manager: left by an error, it does not wait for
    what is on its way."""

    def __init__(self, credentials: Credentials | None) -> None:
        self._credentials = credentials
        self._queue: queue.Queue[tuple[Reference, Path, str, int] | None] = queue.Queue(_QUEUED_UPLOADS)
        self._failure: BaseException | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="uploads", daemon=True)

    def __enter__(self) -> _Uploads:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped = True
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)

    def add(self, reference: Reference, path: Path, digest: str, size_bytes: int) -> None:
        """Queues a file, which must stay until `finish`; waits while the queue is full."""
        self._queue.put((reference, path, digest, size_bytes))

    def check(self) -> None:
        """Raises what an upload raised."""
        if self._failure is not None:
            raise self._failure

    def finish(self) -> None:
        """Waits until everything is sent; raises what an upload raised."""
        self._queue.put(None)
        self._thread.join()
        self.check()

    def _run(self) -> None:
        with contextlib.ExitStack() as stack:
            targets: dict[str, Target] = {}
            while (one := self._queue.get()) is not None and not self._stopped:
                if self._failure is not None:
                    continue  # what follows is taken and dropped, so that nobody waits for a place
                reference, path, digest, size_bytes = one
                try:
                    if reference.source not in targets:
                        targets[reference.source] = stack.enter_context(open_target(reference, self._credentials))
                    targets[reference.source].add_file(path, digest, size_bytes)
                except BaseException as error:  # raised again where the result is wanted
                    self._failure = error

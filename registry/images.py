"""Ordinary images, docker's and OCI's, to be read: from an OCI layout, an archive or a registry.

`open_image` finds the one image that is meant, through indexes, by its platform, and says which tar layers it has.
Small blobs are verified here; layers are handed out as they are stored, and whoever reads one to its end verifies it
(`Blob`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec

from registry.archives import TarArchive
from registry.attribution import HistoryEntry
from registry.credentials import DOCKER_HUB, Credentials
from registry.errors import IntegrityError, InvalidReference, NotFound, RegistryError
from registry.image_stores import (
    DockerArchiveStore,
    ImageStore,
    LayoutStore,
    OciArchiveStore,
    RegistryStore,
    convert_json,
    decode_json,
)
from registry.layout import MAX_INDEX_BYTES, TAG, Layout
from registry.manifest import (
    GROUP_TYPE,
    Descriptor,
    GroupConfig,
    Manifest,
    Platform,
    ProcessConfig,
    digest_of,
    group_config,
    is_digest,
    this_platform,
)
from registry.reference import LayoutReference, Reference, RegistryReference, parse_reference

INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
TAR_TYPES = tuple(
    f"application/vnd.{kind}"
    for kind in (
        "oci.image.layer.v1.tar", "oci.image.layer.v1.tar+gzip", "oci.image.layer.v1.tar+zstd",
        "docker.image.rootfs.diff.tar", "docker.image.rootfs.diff.tar.gzip", "docker.image.rootfs.diff.tar.zstd",
    )
)  # fmt: skip
KEPT = tuple(field.encode_name for field in msgspec.structs.fields(ProcessConfig))
"""Keys of an image's `config`."""
MAX_INDEX_DEPTH = 4
MAX_CANDIDATES = 1000


@attrs.frozen
class ImageLayer:
    """A tar layer as an image names it: digest and size (bytes) as it is stored, digest of the tar decompressed."""

    number: int
    digest: str
    size_bytes: int
    diff_id: str


@attrs.frozen
class Image:
    """One image for one platform. Layers base first, history oldest first.

    config  what a group can say of the image's configuration; `unkept` names the rest of it
    """

    name: str
    digest: str
    platform: Platform
    config: GroupConfig
    unkept: tuple[str, ...]
    history: tuple[HistoryEntry, ...]
    layers: tuple[ImageLayer, ...]
    store: ImageStore


# ---- opening ----


@contextlib.contextmanager
def open_image(
    source: str, platform: Platform | None, scratch: Path, credentials: Credentials | None = None
) -> Iterator[Image]:
    """The image that `source` means: `oci:DIR[:TAG]`, a file, or HOST[:PORT]/REPO[:TAG][@DIGEST].

    platform  which one of an index; None: this machine's, or whatever the image is when there is one only
    scratch   a directory for what must be fetched or decompressed before it can be read

    RegistryError and its kinds.
    """
    if source.startswith("oci:"):
        yield _open_layout(source, platform)
    elif _is_path(source):
        yield _open_archive(Path(source), platform, scratch)
    else:
        reference = docker_hub(parse_reference(source))
        from registry.remote import Remote

        with Remote(reference, credentials) as remote:
            data = remote.read_manifest(reference.digest or reference.tag or "")
            yield _choose(RegistryStore(remote), data, str(reference), platform)


def _is_path(source: str) -> bool:
    path = Path(source)
    if path.is_dir():
        raise InvalidReference(f"{source}: expected oci:{source} for an OCI layout, a file or a registry reference")
    is_named_so = source.startswith(("/", "./", "../")) or source.endswith((".tar", ".tar.gz", ".tgz"))
    return path.exists() or is_named_so or "/" not in source


def docker_hub(reference: Reference) -> RegistryReference:
    """The reference of an image; `docker.io/python` is where Docker Hub serves it."""
    assert isinstance(reference, RegistryReference)
    if reference.host not in ("docker.io", "index.docker.io"):
        return reference
    repository = reference.repository if "/" in reference.repository else f"library/{reference.repository}"
    return attrs.evolve(reference, host=DOCKER_HUB, repository=repository)


def _open_layout(source: str, platform: Platform | None) -> Image:
    directory, tag, digest = _parse_layout(source)
    store = LayoutStore(Layout(directory))
    if digest is not None:
        return _choose(store, store.read_manifest(digest), source, platform)
    entries = Layout(directory).entries()
    return _choose_entry(store, _tagged(entries, tag, source), source, platform)


def _parse_layout(source: str) -> tuple[Path, str | None, str | None]:
    """`oci:DIR`, or what `parse_reference` takes."""
    bare = Path(source.removeprefix("oci:"))
    if bare.is_dir():
        return bare, None, None
    reference = parse_reference(source if ":" in source.removeprefix("oci:") or "@" in source else f"{source}:latest")
    assert isinstance(reference, LayoutReference)
    return reference.directory, reference.tag, reference.digest


def _tagged(entries: Sequence[Descriptor], tag: str | None, source: str) -> list[Descriptor]:
    """The entries of a tag, or all when there is none or one tag."""
    tags = sorted({entry.annotations[TAG] for entry in entries if TAG in entry.annotations})
    if tag is None and len(tags) > 1:
        raise InvalidReference(f"{source}: expected a tag, as in {source}:{tags[0]}; there are {', '.join(tags)}")
    found = [entry for entry in entries if tag is None or entry.annotations.get(TAG) == tag]
    if not found:
        raise NotFound(f"{source}: no image has the tag '{tag}'; there are {', '.join(tags) or 'none'}")
    return found


def _open_archive(path: Path, platform: Platform | None, scratch: Path) -> Image:
    archive = TarArchive(path, scratch)
    name = str(path)
    if "index.json" in archive and "oci-layout" in archive:
        oci = OciArchiveStore(archive)
        index = decode_json(archive.read("index.json", MAX_INDEX_BYTES), _Index, name)
        return _choose_entry(oci, _tagged(index.manifests, None, name), name, platform)
    if "manifest.json" not in archive:
        raise IntegrityError(f"{path}: expected manifest.json (docker save) or index.json (OCI) in the archive, it has neither")
    docker = DockerArchiveStore(archive)
    return _open_manifest(docker, docker.manifest, name, platform)


# ---- choosing ----


class _Index(msgspec.Struct, rename="camel"):
    manifests: list[Descriptor]


class _Kind(msgspec.Struct, rename="camel"):
    media_type: str | None = None
    artifact_type: str | None = None
    manifests: Any = None


class _RootFs(msgspec.Struct):
    diff_ids: list[str]


class _History(msgspec.Struct):
    created_by: str | None = None
    created: str | None = None
    empty_layer: bool = False


class _Image(msgspec.Struct):
    """An image configuration, docker's or OCI's, the fields that are read."""

    rootfs: _RootFs
    architecture: str = ""
    os: str = ""
    variant: str | None = None
    config: dict[str, Any] | None = None
    history: list[_History] | None = None

    @property
    def platform(self) -> Platform:
        return Platform(self.os or "linux", self.architecture or this_platform().architecture, self.variant or None)


def parse_platform(text: str) -> Platform:
    """`os/arch[/variant]`. InvalidReference."""
    parts = text.split("/")
    if len(parts) not in (2, 3) or not all(parts):
        raise InvalidReference(f"platform '{text}': expected os/arch or os/arch/variant, as in linux/amd64")
    return Platform(*parts)


def _choose(store: ImageStore, data: bytes, name: str, platform: Platform | None) -> Image:
    """The image of a manifest, or of an index the one for the platform."""
    kind = decode_json(data, _Kind, name)
    if kind.manifests is not None:
        return _choose_entry(store, decode_json(data, _Index, name).manifests, name, platform)
    return _open_manifest(store, data, name, platform)


def _choose_entry(store: ImageStore, entries: Sequence[Descriptor], name: str, platform: Platform | None) -> Image:
    candidates = list(_candidates(store, entries, name, 0))
    wanted = platform or this_platform()
    if len(candidates) == 1 and platform is None:
        return _open_manifest(store, store.read_manifest(candidates[0][1]), name, None)
    for offered, digest in candidates:
        if _fits(offered, wanted):
            return _open_manifest(store, store.read_manifest(digest), name, None)
    shown = ", ".join(sorted({str(offered) for offered, _ in candidates})) or "none"
    raise NotFound(f"{name}: there is no image for {wanted}; there are: {shown}; say which with --platform")


def _candidates(store: ImageStore, entries: Sequence[Descriptor], name: str, depth: int) -> Iterator[tuple[Platform, str]]:
    """The images below an index, those in indexes below it too, with their platforms."""
    if depth > MAX_INDEX_DEPTH or len(entries) > MAX_CANDIDATES:
        raise IntegrityError(f"{name}: expected an index of at most {MAX_CANDIDATES} images, {MAX_INDEX_DEPTH} deep, received more")
    for entry in entries:
        if not is_digest(entry.digest):
            raise IntegrityError(f"{name}: expected sha256 digests in the index, received '{entry.digest}'")
        if entry.platform is not None and entry.platform.os == "unknown":
            continue  # an attestation beside an image
        if entry.media_type in INDEX_TYPES:
            below = decode_json(store.read_manifest(entry.digest), _Index, name)
            yield from _candidates(store, below.manifests, name, depth + 1)
        elif entry.platform is not None:
            yield entry.platform, entry.digest
        else:
            manifest = _parse_manifest(store.read_manifest(entry.digest), name)
            yield decode_json(store.read_blob(manifest.config.digest), _Image, name).platform, entry.digest


def _fits(offered: Platform, wanted: Platform) -> bool:
    """A variant that is not asked for does not matter; arm64 is v8."""
    if (offered.os, offered.architecture) != (wanted.os, wanted.architecture):
        return False
    usual = "v8" if offered.architecture == "arm64" else None
    return wanted.variant is None or (offered.variant or usual) == wanted.variant


def _parse_manifest(data: bytes, name: str) -> Manifest:
    if (kind := decode_json(data, _Kind, name).artifact_type) == GROUP_TYPE:
        raise RegistryError(f"{name}: expected an image, received a layer group ({kind}), which needs no splitting")
    manifest = decode_json(data, Manifest, name)
    for descriptor in [manifest.config, *manifest.layers]:
        if not is_digest(descriptor.digest) or descriptor.size < 0:
            raise IntegrityError(f"{name}: expected sha256 digests and sizes, received '{descriptor.digest}', {descriptor.size}")
    return manifest


def _open_manifest(store: ImageStore, data: bytes, name: str, platform: Platform | None) -> Image:
    """`platform`: what a single image must be for, when that was asked for."""
    manifest = _parse_manifest(data, name)
    image = decode_json(store.read_blob(manifest.config.digest), _Image, name)
    if platform is not None and not _fits(image.platform, platform):
        raise NotFound(f"{name}: there is no image for {platform}; there is one, for {image.platform}")
    diff_ids = image.rootfs.diff_ids
    if not manifest.layers or len(diff_ids) != len(manifest.layers):
        received = f"{len(manifest.layers)} layers, {len(diff_ids)} diff ids"
        raise IntegrityError(f"{name}: expected at least one layer and a diff id for each, received {received}")
    for number, (layer, diff_id) in enumerate(zip(manifest.layers, diff_ids, strict=True)):
        _check_layer(name, number, layer.media_type, diff_id)
    return Image(
        name=name,
        digest=digest_of(data),
        platform=image.platform,
        config=group_config(convert_json(image.config or {}, ProcessConfig, name), name),
        unkept=tuple(sorted(key for key, value in (image.config or {}).items() if value and key not in KEPT)),
        history=tuple(HistoryEntry(one.created_by or "", one.created, one.empty_layer) for one in image.history or ()),
        layers=tuple(
            ImageLayer(number, layer.digest, layer.size, diff_id)
            for number, (layer, diff_id) in enumerate(zip(manifest.layers, diff_ids, strict=True))
        ),
        store=store,
    )


def _check_layer(name: str, number: int, media_type: str, diff_id: str) -> None:
    if not is_digest(diff_id):
        raise IntegrityError(f"{name}: layer {number}: expected a diff id of sha256, received '{diff_id}'")
    if media_type in TAR_TYPES:
        return
    if media_type.endswith("+encrypted"):
        why = "it is encrypted; decrypt the image first"
    elif "foreign" in media_type or "nondistributable" in media_type:
        why = "its contents are not in the registry (a foreign layer); make an image that holds them"
    else:
        why = f"expected one of {', '.join(TAR_TYPES)}"
    raise RegistryError(f"{name}: layer {number} of type '{media_type}' cannot be converted: {why}")

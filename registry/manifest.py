"""What is published: OCI image manifests of layer groups, built with deterministic bytes and parsed with checks.

A group is an image manifest with artifact type `application/vnd.weenv.group.v1`, an ordinary image configuration, and
layers of the seekable format (docs/format.md §1 names their annotations), base first. A layer that was converted from
something with a digest says from what: `dev.weenv.source`, `.encoder` and `.diffid` (see `Origin`). Recipes (docs/format.md §8) stand
behind all layers, so that a registry keeps them; `dev.weenv.recipe` of a layer is the digest of its own.
"""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Iterable
from io import BufferedReader
from typing import Any

import attrs
import msgspec

from registry.errors import IntegrityError, RegistryError

GROUP_TYPE = "application/vnd.weenv.group.v1"
LAYER_TYPE = "application/vnd.weenv.layer.v1"
RECIPE_TYPE = "application/vnd.weenv.recipe.v1"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
MANIFEST_TYPES = (
    MANIFEST_TYPE,
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
"""What a registry may answer with: all but the first are refused by name, which says more than the registry's own
404."""
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
ROLE = "dev.weenv.role"
ROLES = ("base", "task", "harness", "evaluator")
BUILD = "dev.weenv.build"
"""Keys of what the group was built from (docs/recipes.md)."""
TOC_OFFSET = "dev.weenv.toc.offset"
TOC_SIZE = "dev.weenv.toc.size"
TOC_RAW_SIZE = "dev.weenv.toc.rawsize"
TOC_DIGEST = "dev.weenv.toc.digest"
SOURCE = "dev.weenv.source"
ENCODER = "dev.weenv.encoder"
DIFF_ID = "dev.weenv.diffid"
RECIPE = "dev.weenv.recipe"
MAX_MANIFEST_BYTES = 4 << 20
MAX_SIZE_BYTES = (1 << 63) - 1

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NUMBER = re.compile(r"[0-9]{1,18}")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@attrs.frozen
class GroupConfig:
    """What a group says about processes in its environments: `env` as NAME=VALUE, the rest None when it says
    nothing. An empty `entrypoint` or `cmd` says that there is none, whatever the groups below say."""

    env: tuple[str, ...] = ()
    workdir: str | None = None
    user: str | None = None
    entrypoint: tuple[str, ...] | None = None
    cmd: tuple[str, ...] | None = None


class Platform(msgspec.Struct, frozen=True, omit_defaults=True):
    """For which machines an image is, in Go's names: linux, amd64, and v7 of arm/v7."""

    os: str
    architecture: str
    variant: str | None = None

    def __str__(self) -> str:
        return "/".join(filter(None, (self.os, self.architecture, self.variant)))


@attrs.frozen
class LayerDescriptor:
    """A layer as a manifest names it. Sizes in bytes. The four `toc_*` are all set or all None."""

    digest: str
    size_bytes: int
    toc_offset: int | None
    toc_size_bytes: int | None
    toc_raw_size_bytes: int | None
    toc_digest: str | None


@attrs.frozen
class RecipeDescriptor:
    """A recipe as a manifest names it."""

    digest: str
    size_bytes: int


@attrs.frozen
class Origin:
    """What a layer was converted from: equal origins are equal layers, so nothing is converted twice.

    source   digest of what was read, compressed as it was
    encoder  what made the layer of it, and with which parameters
    diff_id  digest of the tar, decompressed
    recipe   what gives the tar back, when it was made
    """

    source: str
    encoder: str
    diff_id: str
    recipe: RecipeDescriptor | None = None


@attrs.frozen
class Conversion:
    """A layer and its origin."""

    layer: LayerDescriptor
    origin: Origin


class Descriptor(msgspec.Struct, rename="camel", omit_defaults=True):
    """What a manifest or an index points to (OCI image specification, descriptor.md); `size` in bytes."""

    media_type: str
    digest: str
    size: int
    annotations: dict[str, str] = {}
    artifact_type: str | None = None
    platform: Platform | None = None


class Manifest(msgspec.Struct, rename="camel", omit_defaults=True):
    """An OCI image manifest (manifest.md), the fields that are used here."""

    schema_version: int
    config: Descriptor
    layers: list[Descriptor]
    media_type: str | None = None
    artifact_type: str | None = None
    annotations: dict[str, str] = {}


class _Kind(msgspec.Struct, rename="camel"):
    """Just enough of any manifest to say what it is."""

    media_type: str | None = None
    artifact_type: str | None = None
    manifests: Any = None


class ProcessConfig(msgspec.Struct, omit_defaults=True):
    """`config` of an image configuration, the fields that are kept."""

    env: list[str] | None = msgspec.field(name="Env", default=None)
    workdir: str | None = msgspec.field(name="WorkingDir", default=None)
    user: str | None = msgspec.field(name="User", default=None)
    entrypoint: list[str] | None = msgspec.field(name="Entrypoint", default=None)
    cmd: list[str] | None = msgspec.field(name="Cmd", default=None)


class _RootFs(msgspec.Struct):
    type: str
    diff_ids: list[str]


class ImageConfig(msgspec.Struct, omit_defaults=True):
    """An OCI image configuration (config.md), the fields that are used here."""

    architecture: str
    os: str
    variant: str | None = None
    rootfs: _RootFs | None = None
    config: ProcessConfig | None = None


def digest_of(data: bytes) -> str:
    """`sha256:` + hex."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def digest_of_stream(file: BufferedReader) -> str:
    """`sha256:` + hex, of what is left of an open file. OSError."""
    return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def this_platform() -> Platform:
    """Linux on this machine."""
    machine = platform.machine()
    return Platform("linux", _ARCHITECTURES.get(machine, machine))


def is_digest(text: str) -> bool:
    """Whether it is `sha256:` + 64 hexadecimal digits."""
    return _DIGEST.fullmatch(text) is not None


def build_config(
    config: GroupConfig,
    layers: tuple[LayerDescriptor, ...],
    runs_on: Platform | None = None,
    recipes: tuple[RecipeDescriptor, ...] = (),
) -> bytes:
    """The image configuration, for `runs_on` or this machine. A layer has no tar here, so its own digest stands for the
    diff id; there is one for all that the manifest lists."""
    runs_on = runs_on or this_platform()
    listed: tuple[LayerDescriptor | RecipeDescriptor, ...] = (*layers, *recipes)
    process = ProcessConfig(
        env=list(config.env) or None,
        workdir=config.workdir,
        user=config.user,
        entrypoint=None if config.entrypoint is None else list(config.entrypoint),
        cmd=None if config.cmd is None else list(config.cmd),
    )
    return msgspec.json.encode(
        ImageConfig(
            architecture=runs_on.architecture,
            os=runs_on.os,
            variant=runs_on.variant,
            rootfs=_RootFs(type="layers", diff_ids=[one.digest for one in listed]),
            config=process,
        )
    )


def build_manifest(
    config_bytes: bytes,
    layers: tuple[LayerDescriptor, ...],
    role: str | None,
    origins: tuple[Origin | None, ...] | None = None,
    build: str | None = None,
) -> bytes:
    """The manifest; `origins`: of the layers, those that are known. The same arguments give the same bytes: no times, fixed order."""
    origins = origins or (None,) * len(layers)
    recipes = [Descriptor(media_type=RECIPE_TYPE, digest=one.digest, size=one.size_bytes) for one in recipes_of(origins)]
    return msgspec.json.encode(
        Manifest(
            schema_version=2,
            media_type=MANIFEST_TYPE,
            artifact_type=GROUP_TYPE,
            config=Descriptor(media_type=CONFIG_TYPE, digest=digest_of(config_bytes), size=len(config_bytes)),
            layers=[*map(_describe, layers, origins), *recipes],
            annotations={name: value for name, value in ((BUILD, build), (ROLE, role)) if value},
        )
    )


def recipes_of(origins: Iterable[Origin | None]) -> tuple[RecipeDescriptor, ...]:
    """The recipes that origins name, each once."""
    return tuple(dict.fromkeys(origin.recipe for origin in origins if origin is not None and origin.recipe is not None))


def _describe(layer: LayerDescriptor, origin: Origin | None) -> Descriptor:
    annotations = {
        TOC_OFFSET: layer.toc_offset,
        TOC_SIZE: layer.toc_size_bytes,
        TOC_RAW_SIZE: layer.toc_raw_size_bytes,
        TOC_DIGEST: layer.toc_digest,
        SOURCE: origin and origin.source,
        ENCODER: origin and origin.encoder,
        DIFF_ID: origin and origin.diff_id,
        RECIPE: origin and origin.recipe and origin.recipe.digest,
    }
    known = {name: str(value) for name, value in annotations.items() if value is not None}
    return Descriptor(media_type=LAYER_TYPE, digest=layer.digest, size=layer.size_bytes, annotations=known)


def parse_manifest(data: bytes, reference: str) -> Manifest:
    """IntegrityError: damaged, or a group that breaks a rule. RegistryError: a manifest, but of no layer group."""
    _refuse_other_kinds(data, reference)
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise IntegrityError(f"{reference}: expected an OCI image manifest: {error}") from error
    if manifest.schema_version != 2:
        raise IntegrityError(f"{reference}: expected schemaVersion 2, received {manifest.schema_version}")
    if not layers_of(manifest):
        raise IntegrityError(f"{reference}: expected a layer group with at least one layer, received none")
    role = manifest.annotations.get(ROLE)
    if role is not None and role not in ROLES:
        raise IntegrityError(f"{reference}: expected a role of {', '.join(ROLES)}, received '{role}'")
    for descriptor in [manifest.config, *manifest.layers]:
        if not _DIGEST.fullmatch(descriptor.digest) or not 0 <= descriptor.size <= MAX_SIZE_BYTES:
            received = f"'{descriptor.digest}', {descriptor.size}"
            raise IntegrityError(f"{reference}: expected sha256 digests and sizes in bytes, received {received}")
    for layer in manifest.layers:
        if layer.media_type not in (LAYER_TYPE, RECIPE_TYPE):
            raise IntegrityError(f"{reference}: expected layers of {LAYER_TYPE}, received one of '{layer.media_type}'")
    return manifest


def layers_of(manifest: Manifest) -> list[Descriptor]:
    """The layers of a group's manifest, base first."""
    return [descriptor for descriptor in manifest.layers if descriptor.media_type != RECIPE_TYPE]


def _refuse_other_kinds(data: bytes, reference: str) -> None:
    """An ordinary image, an index or another artifact is no damage, but a reference to something else."""
    try:
        kind = msgspec.json.decode(data, type=_Kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise IntegrityError(f"{reference}: expected an OCI image manifest: {error}") from error
    if kind.artifact_type == GROUP_TYPE:
        return
    if kind.manifests is not None:
        received = f"an index of several images ({kind.media_type or 'without a media type'})"
    elif kind.artifact_type is not None:
        received = f"an artifact of type '{kind.artifact_type}'"
    else:
        received = f"an ordinary image ({kind.media_type or 'without a media type'})"
    wanted = f"expected a layer group ({GROUP_TYPE})"
    raise RegistryError(f"{reference}: {wanted}, received {received}; publish one with `weenv group push`")


def parse_layer(descriptor: Descriptor, reference: str) -> LayerDescriptor:
    """A layer's descriptor with its annotations, which must be all there or none."""
    texts = [descriptor.annotations.get(name) for name in (TOC_OFFSET, TOC_SIZE, TOC_RAW_SIZE, TOC_DIGEST)]
    if all(text is None for text in texts):
        return LayerDescriptor(descriptor.digest, descriptor.size, None, None, None, None)
    digest = texts[3]
    numbers = [int(text) for text in texts[:3] if text is not None and _NUMBER.fullmatch(text)]
    if digest is None or not _DIGEST.fullmatch(digest) or len(numbers) != 3:
        raise IntegrityError(
            f"{reference}: layer {descriptor.digest}: expected four dev.weenv.toc annotations or none, received {texts}"
        )
    offset, size, raw_size = numbers
    if offset + size > descriptor.size:
        raise IntegrityError(
            f"{reference}: layer {descriptor.digest}: expected a TOC within the blob's {descriptor.size} bytes, "
            f"received one at {offset} of {size} bytes"
        )
    return LayerDescriptor(descriptor.digest, descriptor.size, offset, size, raw_size, digest)


def parse_conversion(manifest: Manifest, descriptor: Descriptor, layer: LayerDescriptor) -> Conversion | None:
    """What a layer's descriptor says of its origin. It is good for saving work only, so a part of it is as none."""
    source, encoder, diff_id = (descriptor.annotations.get(name, "") for name in (SOURCE, ENCODER, DIFF_ID))
    if not encoder or not _DIGEST.fullmatch(source) or not _DIGEST.fullmatch(diff_id):
        return None
    wanted = descriptor.annotations.get(RECIPE)
    recipes = (one for one in manifest.layers if one.media_type == RECIPE_TYPE and one.digest == wanted)
    recipe = next((RecipeDescriptor(one.digest, one.size) for one in recipes), None)
    return Conversion(layer, Origin(source, encoder, diff_id, recipe))


def parse_config(data: bytes, reference: str) -> tuple[GroupConfig, Platform]:
    """What an image configuration says about processes, and for which machines it is. IntegrityError."""
    try:
        image = msgspec.json.decode(data, type=ImageConfig)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise IntegrityError(f"{reference}: expected an OCI image configuration: {error}") from error
    runs_on = Platform(image.os, image.architecture, image.variant)
    return group_config(image.config or ProcessConfig(), reference), runs_on


def group_config(process: ProcessConfig, reference: str) -> GroupConfig:
    """What an image says about processes, checked. IntegrityError."""
    env = tuple(process.env or ())
    if any("=" not in variable or "\0" in variable for variable in env):
        raise IntegrityError(f"{reference}: expected Env as NAME=VALUE, received {list(env)}")
    return GroupConfig(
        env=env,
        workdir=process.workdir or None,
        user=process.user or None,
        entrypoint=None if process.entrypoint is None else tuple(process.entrypoint),
        cmd=None if process.cmd is None else tuple(process.cmd),
    )

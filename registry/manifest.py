"""What is published: OCI image manifests of layer groups, built with deterministic bytes and parsed with checks.

A group is an image manifest with artifact type `application/vnd.weenv.group.v1`, an ordinary image configuration, and layers of the seekable format (docs/format.md §1
names their annotations), base first.
"""

from __future__ import annotations

import hashlib
import platform
import re

import attrs
import msgspec

from registry.errors import IntegrityError, RegistryError

GROUP_TYPE = "application/vnd.weenv.group.v1"
LAYER_TYPE = "application/vnd.weenv.layer.v1"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
ROLE = "dev.weenv.role"
ROLES = ("base", "task", "harness", "evaluator")
TOC_OFFSET, TOC_SIZE, TOC_RAW_SIZE, TOC_DIGEST = (f"dev.weenv.toc.{name}" for name in ("offset", "size", "rawsize", "digest"))
MAX_MANIFEST_BYTES = 4 << 20

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@attrs.frozen
class GroupConfig:
    """What a group says about processes in its environments: `env` as NAME=VALUE, the rest None when it says nothing."""

    env: tuple[str, ...] = ()
    workdir: str | None = None
    user: str | None = None


@attrs.frozen
class LayerDescriptor:
    """A layer as a manifest names it. Sizes in bytes. The four `toc_*` are all set or all None."""

    digest: str
    size_bytes: int
    toc_offset: int | None
    toc_size_bytes: int | None
    toc_raw_size_bytes: int | None
    toc_digest: str | None


class Descriptor(msgspec.Struct, rename="camel", omit_defaults=True):
    media_type: str
    digest: str
    size: int
    annotations: dict[str, str] = {}
    artifact_type: str | None = None


class Manifest(msgspec.Struct, rename="camel", omit_defaults=True):
    schema_version: int
    config: Descriptor
    layers: list[Descriptor]
    media_type: str | None = None
    artifact_type: str | None = None
    annotations: dict[str, str] = {}


class _ProcessConfig(msgspec.Struct, omit_defaults=True):
    env: list[str] | None = msgspec.field(name="Env", default=None)
    workdir: str | None = msgspec.field(name="WorkingDir", default=None)
    user: str | None = msgspec.field(name="User", default=None)


class _RootFs(msgspec.Struct):
    type: str
    diff_ids: list[str]


class ImageConfig(msgspec.Struct, omit_defaults=True):
    architecture: str
    os: str
    rootfs: _RootFs | None = None
    config: _ProcessConfig | None = None


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def build_config(config: GroupConfig, layers: tuple[LayerDescriptor, ...]) -> bytes:
    """The image configuration. A layer has no tar here, so its own digest stands for the diff id."""
    machine = platform.machine()
    process = _ProcessConfig(env=list(config.env) or None, workdir=config.workdir, user=config.user)
    rootfs = _RootFs(type="layers", diff_ids=[layer.digest for layer in layers])
    return msgspec.json.encode(
        ImageConfig(architecture=_ARCHITECTURES.get(machine, machine), os="linux", rootfs=rootfs, config=process)
    )


def build_manifest(config_bytes: bytes, layers: tuple[LayerDescriptor, ...], role: str | None) -> bytes:
    """The manifest. The same arguments give the same bytes: no times, fixed order."""
    return msgspec.json.encode(
        Manifest(
            schema_version=2,
            media_type=MANIFEST_TYPE,
            artifact_type=GROUP_TYPE,
            config=Descriptor(media_type=CONFIG_TYPE, digest=digest_of(config_bytes), size=len(config_bytes)),
            layers=[_describe(layer) for layer in layers],
            annotations={ROLE: role} if role else {},
        )
    )


def _describe(layer: LayerDescriptor) -> Descriptor:
    annotations = {
        TOC_OFFSET: layer.toc_offset,
        TOC_SIZE: layer.toc_size_bytes,
        TOC_RAW_SIZE: layer.toc_raw_size_bytes,
        TOC_DIGEST: layer.toc_digest,
    }
    known = {name: str(value) for name, value in annotations.items() if value is not None}
    return Descriptor(media_type=LAYER_TYPE, digest=layer.digest, size=layer.size_bytes, annotations=known)


def parse_manifest(data: bytes, reference: str) -> Manifest:
    """IntegrityError: not a manifest. RegistryError: one, but of no layer group."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise IntegrityError(f"{reference}: expected an OCI image manifest: {error}") from error
    if manifest.artifact_type != GROUP_TYPE or any(layer.media_type != LAYER_TYPE for layer in manifest.layers):
        kind = manifest.artifact_type or (manifest.layers[0].media_type if manifest.layers else manifest.media_type) or "an empty manifest"
        raise RegistryError(f"{reference}: expected a layer group ({GROUP_TYPE}), received {kind}; publish one with `weenv group push`")
    if not manifest.layers:
        raise IntegrityError(f"{reference}: a layer group without layers")
    role = manifest.annotations.get(ROLE)
    if role is not None and role not in ROLES:
        raise IntegrityError(f"{reference}: expected a role of {', '.join(ROLES)}, received '{role}'")
    for descriptor in [manifest.config, *manifest.layers]:
        if not _DIGEST.fullmatch(descriptor.digest) or descriptor.size < 0:
            raise IntegrityError(f"{reference}: expected sha256 digests and sizes, received '{descriptor.digest}', {descriptor.size}")
    return manifest


def parse_layer(descriptor: Descriptor, reference: str) -> LayerDescriptor:
    """A layer's descriptor with its annotations, which must be all there or none."""
    texts = [descriptor.annotations.get(name) for name in (TOC_OFFSET, TOC_SIZE, TOC_RAW_SIZE, TOC_DIGEST)]
    if all(text is None for text in texts):
        return LayerDescriptor(descriptor.digest, descriptor.size, None, None, None, None)
    offset, size, raw_size, digest = texts
    if digest is None or not _DIGEST.fullmatch(digest) or not all(text is not None and text.isdecimal() for text in texts[:3]):
        raise IntegrityError(f"{reference}: layer {descriptor.digest}: expected its four dev.weenv.toc.* annotations, received {texts}")
    begin, stored, raw = (int(text or "") for text in (offset, size, raw_size))
    if begin + stored > descriptor.size:
        raise IntegrityError(f"{reference}: layer {descriptor.digest}: a TOC at {begin}+{stored}, beyond the blob's {descriptor.size} bytes")
    return LayerDescriptor(descriptor.digest, descriptor.size, begin, stored, raw, digest)


def parse_config(data: bytes, reference: str) -> GroupConfig:
    try:
        image = msgspec.json.decode(data, type=ImageConfig)
    except msgspec.MsgspecError as error:
        raise IntegrityError(f"{reference}: expected an OCI image configuration: {error}") from error
    process = image.config or _ProcessConfig()
    return GroupConfig(env=tuple(process.env or ()), workdir=process.workdir or None, user=process.user or None)

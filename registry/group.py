"""Layer groups: publishing them and resolving references to them, the same for a local layout and a registry."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from layerformat import FormatError, decode_footer
from registry.credentials import Credentials
from registry.errors import IntegrityError, InvalidReference, NotFound, RegistryError
from registry.layout import Layout
from registry.manifest import (
    BUILD,
    ROLE,
    ROLES,
    Conversion,
    GroupConfig,
    LayerDescriptor,
    Platform,
    build_config,
    build_manifest,
    digest_of,
    digest_of_stream,
    layers_of,
    parse_config,
    parse_conversion,
    parse_layer,
    parse_manifest,
)
from registry.reference import (
    LayoutReference,
    Reference,
    RegistryReference,
    parse_reference,
    parse_source,
    with_digest,
)
from registry.target import open_target

if TYPE_CHECKING:
    from registry.remote import Remote

FOOTER_SIZE = 80


@attrs.frozen
class Group:
    """A resolved layer group.

    reference    as given, pinned: REF@sha256:…
    digest       of the manifest
    role         base, task, harness, evaluator, or None
    layers       base first
    source       where the blobs are: `oci:/abs/dir` or `http(s)://host:port/repo`
    runs_on      for which machines it is
    conversions  the layers that say what they were converted from
    build        keys of what it was built from, by `weenv group build`
    """

    reference: str
    digest: str
    role: str | None
    config: GroupConfig
    layers: tuple[LayerDescriptor, ...]
    source: str
    runs_on: Platform
    conversions: tuple[Conversion, ...] = ()
    build: str | None = None


def describe_layer(path: Path) -> LayerDescriptor:
    """A layer file as a manifest will name it: its digest, and its TOC's place by its footer.

    IntegrityError, NotFound.
    """
    try:
        with path.open("rb") as file:
            digest = digest_of_stream(file)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - FOOTER_SIZE))
            footer = decode_footer(file.read(), blob_size=size)
    except FileNotFoundError:
        raise NotFound(f"{path}: there is no such file") from None
    except OSError as error:
        raise RegistryError(f"{path}: {error.strerror}") from error
    except FormatError as error:
        raise IntegrityError(f"{path}: expected a layer as `weenv layer convert` makes it: {error}") from error
    toc_digest = f"sha256:{footer.toc_sha256.hex()}"
    return LayerDescriptor(digest, size, footer.toc_offset, footer.toc_stored_size, footer.toc_raw_size, toc_digest)


def push_group(
    reference: str,
    layers: Sequence[Path],
    *,
    role: str | None = None,
    config: GroupConfig | None = None,
    credentials: Credentials | None = None,
) -> str:
    """Publishes layer files, base first, under a reference; returns REF@sha256:….

    Blobs that are there already are not sent again. RegistryError and its kinds.
    """
    parsed = parse_target(reference, role)
    if not layers:
        raise RegistryError(f"{reference}: expected at least one layer, received none")
    descriptors = tuple(describe_layer(path) for path in layers)
    config_bytes = build_config(config or GroupConfig(), descriptors)
    manifest = build_manifest(config_bytes, descriptors, role)
    with open_target(parsed, credentials) as target:
        for path, descriptor in zip(layers, descriptors, strict=True):
            target.add_file(path, descriptor.digest, descriptor.size_bytes)
        target.publish(parsed.tag, config_bytes, manifest)
    return str(with_digest(parsed, digest_of(manifest)))


def parse_target(reference: str, role: str | None) -> Reference:
    """A reference that can be published under. InvalidReference, RegistryError."""
    parsed = parse_reference(reference)
    if parsed.digest is not None:
        raise InvalidReference(f"{reference}: expected a tag to push to, received a digest; the digest is the result")
    if role is not None and role not in ROLES:
        raise RegistryError(f"role: expected one of {', '.join(ROLES)}, received '{role}'")
    return parsed


def resolve_group(reference: str, *, credentials: Credentials | None = None) -> Group:
    """A reference to what it means now. RegistryError and its kinds."""
    parsed = parse_reference(reference)
    name = str(parsed)
    with contextlib.ExitStack() as stack:
        store: Layout | Remote
        if isinstance(parsed, LayoutReference):
            store = Layout(parsed.directory)
            data = store.read_blob(parsed.digest or store.resolve(parsed.tag or ""))
        else:
            from registry.remote import Remote

            store = stack.enter_context(Remote(parsed, credentials))
            data = store.read_manifest(parsed.digest or parsed.tag or "")
        manifest = parse_manifest(data, name)
        config, runs_on = parse_config(store.read_blob(manifest.config.digest), name)
    digest = digest_of(data)
    descriptors = layers_of(manifest)
    layers = tuple(parse_layer(descriptor, name) for descriptor in descriptors)
    conversions = [parse_conversion(manifest, *one) for one in zip(descriptors, layers, strict=True)]
    return Group(
        reference=str(with_digest(parsed, digest)),
        digest=digest,
        role=manifest.annotations.get(ROLE),
        config=config,
        layers=layers,
        source=parsed.source,
        runs_on=runs_on,
        conversions=tuple(conversion for conversion in conversions if conversion is not None),
        build=manifest.annotations.get(BUILD),
    )


def pull_blob(
    source: str, digest: str, size_bytes: int, path: Path, *, credentials: Credentials | None = None
) -> None:
    """Downloads a blob of a group's `source` into a new file: all of it, verified, or nothing.

    RegistryError, OSError.
    """
    directory, host, repository = parse_source(source)
    if directory is not None:
        Layout(directory).copy_blob(digest, size_bytes, path)
        return
    from registry.remote import Remote

    with Remote(RegistryReference(host, repository, None, digest), credentials) as remote:
        remote.download(digest, size_bytes, path)

"""What is published beside a manifest: artifacts whose `subject` it is (OCI distribution specification, "Listing Referrers").

A registry lists them under `referrers/<digest>`; one that does not know that has a tag made of the digest, `sha256-<hex>`, for an index of
them, which whoever publishes keeps. In a local layout they are entries of its index. What is small is embedded in its descriptor (`data`),
so that who finds it has it.
"""

from __future__ import annotations

import base64
import datetime
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from registry.credentials import Credentials
from registry.errors import IntegrityError, NotFound, needing_temporary_space
from registry.layout import CREATED, Layout
from registry.manifest import MANIFEST_TYPE, MAX_MANIFEST_BYTES, digest_of
from registry.reference import LayoutReference, Reference

T = TypeVar("T")

INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
EMPTY = b"{}"
SUBJECT = "dev.weenv.subject"
"""Annotation of an entry in a layout's index: the digest of the manifest that it is beside."""
EMBEDDED_MAX_BYTES = 512 << 10
"""Larger manifests are not embedded in an index, which others may add to."""

Get = Callable[[str, str, int], Awaitable[bytes]]
"""A path of a repository (`manifests/…`), what is accepted, the most bytes: the answer. RegistryError; NotFound: there is none."""


class Described(msgspec.Struct, rename="camel", omit_defaults=True):
    """A descriptor with what it may embed (base64)."""

    media_type: str
    digest: str
    size: int
    annotations: dict[str, str] = {}
    artifact_type: str | None = None
    data: str | None = None


class _Index(msgspec.Struct, rename="camel"):
    manifests: list[Described] = []


class _Artifact(msgspec.Struct, rename="camel"):
    layers: list[Described]
    subject: Described | None = None
    artifact_type: str | None = None


def fallback_tag(digest: str) -> str:
    """Where the referrers of a manifest are listed in a registry that does not list them itself."""
    return digest.replace(":", "-")


# ---- finding ----


async def find(get: Get, digest: str, artifact_type: str, max_bytes: int, *, lists_referrers: bool = True) -> tuple[bytes | None, bool]:
    """The contents of the newest artifact of that type beside the manifest with `digest`, None if there is none; and whether the registry
    lists referrers. `lists_referrers`: False is known before. RegistryError.
    """
    index = b""
    if lists_referrers:
        try:
            index = await get(f"referrers/{digest}", INDEX_TYPE, MAX_MANIFEST_BYTES)
        except NotFound:
            lists_referrers = False
    if not lists_referrers:
        try:
            index = await get(f"manifests/{fallback_tag(digest)}", INDEX_TYPE, MAX_MANIFEST_BYTES)
        except NotFound:
            return None, False
    described = newest(_decoded(index, _Index, f"referrers of {digest}").manifests, artifact_type)
    if described is None:
        return None, lists_referrers
    manifest = embedded(described) or await get(f"manifests/{described.digest}", MANIFEST_TYPE, MAX_MANIFEST_BYTES)
    layer = content_of(verified(manifest, described), digest, artifact_type, max_bytes)
    return embedded(layer) or verified(await get(f"blobs/{layer.digest}", "*/*", max_bytes), layer), lists_referrers


def find_in_layout(layout: Layout, digest: str, artifact_type: str, max_bytes: int) -> bytes | None:
    """The same in a local layout. RegistryError."""
    found = [
        Described(entry.media_type, entry.digest, entry.size, entry.annotations, entry.artifact_type)
        for entry in layout.entries()
        if entry.annotations.get(SUBJECT) == digest
    ]
    described = newest(found, artifact_type)
    if described is None:
        return None
    layer = content_of(layout.read_blob(described.digest), digest, artifact_type, max_bytes)
    return embedded(layer) or layout.read_blob(layer.digest)


def newest(listed: Sequence[Described], artifact_type: str) -> Described | None:
    """By what they say of their making; of equal ones the last."""
    found = [one for one in listed if one.artifact_type == artifact_type]
    return max(reversed(found), key=lambda one: one.annotations.get(CREATED, ""), default=None)


def content_of(manifest: bytes, subject: str, artifact_type: str, max_bytes: int) -> Described:
    """The one layer of an artifact. IntegrityError: it is another's, of another type, or too large."""
    artifact = _decoded(manifest, _Artifact, f"artifact of {subject}")
    if artifact.subject is None or artifact.subject.digest != subject or artifact.artifact_type != artifact_type:
        received = f"subject {artifact.subject.digest if artifact.subject else 'none'}, type {artifact.artifact_type}"
        raise IntegrityError(f"artifact of {subject}: expected it as its subject and type {artifact_type}, received {received}")
    if len(artifact.layers) != 1 or not 0 <= artifact.layers[0].size <= max_bytes:
        raise IntegrityError(f"artifact of {subject}: expected one layer of at most {max_bytes} bytes")
    return artifact.layers[0]


def embedded(described: Described) -> bytes | None:
    """What a descriptor embeds, verified. IntegrityError."""
    if described.data is None:
        return None
    try:
        data = base64.b64decode(described.data, validate=True)
    except ValueError as error:
        raise IntegrityError(f"{described.digest}: expected embedded data in base64: {error}") from error
    return verified(data, described)


def verified(data: bytes, described: Described) -> bytes:
    """IntegrityError: it is not what the descriptor says."""
    if len(data) != described.size or digest_of(data) != described.digest:
        expected = f"{described.size} bytes with {described.digest}"
        raise IntegrityError(f"expected {expected}, received {len(data)} with {digest_of(data)}")
    return data


def _decoded(data: bytes, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"{what}: expected JSON of the OCI specifications: {error}") from error


# ---- publishing ----


def attach(
    reference: Reference, subject: bytes, artifact_type: str, media_type: str, data: bytes, credentials: Credentials | None = None
) -> str:
    """Publishes `data` beside the manifest whose bytes are `subject`, in the place of the reference; the digest of the artifact. Earlier
    ones of that type are not listed any more, where we keep the list. RegistryError.
    """
    created = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    manifest = _artifact(subject, artifact_type, media_type, data, created)
    described = Described(MANIFEST_TYPE, digest_of(manifest), len(manifest), {CREATED: created}, artifact_type)
    if isinstance(reference, LayoutReference):
        layout = Layout(reference.directory)
        for blob in (EMPTY, data):
            layout.add_bytes(blob)
        layout.attach(manifest, artifact_type, {SUBJECT: digest_of(subject), CREATED: created})
        return described.digest
    from registry.remote import Remote

    with Remote(reference, credentials) as remote:
        with needing_temporary_space(), tempfile.TemporaryDirectory(prefix="weenv-push-") as scratch:
            for blob in (EMPTY, data):
                remote.upload_bytes(blob, Path(scratch) / "blob")
        if not remote.upload_artifact(described.digest, manifest, MANIFEST_TYPE):
            if len(manifest) <= EMBEDDED_MAX_BYTES:
                described.data = base64.b64encode(manifest).decode()
            tag = fallback_tag(digest_of(subject))
            try:
                listed = _decoded(remote.read_manifest(tag), dict[str, Any], tag).get("manifests", [])
            except NotFound:
                listed = []
            kept = [one for one in listed if one.get("artifactType") != artifact_type]
            index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [*kept, msgspec.to_builtins(described)]}
            remote.upload_artifact(tag, msgspec.json.encode(index), INDEX_TYPE)
    return described.digest


def _artifact(subject: bytes, artifact_type: str, media_type: str, data: bytes, created: str) -> bytes:
    empty = {"mediaType": EMPTY_TYPE, "digest": digest_of(EMPTY), "size": len(EMPTY), "data": base64.b64encode(EMPTY).decode()}
    layer = {"mediaType": media_type, "digest": digest_of(data), "size": len(data), "data": base64.b64encode(data).decode()}
    return msgspec.json.encode(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": artifact_type,
            "config": empty,
            "layers": [layer],
            "subject": {"mediaType": MANIFEST_TYPE, "digest": digest_of(subject), "size": len(subject)},
            "annotations": {CREATED: created},
        }
    )


def read_subject(reference: Reference, credentials: Credentials | None = None) -> bytes:
    """The manifest that a reference means now. RegistryError."""
    if isinstance(reference, LayoutReference):
        layout = Layout(reference.directory)
        return layout.read_blob(reference.digest or layout.resolve(reference.tag or ""))
    from registry.remote import Remote

    with Remote(reference, credentials) as remote:
        return remote.read_manifest(reference.digest or reference.tag or "")

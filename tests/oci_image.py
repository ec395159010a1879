"""OCI images of tar layers, written by hand as the image specification has it: for tools that unpack such images, and
as what `weenv image split` reads.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zstandard
from attrs import field, frozen

LAYER = "application/vnd.oci.image.layer.v1.tar"
CONFIG = "application/vnd.oci.image.config.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
TAG = "test"
REF_NAME = "org.opencontainers.image.ref.name"

Json = dict[str, Any]


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def compress(tar: bytes, kind: str) -> bytes:
    """`kind`: the suffix of the media type, "", "+gzip" or "+zstd"."""
    if kind == "+gzip":
        return gzip.compress(tar, mtime=0)
    return zstandard.compress(tar) if kind == "+zstd" else tar


@frozen
class ImageSpec:
    """An image to be written: its layers as tars, base first, and what its manifest and configuration say.

    kinds       how each layer is stored (see `compress`); gzip for those that are not listed
    media_types instead of what follows from `kinds`, by layer
    diff_ids    instead of the true ones
    history     the entries of the history
    """

    tars: Sequence[bytes]
    kinds: Sequence[str] = ()
    media_types: dict[int, str] = field(factory=dict)
    diff_ids: Sequence[str] | None = None
    config: Json = field(factory=dict)
    history: Sequence[Json] | None = None
    architecture: str = "amd64"
    variant: str | None = None


class ImageLayout:
    """An OCI layout that is being written. `directory` must not exist."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.blobs = directory / "blobs" / "sha256"
        self.blobs.mkdir(parents=True)
        self._entries: list[Json] = []
        (directory / "oci-layout").write_bytes(encode({"imageLayoutVersion": "1.0.0"}))
        self._write_index()

    def put(self, media_type: str, data: bytes) -> Json:
        """Adds a blob; its descriptor."""
        self.blob_file(digest(data)).write_bytes(data)
        return {"mediaType": media_type, "digest": digest(data), "size": len(data)}

    def blob_file(self, digest: str) -> Path:
        return self.blobs / digest.removeprefix("sha256:")

    def add_image(self, spec: ImageSpec) -> Json:
        """Adds an image; its manifest's descriptor, with its platform."""
        layers = []
        for number, tar in enumerate(spec.tars):
            kind = spec.kinds[number] if number < len(spec.kinds) else "+gzip"
            layers.append(self.put(spec.media_types.get(number, LAYER + kind), compress(tar, kind)))
        platform = {"os": "linux", "architecture": spec.architecture} | ({"variant": spec.variant} if spec.variant else {})
        diff_ids = [digest(tar) for tar in spec.tars] if spec.diff_ids is None else list(spec.diff_ids)
        config: Json = {**platform, "config": spec.config, "rootfs": {"type": "layers", "diff_ids": diff_ids}}
        if spec.history is not None:
            config["history"] = list(spec.history)
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": self.put(CONFIG, encode(config)), "layers": layers}
        return self.put(MANIFEST, encode(manifest)) | {"platform": platform}

    def add_index(self, entries: Sequence[Json]) -> Json:
        """Adds an index of images or of indexes; its descriptor."""
        return self.put(INDEX, encode({"schemaVersion": 2, "mediaType": INDEX, "manifests": list(entries)}))

    def tag(self, name: str | None, entry: Json) -> None:
        """Lets a name mean what a descriptor describes; without a name it is only listed."""
        self._entries.append(entry | ({"annotations": {REF_NAME: name}} if name else {}))
        self._write_index()

    def _write_index(self) -> None:
        index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": self._entries}
        (self.directory / "index.json").write_bytes(encode(index))


def write_image(directory: Path, spec: ImageSpec) -> str:
    """Writes an image layout of one image. Returns what umoci calls the image.

    directory  must not exist.
    """
    layout = ImageLayout(directory)
    entry = layout.add_image(spec)
    layout.tag(TAG, {name: value for name, value in entry.items() if name != "platform"})
    return f"{directory}:{TAG}"


def encode(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()

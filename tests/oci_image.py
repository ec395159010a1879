"""An OCI image of tar layers, written by hand as the image specification has it, for tools that unpack such images."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LAYER = "application/vnd.oci.image.layer.v1.tar"
CONFIG = "application/vnd.oci.image.config.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
TAG = "test"


def write_image(directory: Path, tars: Sequence[bytes]) -> str:
    """Writes an image layout with the archives as its layers, base first. Returns what umoci calls the image.

    directory  must not exist.
    """
    blobs = directory / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def put(media_type: str, data: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    layers = [put(LAYER, tar) for tar in tars]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"] for layer in layers]},
    }
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": put(CONFIG, _json(config)), "layers": layers}
    entry = put(MANIFEST, _json(manifest)) | {"annotations": {"org.opencontainers.image.ref.name": TAG}}
    (directory / "index.json").write_bytes(_json({"schemaVersion": 2, "mediaType": INDEX, "manifests": [entry]}))
    (directory / "oci-layout").write_bytes(_json({"imageLayoutVersion": "1.0.0"}))
    return f"{directory}:{TAG}"


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()

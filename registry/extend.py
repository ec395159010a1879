"""A group published again with more layers on top: what the target has is neither fetched nor sent."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from registry.credentials import Credentials
from registry.group import Group, describe_layer, parse_target, pull_blob
from registry.manifest import LayerDescriptor, RecipeDescriptor, build_config, build_manifest, digest_of, recipes_of
from registry.reference import with_digest
from registry.target import open_target


def extend_group(group: Group, reference: str, layers: Sequence[Path], *, credentials: Credentials | None = None) -> str:
    """Publishes the layers of `group` and `layers`, base first, under a reference, with the role and configuration of
    the group; returns REF@sha256:….

    A layer or recipe of the group that the target lacks is pulled into a temporary directory and pushed, one at a time.
    RegistryError and its kinds.
    """
    parsed = parse_target(reference, group.role)
    added = [describe_layer(path) for path in layers]
    descriptors = (*group.layers, *added)
    origins = {conversion.layer.digest: conversion.origin for conversion in group.conversions}
    known = tuple(origins.get(layer.digest) for layer in descriptors)
    config = build_config(group.config, descriptors, group.runs_on, recipes_of(known))
    manifest = build_manifest(config, descriptors, group.role, known)
    with open_target(parsed, credentials) as target:
        blobs: list[LayerDescriptor | RecipeDescriptor] = [*group.layers, *recipes_of(known)]
        for blob in blobs:
            if not target.has_blob(blob.digest):
                with tempfile.TemporaryDirectory(prefix="weenv-pull-") as scratch:
                    path = Path(scratch) / "blob"
                    pull_blob(group.source, blob.digest, blob.size_bytes, path, credentials=credentials)
                    target.add_file(path, blob.digest, blob.size_bytes)
        for path, layer in zip(layers, added, strict=True):
            target.add_file(path, layer.digest, layer.size_bytes)
        target.publish(parsed.tag, config, manifest)
    return str(with_digest(parsed, digest_of(manifest)))

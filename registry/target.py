"""Where a group is published: a local layout or a repository, behind one interface."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from registry.credentials import Credentials
from registry.errors import needing_temporary_space
from registry.layout import Layout
from registry.manifest import digest_of
from registry.reference import LayoutReference, Reference

if TYPE_CHECKING:
    from registry.remote import Remote


class Target(Protocol):
    """One layout or repository. Of one thread. Methods raise RegistryError and its kinds."""

    def has_blob(self, digest: str) -> bool:
        """Whether a blob is there, whole as far as that can be said from here."""
        ...

    def add_file(self, path: Path, digest: str, size_bytes: int) -> None:
        """Adds a layer file, unless it is there."""
        ...

    def publish(self, tag: str | None, config: bytes, manifest: bytes) -> None:
        """Adds configuration and manifest, whose layers must be there, and lets the tag mean the manifest."""
        ...


@contextlib.contextmanager
def open_target(reference: Reference, credentials: Credentials | None) -> Iterator[Target]:
    """The target that a reference names; a layout is made when there is none."""
    if isinstance(reference, LayoutReference):
        layout = Layout(reference.directory)
        layout.create()
        yield _LayoutTarget(layout)
        return
    from registry.remote import Remote  # oras takes a sixth of a second to import, and a layout needs none of it

    with Remote(reference, credentials) as remote:
        yield _RegistryTarget(remote)


class _LayoutTarget:
    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def has_blob(self, digest: str) -> bool:
        return self._layout.has_blob(digest)

    def add_file(self, path: Path, digest: str, size_bytes: int) -> None:
        self._layout.add_file(path, digest)

    def publish(self, tag: str | None, config: bytes, manifest: bytes) -> None:
        self._layout.add_bytes(config)
        self._layout.tag(tag, manifest)


class _RegistryTarget:
    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    def has_blob(self, digest: str) -> bool:
        return self._remote.has_blob(digest)

    def add_file(self, path: Path, digest: str, size_bytes: int) -> None:
        self._remote.upload_file(path, digest, size_bytes)

    def publish(self, tag: str | None, config: bytes, manifest: bytes) -> None:
        with needing_temporary_space(), tempfile.TemporaryDirectory(prefix="weenv-push-") as scratch:
            self._remote.upload_bytes(config, Path(scratch) / "config")
        self._remote.upload_manifest(tag or digest_of(manifest), manifest)

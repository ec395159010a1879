"""References through the registry package: what `ports.Resolver` asks for."""

from __future__ import annotations

import attrs

from envlet.ports import LayerRef, ResolvedGroup
from registry import Credentials, resolve_group
from registry.preload import preload_resolving


class RegistryResolver:
    """Resolves with one set of credentials. Thread-safe: nothing is kept between calls."""

    def __init__(self, credentials: Credentials | None) -> None:
        self._credentials = credentials

    def prepare(self) -> None:
        """Blocks for a quarter of a second."""
        preload_resolving()

    def resolve(self, reference: str) -> ResolvedGroup:
        """Blocks for as long as the registry takes. RegistryError."""
        group = resolve_group(reference, credentials=self._credentials)
        return ResolvedGroup(
            reference=group.reference,
            digest=group.digest,
            role=group.role,
            layers=tuple(LayerRef(source=group.source, group=group.digest, **attrs.asdict(layer)) for layer in group.layers),
            env=group.config.env,
            workdir=group.config.workdir,
            user=group.config.user,
        )

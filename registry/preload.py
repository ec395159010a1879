"""Imports made early: the libraries for HTTP take a quarter of a second each, which the first environment of a node would wait for."""

from __future__ import annotations

import importlib


def preload_resolving() -> None:
    """What resolve_group() needs for a registry."""
    importlib.import_module("registry.remote")


def preload_ranges() -> None:
    """What the readers of open_ranges() need for a registry."""
    importlib.import_module("registry.http_ranges")

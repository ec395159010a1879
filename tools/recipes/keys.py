"""What an earlier result was built from, as keys that a group carries with it: so any machine can tell, and no local state
decides.

A key is a digest of the inputs that its kind of cache looks at:

    versioned   the recipe's name and version, its variables, its epoch, the digests of its base groups
    lock        the same (the version may be none), and the bytes of the lock files

A build that can say both says both, whichever it used: `versioned=sha256:… lock=sha256:…` in the manifest's annotation
`dev.weenv.build`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from tools import exits
from tools.recipes.recipe import Recipe, beside
from tools.recipes.templates import RecipeError

CacheMode = Literal["scratch", "versioned", "lock"]


def default_mode(recipe: Recipe) -> CacheMode:
    """The strictest that the recipe gives reason for."""
    return "lock" if recipe.cache.locks else "versioned" if recipe.version is not None else "scratch"


def check_mode(mode: CacheMode, recipe: Recipe) -> None:
    """CommandError when the recipe does not say what the mode looks at."""
    if mode == "versioned" and recipe.version is None:
        raise exits.CommandError("--cache versioned: expected a recipe with a 'version', received one without", exits.USAGE)
    if mode == "lock" and not recipe.cache.locks:
        raise exits.CommandError("--cache lock: expected a recipe with 'locks' in [cache], received one without", exits.USAGE)


def build_keys(recipe: Recipe, directory: Path, base_digests: Sequence[str]) -> dict[CacheMode, str]:
    """The key of each kind of cache that the recipe has reason for. RecipeError, OSError."""
    inputs: dict[str, Any] = {
        "name": recipe.name,
        "version": recipe.version,
        "variables": recipe.variables,
        "epoch": recipe.epoch,
        "base": list(base_digests),
    }
    keys: dict[CacheMode, str] = {}
    if recipe.version is not None:
        keys["versioned"] = _digest(inputs)
    if recipe.cache.locks:
        keys["lock"] = _digest({**inputs, "locks": _lock_digests(recipe, directory)})
    return keys


def _lock_digests(recipe: Recipe, directory: Path) -> list[tuple[str, str]]:
    digests = []
    for number, name in enumerate(recipe.cache.locks):
        path = beside(directory, name, f"cache.locks[{number}]")
        if not path.is_file():
            raise RecipeError(f"cache.locks[{number}]: expected a file, received '{name}', which is something else")
        with path.open("rb") as file:
            digests.append((name, hashlib.file_digest(file, "sha256").hexdigest()))
    return digests


def _digest(inputs: Mapping[str, Any]) -> str:
    return f"sha256:{hashlib.sha256(msgspec.json.encode(inputs, order='sorted')).hexdigest()}"


def keys_text(keys: Mapping[CacheMode, str]) -> str | None:
    """The keys as a group carries them; None when there are none."""
    return " ".join(f"{mode}={key}" for mode, key in sorted(keys.items())) or None


def has_key(text: str | None, mode: CacheMode, keys: Mapping[CacheMode, str]) -> bool:
    """Whether a group was built from the same inputs, as far as this kind of cache looks."""
    return mode in keys and f"{mode}={keys[mode]}" in (text or "").split()

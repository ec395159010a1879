"""Patterns of paths: what a recipe leaves out of its layer."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence

from tools.recipes.templates import RecipeError

_WILDCARDS = re.compile(rb"(\*\*/)|(/\*\*\Z)|(\*\*)|(\*)|(\?)|([^*?]+)", re.DOTALL)
_MEANINGS = (rb"(?:[^/]+/)*", rb"/.+", rb".*", rb"[^/]*", rb"[^/]")


def matcher(patterns: Sequence[str]) -> Callable[[bytes], bool]:
    """Whether one of the patterns means a path, or a directory that it is in.

    `*` and `?` stand for characters of one name, `**` for names, also none: `tmp/**` is all that is in `tmp`, `**/*.log`
    is every such file. Patterns begin at the root, with a slash or without; the paths given have none in front.
    RecipeError names `exclude` for a pattern that means no path.
    """
    for number, pattern in enumerate(patterns):
        why = _means_nothing(pattern)
        if why is not None:
            raise RecipeError(f"exclude[{number}]: expected a pattern of paths below the root, received {pattern[:200]!r}: {why}")
    whole = re.compile(b"|".join(b"(?:%s)(?:/.*)?" % _translated(pattern) for pattern in patterns), re.DOTALL)
    return lambda path: bool(patterns) and whole.fullmatch(path) is not None


def _means_nothing(pattern: str) -> str | None:
    """Why no path can be meant; None when some can."""
    names = pattern.strip("/").split("/")
    if names == [""]:
        return "it has no name"
    if "" in names:
        return "a name is empty"
    if "." in names or ".." in names:
        return "no file is called '.' or '..'"
    if any(name.startswith(".wh.") for name in names):
        return "a removal is meant by the name of what it removes"
    if pattern.count("[") != pattern.count("]"):
        return "a bracket without its other half; brackets stand for themselves, and '?' for any character"
    return None


def _translated(pattern: str) -> bytes:
    def meaning(found: re.Match[bytes]) -> bytes:
        assert found.lastindex is not None  # the groups leave nothing out
        return _MEANINGS[found.lastindex - 1] if found.lastindex <= len(_MEANINGS) else re.escape(found[0])

    return _WILDCARDS.sub(meaning, os.fsencode(pattern).strip(b"/"))

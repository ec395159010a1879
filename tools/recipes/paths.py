"""Patterns of paths: what a recipe leaves out of its layer."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence

_WILDCARDS = re.compile(rb"(\*\*/)|(/\*\*\Z)|(\*\*)|(\*)|(\?)|([^*?]+)", re.DOTALL)
_MEANINGS = (rb"(?:[^/]+/)*", rb"/.+", rb".*", rb"[^/]*", rb"[^/]")


def matcher(patterns: Sequence[str]) -> Callable[[bytes], bool]:
    """Whether one of the patterns means a path, or a directory that it is in.

    `*` and `?` stand for characters of one name, `**` for names, also none: `tmp/**` is all that is in `tmp`, `**/*.log`
    is every such file. Patterns begin at the root, with a slash or without; the paths given have none in front.
    """
    whole = re.compile(b"|".join(b"(?:%s)(?:/.*)?" % _translated(pattern) for pattern in patterns), re.DOTALL)
    return lambda path: bool(patterns) and whole.fullmatch(path) is not None


def _translated(pattern: str) -> bytes:
    def meaning(found: re.Match[bytes]) -> bytes:
        assert found.lastindex is not None  # the groups leave nothing out
        return _MEANINGS[found.lastindex - 1] if found.lastindex <= len(_MEANINGS) else re.escape(found[0])

    return _WILDCARDS.sub(meaning, os.fsencode(pattern).strip(b"/"))

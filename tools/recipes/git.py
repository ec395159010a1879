"""`[git] fix`: the indexes of the work trees that a build made, repaired to fit the files as they are packed."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from layerformat import Kind, Layer, export_tar, read_tar
from registry import push_group, resolve_group
from tools.check.filesystem import deep_trees
from tools.check.git_repair import RepairLayer, repair_layer
from tools.check.git_repositories import find_repositories
from tools.check.opening import open_plan
from tools.recipes.layer import Members
from weefs.merge import View

if TYPE_CHECKING:
    from registry import Credentials, Group


def repair_indexes(layer: Path, base: Sequence[Group], scratch: Path, credentials: Credentials | None) -> tuple[RepairLayer, Members]:
    """What was repaired of the work trees that a layer brings on top of `base`, and the files that change by it.

    The plan is looked at whole: a step may have changed a repository of a group below. FormatError, RegistryError and its
    kinds, OSError.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as layout:
        built = resolve_group(push_group(f"oci:{layout}:built", [layer]))
        with open_plan(base, built, credentials) as plan, deep_trees():
            view = View(plan.layers)
            repair = repair_layer(plan, view, find_repositories(view))
    return repair, _members(repair.data) if repair.data is not None else {}


def _members(layer: bytes) -> Members:
    tar = io.BytesIO()
    with Layer.open(io.BytesIO(layer)) as opened:
        export_tar(opened, tar)
    tar.seek(0)
    return {entry.path: (entry, data.read(entry.size)) for entry, data in read_tar(tar) if entry.kind is Kind.REGULAR}

"""Which layers of an image go to which group: `base=0-3`, `task=4,5`, `harness=6-`, `NAME=all`."""

from __future__ import annotations

import re
from collections.abc import Sequence

import attrs

from registry.errors import RegistryError

_NAME = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
_PART = re.compile(r"(\d{1,9})(?:(-)(\d{1,9})?)?")


class SplitError(RegistryError):
    """A split that is not one: the groups do not hold every layer once, in its order."""


@attrs.frozen
class GroupSpec:
    """One `--group` as it is written: `parts` are first and last layer, the last None for "to the top"."""

    name: str
    parts: tuple[tuple[int, int | None], ...]


def parse_spec(text: str) -> GroupSpec:
    """`NAME=N`, `NAME=N-M`, `NAME=N-`, these with commas between, or `NAME=all`. SplitError."""
    name, separator, spec = text.partition("=")
    if not separator or not _NAME.fullmatch(name):
        raise SplitError(f"'{text}': expected NAME=LAYERS with a name of lower case, digits and '.', '_', '-' between")
    if spec == "all":
        return GroupSpec(name, ((0, None),))
    parts = []
    for part in spec.split(","):
        match = _PART.fullmatch(part)
        if not match:
            raise SplitError(f"'{text}': expected layers as 0-3, 4,5, 6- or all, received '{part}'")
        first = int(match[1])
        last = (int(match[3]) if match[3] else None) if match[2] else first
        if last is not None and last < first:
            raise SplitError(f"'{text}': expected the lower number first, received '{part}'")
        parts.append((first, last))
    return GroupSpec(name, tuple(parts))


def split_layers(specs: Sequence[GroupSpec], count: int) -> list[range]:
    """The layers of each group of an image of `count` layers, numbered from the base, 0.

    Every layer is in one group, and the groups are in the order of their layers, base first. SplitError says which
    layer is in none or in two, or which group is out of order.
    """
    names = [spec.name for spec in specs]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise SplitError(f"expected one --group for each name, received more for {', '.join(duplicates)}")
    owners: dict[int, str] = {}
    chosen = []
    for spec in specs:
        layers = [layer for first, last in spec.parts for layer in _expand(spec.name, first, last, count)]
        for layer in layers:
            if layer in owners:
                again = "twice" if owners[layer] == spec.name else f"and in {owners[layer]}"
                raise SplitError(f"layer {layer} is in {spec.name} {again}; expected every layer in one group, once")
            owners[layer] = spec.name
        chosen.append(layers)
    if missing := [layer for layer in range(count) if layer not in owners]:
        number = ", ".join(map(str, missing))
        raise SplitError(f"layers in no group: {number}; expected each of the image's {count} (0-{count - 1}) in one")
    for spec, layers, expected in zip(specs, chosen, _consecutive(chosen), strict=True):
        if layers != list(expected):
            raise SplitError(
                f"{spec.name}: expected neighbouring layers in their order, groups from the base up, here "
                f"{_shown(expected)}; received {', '.join(map(str, layers))}"
            )
    return list(_consecutive(chosen))


def _expand(name: str, first: int, last: int | None, count: int) -> range:
    highest = first if last is None else last
    if highest >= count:
        raise SplitError(f"{name}: the image has {count} layers (0-{count - 1}); received layer {highest}")
    return range(first, count if last is None else last + 1)


def _consecutive(chosen: Sequence[Sequence[int]]) -> list[range]:
    """Ranges as long as what was chosen, back to back from 0."""
    ends = [sum(map(len, chosen[: number + 1])) for number in range(len(chosen))]
    return [range(end - len(layers), end) for end, layers in zip(ends, chosen, strict=True)]


def _shown(layers: range) -> str:
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"

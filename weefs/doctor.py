"""What is wrong with a node, found by doing what it does: `weenv node doctor` asks for a list of checks.

A check of a source fetches a real range, by the node's own way there: the last bytes of a layer, whose contents are known.
"""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import Awaitable, Callable, Iterable

from layerformat import FormatError, decode_footer
from registry import RangeReader, RegistryError
from weefs.cachedir import LayerRecord
from weefs.protocol import Check
from weefs.room import Usage

FOOTER_SIZE = 80


async def check_sources(
    layers: Iterable[LayerRecord], reader: Callable[[str], Awaitable[RangeReader]], release: Callable[[str], Awaitable[None]]
) -> list[Check]:
    """One layer of each source, all at once. `reader` and `release`: as DataPlane counts them."""
    samples = {layer.source: layer for layer in layers}
    return await asyncio.gather(*(_check_source(layer, reader, release) for layer in samples.values()))


async def _check_source(
    layer: LayerRecord, reader: Callable[[str], Awaitable[RangeReader]], release: Callable[[str], Awaitable[None]]
) -> Check:
    name = f"source {layer.source}"
    begin_s = time.monotonic()
    try:
        opened = await reader(layer.source)
        try:
            data = await opened.read(layer.digest, layer.size_bytes - FOOTER_SIZE, FOOTER_SIZE)
        finally:
            await release(layer.source)
        decode_footer(data, blob_size=layer.size_bytes)
    except (RegistryError, FormatError) as error:
        return Check(name=name, ok=False, detail=str(error), took_s=time.monotonic() - begin_s)
    took_s = time.monotonic() - begin_s
    return Check(name=name, ok=True, detail=f"the last {FOOTER_SIZE} bytes of {layer.digest[:19]}: right", took_s=took_s)


def check_cache(usage: Usage) -> Check:
    """Whether what is fetched can be kept."""
    room = usage.capacity - usage.used
    said = f"{usage.used} of {usage.capacity} bytes"
    if usage.capacity == 0:
        return Check(name="cache", ok=False, detail="its filesystem has no room: what is fetched is served and not kept")
    if usage.idle > usage.capacity * 0.9:
        said += ", nearly all unused layers and metadata; `weenv cache gc`, or a larger cache_size"
        return Check(name="cache", ok=False, detail=said)
    return Check(name="cache", ok=room >= 0, detail=said)


def check_descriptors() -> Check:
    """Whether the data plane may open as many files as it needs."""
    used = len(os.listdir("/proc/self/fd")) - 1
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return Check(name="descriptors", ok=used < limit * 0.8, detail=f"{used} of {limit} in use")

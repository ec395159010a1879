"""A registry that fails in all the ways that registries do, under readers that compare every byte: what they saw while it failed, and
whether it worked again by itself afterwards.

Used by tests/test_registry_outages.py with short deadlines, and by bench/faults.py for the table.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import attrs
import msgspec
from aiohttp import web
from plane_harness import Mounted, layers_of, mounted
from registry_fixture import CHUNK, free_port, make_layer, run_server
from strategies import make_content

from registry import Credentials, push_group, resolve_group
from weefs.fetch import FetchPolicy
from weefs.protocol import Layer

CHUNKS = 48
READS = 12
"""While it fails; as many are read before, and all afterwards."""
SLOW_BYTES_PER_S = 8 << 10


@attrs.define
class Failing:
    """A registry with one blob. `fail` answers in its place while it is set."""

    blob: bytes
    digest: str
    fail: Callable[[Failing, web.Request], Awaitable[web.StreamResponse | None]] | None = None
    token: int = 0
    """The one that is good; 0: none is needed."""
    signature: int = 0
    """Of the place that it redirects to; 0: it does not."""
    requests: int = 0

    def slice(self, request: web.Request) -> tuple[int, int]:
        wanted = request.http_range
        return wanted.start or 0, wanted.stop or len(self.blob)

    def right(self, request: web.Request) -> web.Response:
        begin, end = self.slice(request)
        return web.Response(status=206, body=self.blob[begin:end], headers=self.headers(begin, end))

    def headers(self, begin: int, end: int) -> dict[str, str]:
        return {"Content-Range": f"bytes {begin}-{end - 1}/{len(self.blob)}"}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        if request.path == "/token":
            return web.json_response({"token": f"t{self.token}", "expires_in": 3600})
        if self.fail is not None:
            answer = await self.fail(self, request)
            if answer is not None:
                return answer
        if self.token and request.headers.get("Authorization") != f"Bearer t{self.token}":
            challenge = f'Bearer realm="http://{request.host}/token",service="s",scope="repository:repo:pull"'
            return web.Response(status=401, headers={"WWW-Authenticate": challenge})
        if self.signature and request.path != "/storage":
            return web.Response(status=307, headers={"Location": f"http://localhost:{request.url.port}/storage?s={self.signature}"})
        if request.path == "/storage" and request.query["s"] != str(self.signature):
            return web.Response(status=403)
        return self.right(request)


Fail = Callable[[Failing, web.Request], Awaitable[web.StreamResponse | None]]


def status(code: int, **headers: str) -> Fail:
    async def fail(registry: Failing, request: web.Request) -> web.StreamResponse:
        return web.Response(status=code, headers={name.replace("_", "-"): value for name, value in headers.items()})

    return fail


async def abort(registry: Failing, request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def stall(registry: Failing, request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def stall_midway(registry: Failing, request: web.Request) -> web.StreamResponse:
    begin, end = registry.slice(request)
    response = web.StreamResponse(status=206, headers=registry.headers(begin, end) | {"Content-Length": str(end - begin)})
    await response.prepare(request)
    await response.write(registry.blob[begin : (begin + end) // 2])
    await asyncio.Event().wait()
    raise AssertionError


async def short(registry: Failing, request: web.Request) -> web.StreamResponse:
    """Fewer bytes than it promises, then the end."""
    begin, end = registry.slice(request)
    response = web.StreamResponse(status=206, headers=registry.headers(begin, end) | {"Content-Length": str(end - begin)})
    await response.prepare(request)
    await response.write(registry.blob[begin : end - 7])
    assert request.transport is not None
    request.transport.abort()
    return response


async def shorter(registry: Failing, request: web.Request) -> web.StreamResponse:
    """A body that is whole for HTTP, and not what the range says."""
    begin, end = registry.slice(request)
    return web.Response(status=206, headers=registry.headers(begin, end), body=registry.blob[begin : end - 7])


async def other_range(registry: Failing, request: web.Request) -> web.StreamResponse:
    begin, end = registry.slice(request)
    return web.Response(status=206, headers=registry.headers(0, end - begin), body=registry.blob[: end - begin])


async def whole(registry: Failing, request: web.Request) -> web.StreamResponse:
    return web.Response(body=registry.blob)


async def damaged(registry: Failing, request: web.Request) -> web.StreamResponse:
    begin, end = registry.slice(request)
    body = bytearray(registry.blob[begin:end])
    for at in range(0, len(body), 4096):  # of every chunk
        body[at] ^= 1
    return web.Response(status=206, headers=registry.headers(begin, end), body=bytes(body))


async def slow(registry: Failing, request: web.Request) -> web.StreamResponse:
    begin, end = registry.slice(request)
    response = web.StreamResponse(status=206, headers=registry.headers(begin, end) | {"Content-Length": str(end - begin)})
    await response.prepare(request)
    for at in range(begin, end, SLOW_BYTES_PER_S // 8):
        await response.write(registry.blob[at : min(end, at + SLOW_BYTES_PER_S // 8)])
        await asyncio.sleep(1 / 8)
    return response


def first_of_two(fail: Fail) -> Fail:
    """Every other request."""

    async def sometimes(registry: Failing, request: web.Request) -> web.StreamResponse | None:
        return await fail(registry, request) if registry.requests % 2 else None

    return sometimes


async def new_token(registry: Failing, request: web.Request) -> web.StreamResponse | None:
    """The token that all have has ended."""
    registry.token = 2
    return None


async def new_signature(registry: Failing, request: web.Request) -> web.StreamResponse | None:
    """So has the address that all were sent to."""
    registry.signature = 2
    return None


@attrs.frozen
class Outage:
    """`passes`: it ends by itself before the deadline of a chunk, and readers must all get their bytes. Else they get them or EIO, and when
    it `must_fail`, EIO.
    """

    name: str
    fail: Fail | None
    """None: nobody listens."""
    passes: bool
    must_fail: bool = False
    needs_token: bool = False
    redirects: bool = False


def outages() -> Iterator[Outage]:
    for name, fail in (
        ("nobody listens", None),
        ("connections are reset", abort),
        ("no answer", stall),
        ("half of an answer", stall_midway),
        ("500", status(500)),
        ("503", status(503)),
        ("429, Retry-After 1", status(429, Retry_After="1")),
    ):
        yield Outage(f"{name}, for a moment", fail, passes=True)
        yield Outage(f"{name}, beyond the deadline", fail, passes=False, must_fail=True)
    yield Outage("every other request is reset", first_of_two(abort), passes=True)
    yield Outage("every other body is cut short", first_of_two(short), passes=True)
    yield Outage("bodies are cut short", short, passes=False, must_fail=True)
    yield Outage("bodies are too short for their range", shorter, passes=False, must_fail=True)
    yield Outage("another range than asked for", other_range, passes=False, must_fail=True)
    yield Outage("the whole blob instead of a range", whole, passes=True)
    yield Outage("every other answer is damaged", first_of_two(damaged), passes=False)
    yield Outage("every answer is damaged", damaged, passes=False, must_fail=True)
    yield Outage("slower than the deadline allows", slow, passes=False, must_fail=True)
    yield Outage("404", status(404), passes=False, must_fail=True)
    yield Outage("403", status(403), passes=False, must_fail=True)
    yield Outage("the token has ended", new_token, passes=True, needs_token=True)
    yield Outage("the signed address has ended", new_signature, passes=True, redirects=True)


@attrs.define
class Seen:
    """What readers saw while the registry failed, and afterwards. Waits in seconds."""

    right: int = 0
    failed: int = 0
    wrong: int = 0
    faults: int = 0
    longest_s: float = 0.0
    right_afterwards: int = 0


def a_layer(directory: Path) -> tuple[Layer, bytes, bytes]:
    """Its description, its blob, and the contents of its file `f`."""
    content = make_content(CHUNK * CHUNKS, 3, False)
    file = make_layer(directory, "layer", {"f": content})
    push_group(f"oci:{directory}/layout:t", [file])
    (layer,) = layers_of(resolve_group(f"oci:{directory}/layout:t"))
    return layer, file.read_bytes(), content


async def read_chunk(mount: Mounted, content: bytes, chunk: int, seen: Seen) -> bool:
    """Whether the bytes came."""
    begin_s = time.monotonic()
    try:
        data = await mount.read("f", chunk * CHUNK, CHUNK)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        seen.failed += 1
        return False
    finally:
        seen.longest_s = max(seen.longest_s, time.monotonic() - begin_s)
    if data == content[chunk * CHUNK :][:CHUNK]:
        seen.right += 1
        return True
    seen.wrong += 1
    return False


async def _exercise(directory: Path, layer: Layer, content: bytes, registry: Failing, outage: Outage, policy: FetchPolicy) -> Seen:
    port = free_port()
    credentials = Credentials(pairs={f"127.0.0.1:{port}": ("user", "password")})
    seen, calm = Seen(), Seen()
    with contextlib.ExitStack() as up:
        up.enter_context(run_server(registry.handle, port))
        there = msgspec.structs.replace(layer, source=f"http://127.0.0.1:{port}/repo")
        async with mounted(directory, [there], policy=policy, credentials=credentials) as mount:
            for chunk in range(READS):
                assert await read_chunk(mount, content, chunk, calm)
            if outage.fail is None:
                up.close()
            registry.fail = outage.fail
            reads = asyncio.gather(*(read_chunk(mount, content, chunk, seen) for chunk in range(READS, 2 * READS)))
            if outage.passes:
                await asyncio.sleep(policy.deadline_s / 4)
            else:
                await reads
            registry.fail = None
            if outage.fail is None:
                up.enter_context(run_server(registry.handle, port))
            await reads
            for chunk in range(CHUNKS):
                seen.right_afterwards += await read_chunk(mount, content, chunk, calm)
            seen.wrong += calm.wrong
            seen.faults = len(mount.faults)
    return seen


def exercise(directory: Path, layer: Layer, blob: bytes, content: bytes, outage: Outage, *, deadline_s: float) -> Seen:
    """Reads before, during and after one outage. The mount and its cache are its own, in `directory`."""
    digest = f"sha256:{hashlib.sha256(blob).hexdigest()}"
    registry = Failing(blob, digest, token=int(outage.needs_token), signature=int(outage.redirects))
    policy = FetchPolicy(deadline_s=deadline_s, read_ahead_chunks=0)
    return asyncio.run(_exercise(directory, layer, content, registry, outage, policy))


def failures(outage: Outage, seen: Seen) -> list[str]:
    """What was not as it must be."""
    found = []
    if seen.wrong:
        found.append(f"{seen.wrong} reads were wrong")
    if seen.right_afterwards != CHUNKS:
        found.append(f"{CHUNKS - seen.right_afterwards} reads failed when the registry was well again")
    if outage.passes and seen.failed:
        found.append(f"{seen.failed} reads failed, although it passed")
    if outage.must_fail and seen.right:
        found.append(f"{seen.right} reads succeeded: it did not fail")
    if seen.faults != seen.failed:
        found.append(f"{seen.failed} reads failed, {seen.faults} faults were reported")
    return found

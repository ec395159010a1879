"""Clusters for tests: several data planes in one process, each behind a mount of its own, that are peers; and peers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import aiohttp
import attrs
import msgspec
from aiohttp import web
from plane_harness import QUICK, Mounted, mounted
from registry_fixture import Handler, free_port, run_server

from weefs.fetch import FetchPolicy
from weefs.peerclient import LAYER_HEADER, PEER_HEADER, encode_layer
from weefs.peerconfig import PeersConfig
from weefs.peering import Peering
from weefs.protocol import Layer

GONE = "127.0.0.1:9"
"""A member that is not there: nobody listens on that port."""


def addresses(n: int) -> list[str]:
    """Loopback addresses that nobody listens on, all different."""
    found: set[str] = set()
    while len(found) < n:
        found.add(f"127.0.0.1:{free_port()}")
    return sorted(found)


def peering(mount: Mounted) -> Peering:
    assert mount.plane.peering is not None
    return mount.plane.peering


@contextlib.asynccontextmanager
async def node(
    directory: Path, layers: list[Layer], config: PeersConfig, *, policy: FetchPolicy = QUICK, keep_cache: bool = False
) -> AsyncIterator[Mounted]:
    """A node that serves its peers."""
    async with mounted(directory, layers, policy=policy, peers=config, keep_cache=keep_cache) as mount:
        await peering(mount).listening.wait()
        yield mount


@contextlib.asynccontextmanager
async def cluster(
    directory: Path, layers: Sequence[list[Layer]], *, more: Sequence[str] = (), policy: FetchPolicy = QUICK, **settings: object
) -> AsyncIterator[list[Mounted]]:
    """A node for each list of layers; all are members, and `more`, too. `settings`: of each PeersConfig."""
    names = addresses(len(layers))
    template = PeersConfig(listen="", members=[*names, *more])
    async with contextlib.AsyncExitStack() as stack:
        nodes = []
        for number, (name, of) in enumerate(zip(names, layers, strict=True)):
            config = msgspec.structs.replace(template, listen=name, **settings)
            nodes.append(await stack.enter_async_context(node(directory / f"node{number}", of, config, policy=policy)))
        yield nodes


@contextlib.contextmanager
def misbehaving(handler: Handler) -> Iterator[str]:
    """A peer that answers in its own way; its address."""
    with run_server(handler) as address:
        yield address


@attrs.frozen
class Answered:
    status: int
    body: bytes
    headers: dict[str, str]


async def ask(
    address: str, digest: str, offset: int, size: int, *, layer: Layer | None = None, name: str = "", token: str | None = None
) -> Answered:
    """One request as a peer makes it."""
    headers = {"Range": f"bytes={offset}-{offset + size - 1}", PEER_HEADER: name}
    if layer is not None:
        headers[LAYER_HEADER] = encode_layer(layer)
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{address}/v1/layers/{digest}/stream", headers=headers) as response,
    ):
        return Answered(response.status, await response.read(), dict(response.headers))


async def read_all(mount: Mounted, files: dict[str, bytes]) -> None:
    """Reads every file at once, and compares."""
    read = await asyncio.gather(*(mount.read(name) for name in files))
    for (name, expected), got in zip(files.items(), read, strict=True):
        assert got == expected, name


async def never(_request: web.Request) -> web.StreamResponse:
    """A peer that takes a request and says nothing."""
    await asyncio.Event().wait()
    raise AssertionError


def make_certificates(directory: Path, *, days: int = 2, ca_of: Path | None = None) -> dict[str, str]:
    """A CA, or that of another directory, and a certificate of it for 127.0.0.1, which has ended if `days` are less than 0: `peers_tls_*`,
    without the prefix.
    """
    directory.mkdir()
    ca = directory if ca_of is None else ca_of

    def run(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=directory, check=True, capture_output=True)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    if ca_of is None:
        run("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=test CA")
    run("req", *new, "-keyout", "node.key", "-out", "node.csr", "-subj", "/CN=node")
    (directory / "extensions").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    signing = ("-CA", f"{ca}/ca.pem", "-CAkey", f"{ca}/ca.key", "-CAcreateserial", "-days", str(days), "-extfile", "extensions")
    run("x509", "-req", "-in", "node.csr", *signing, "-out", "node.pem")
    return {"tls_cert": str(directory / "node.pem"), "tls_key": str(directory / "node.key"), "tls_ca": str(ca / "ca.pem")}

"""Registries for tests: Debian's docker-registry as a process, and a server between it and the client that counts what
passes and can be told to misbehave.

`run_registry` and `run_proxy` are plain context managers; a test that needs another kind of server gives `run_server` a
handler. What a test starts here is gone when its block ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp
from aiohttp import web
from attrs import define, field, frozen

from layerformat import convert

PYTHON = sys.executable
USER, PASSWORD = "packager", "pass:word"
CHUNK = 65536

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Fault = Callable[[web.Request], Awaitable[web.StreamResponse | None]]
"""Answers in the registry's place, or None to let the request through."""


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# docker-registry


@frozen
class RegistryServer:
    """A running docker-registry: its `HOST:PORT`, and where it stores."""

    host: str
    storage: Path

    def blob_file(self, digest: str) -> Path:
        """Where a blob's bytes are on its disk, to be damaged."""
        value = digest.removeprefix("sha256:")
        return self.storage / "docker/registry/v2/blobs/sha256" / value[:2] / value / "data"


@contextlib.contextmanager
def run_registry(directory: Path, *, password_file: bool = False, port: int | None = None) -> Iterator[RegistryServer]:
    """docker-registry on a loopback port, storing below `directory` (made if missing); with `password_file`, for
    USER only."""
    directory.mkdir(parents=True, exist_ok=True)
    storage = directory / "storage"
    host = f"127.0.0.1:{port or free_port()}"
    config: dict[str, object] = {
        "version": 0.1,
        "log": {"accesslog": {"disabled": True}, "level": "info"},
        "storage": {"filesystem": {"rootdirectory": str(storage)}, "delete": {"enabled": True}},
        "http": {"addr": host},
    }
    if password_file:
        made = subprocess.run(["htpasswd", "-Bbn", USER, PASSWORD], stdout=subprocess.PIPE, check=True)
        (directory / "htpasswd").write_bytes(made.stdout)
        config["auth"] = {"htpasswd": {"realm": "weenv", "path": str(directory / "htpasswd")}}
    (directory / "config.yml").write_text(json.dumps(config))  # JSON is YAML
    process = subprocess.Popen(
        ["docker-registry", "serve", directory / "config.yml"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={"PATH": os.environ["PATH"], "OTEL_TRACES_EXPORTER": "none"},
    )
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if b"listening on" in line:
            break
    drain = threading.Thread(target=process.stderr.read)
    drain.start()
    try:
        assert process.poll() is None, b"".join(said).decode()
        yield RegistryServer(host, storage)
    finally:
        process.terminate()
        process.wait()
        drain.join()
        process.stderr.close()


def auth_file(path: Path, host: str, user: str = USER, password: str = PASSWORD) -> Path:
    """What `docker login` writes."""
    import base64

    entry = {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"auths": {host: entry}}))
    return path


# servers of our own


def answering(make: Callable[[web.Request], web.StreamResponse]) -> Handler:
    """A handler that need not wait for anything."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return make(request)

    return handle


@contextlib.contextmanager
def run_server(handler: Handler, port: int | None = None) -> Iterator[str]:
    """An HTTP server in a thread of its own; its `HOST:PORT`."""
    started: list[str] = []
    ready = threading.Event()
    stop: list[Callable[[], object]] = []

    async def serve() -> None:
        application = web.Application(client_max_size=1 << 30)
        application.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(application, shutdown_timeout=0.2)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", port or free_port())
            await site.start()
            ended = asyncio.Event()
            loop = asyncio.get_running_loop()
            stop.append(lambda: loop.call_soon_threadsafe(ended.set))
            started.append(f"127.0.0.1:{site._port}")
            ready.set()
            await ended.wait()
        finally:
            ready.set()
            await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    ready.wait()
    try:
        yield started[0]
    finally:
        for call in stop:
            call()
        thread.join()


@frozen
class Seen:
    """One request as it passed: sizes of the bodies in bytes."""

    method: str
    path: str
    range: str | None
    authorization: str | None
    status: int
    sent_bytes: int
    received_bytes: int


@define
class Proxy:
    """Passes everything on to a registry, and writes down what passed."""

    host: str
    seen: list[Seen] = field(factory=list)
    fault: Fault | None = None

    def blob_reads(self) -> list[Seen]:
        return [one for one in self.seen if one.method == "GET" and "/blobs/sha256:" in one.path]

    def uploads(self) -> list[Seen]:
        return [one for one in self.seen if "/blobs/uploads/" in one.path]


@contextlib.contextmanager
def run_proxy(target: str) -> Iterator[Proxy]:
    """A counting server in front of the registry at `target` (`HOST:PORT`)."""
    proxy = Proxy("")

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        answer = await proxy.fault(request) if proxy.fault else None
        if answer is None:
            async with (
                aiohttp.ClientSession(auto_decompress=False) as session,
                session.request(
                    request.method,
                    f"http://{target}{request.raw_path}",
                    data=body or None,
                    headers={name: value for name, value in request.headers.items() if name != "Transfer-Encoding"},
                    allow_redirects=False,
                ) as received,
            ):
                kept = {n: v for n, v in received.headers.items() if n not in ("Transfer-Encoding", "Connection")}
                data = await received.read()
                if request.method != "HEAD":
                    kept.pop("Content-Length", None)
                answer = web.Response(status=received.status, headers=kept, body=data)
        returned = answer.body if isinstance(answer, web.Response) and isinstance(answer.body, bytes) else b""
        proxy.seen.append(
            Seen(
                method=request.method,
                path=request.path,
                range=request.headers.get("Range"),
                authorization=request.headers.get("Authorization"),
                status=answer.status,
                sent_bytes=len(body),
                received_bytes=0 if request.method == "HEAD" else len(returned),
            )
        )
        return answer

    with run_server(handle) as host:
        proxy.host = host
        yield proxy


# layers


def make_layer(directory: Path, name: str, files: dict[str, bytes]) -> Path:
    """A layer file of a few files, in chunks of CHUNK bytes."""
    tree = directory / f"{name}.d"
    tree.mkdir(parents=True)
    for path, data in files.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes(data)
        os.utime(tree / path, (1, 1))
    os.utime(tree, (1, 1))
    layer = directory / f"{name}.weenv"
    convert(tree, layer, chunk_size=CHUNK)
    return layer

"""Registries that misbehave, as pushing, resolving and pulling meet them: what is retried, refused, and kept secret."""

from __future__ import annotations

import hashlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web
from registry_fixture import answering, make_layer, run_proxy, run_registry, run_server

from registry import (
    Credentials,
    IntegrityError,
    RegistryError,
    Unreachable,
    pull_blob,
    push_group,
    remote,
    resolve_group,
)

BLOB = bytes(range(256)) * 400
DIGEST = f"sha256:{hashlib.sha256(BLOB).hexdigest()}"


def credentials_of(host: str) -> Credentials:
    return Credentials(pairs={host: ("user", "password")})


# whole blobs and manifests


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Retries without the wait for them; the waits, seconds."""
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    return waits


def test_what_may_pass_is_tried_again_and_not_for_ever(quick: list[float]) -> None:
    count: Counter[str] = Counter()

    def later(request: web.Request) -> web.Response:
        count["requests"] += 1
        return web.Response(status=503, headers={"Retry-After": "3"} if count["requests"] == 1 else {})

    with run_server(answering(later)) as host, pytest.raises(Unreachable, match="status 503"):
        resolve_group(f"{host}/repo")
    assert count["requests"] == remote.ATTEMPTS
    assert quick == [3.0, 0.4, 0.8]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405])
def test_what_does_not_pass_is_not_tried_again(quick: list[float], status: int) -> None:
    with run_server(answering(lambda _: web.Response(status=status))) as host, pytest.raises(RegistryError):
        resolve_group(f"{host}/repo")
    assert quick == []


@pytest.mark.parametrize(
    ("headers", "sentence"),
    [
        ({"Docker-Content-Digest": f"sha256:{'0' * 64}"}, "expected a manifest with sha256:0000"),
        ({}, "expected an OCI image"),
    ],
)
def test_a_manifest_that_is_not_what_the_registry_says_is_refused(headers: dict[str, str], sentence: str) -> None:
    handler = answering(lambda _: web.Response(body=b"\xff{", headers=headers))
    with run_server(handler) as host, pytest.raises(IntegrityError, match=sentence):
        resolve_group(f"{host}/repo")


def test_a_manifest_without_end_is_not_read_to_it() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * (1 << 20))

    with run_server(endless) as host, pytest.raises(IntegrityError, match="expected at most 4194304 bytes"):
        resolve_group(f"{host}/repo")


def test_a_download_that_ends_early_is_tried_again_and_leaves_nothing(quick: list[float], tmp_path: Path) -> None:
    count: Counter[str] = Counter()

    async def cut(request: web.Request) -> web.StreamResponse:
        count["requests"] += 1
        if count["requests"] == 3:
            return web.Response(body=BLOB)
        response = web.StreamResponse(headers={"Content-Length": str(len(BLOB))})
        await response.prepare(request)
        await response.write(BLOB[:1000])
        assert request.transport is not None
        request.transport.close()
        return response

    with run_server(cut) as host:
        pull_blob(f"http://{host}/repo", DIGEST, len(BLOB), tmp_path / "blob")
        assert (tmp_path / "blob").read_bytes() == BLOB
        count["requests"] = -100
        with pytest.raises(Unreachable):
            pull_blob(f"http://{host}/repo", DIGEST, len(BLOB), tmp_path / "never")
    assert not (tmp_path / "never").exists()


# pushing


def through(
    *faults: Callable[[web.Request], web.Response | None],
) -> Callable[[web.Request], Awaitable[web.Response | None]]:
    """The first answer of several, one request at a time."""

    async def handle(request: web.Request) -> web.Response | None:
        return next((found for fault in faults if (found := fault(request)) is not None), None)

    return handle


def test_an_upload_that_fails_once_succeeds(quick: list[float], tmp_path: Path) -> None:
    layer = make_layer(tmp_path, "layer", {"f": b"f" * 1000})
    failed: Counter[str] = Counter()

    def once(request: web.Request) -> web.Response | None:
        failed[request.method] += 1
        return web.Response(status=502) if failed[request.method] == 1 else None

    with run_registry(tmp_path / "r") as server, run_proxy(server.host) as proxy:
        proxy.fault = through(once)
        pinned = push_group(f"{proxy.host}/repo:t", [layer])
        assert resolve_group(pinned).layers[0].size_bytes == layer.stat().st_size
        assert {one.method for one in proxy.seen if one.status == 502} == {"HEAD", "POST", "PUT", "GET"}
    assert len(quick) == 4


def test_a_token_for_an_upload_that_expires_in_the_middle_is_renewed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The chunked upload, in front of a registry that forgets its token after each of its uses."""
    monkeypatch.setattr(remote, "UPLOAD_PIECE_BYTES", 1000)
    layer = make_layer(tmp_path, "layer", {"f": random.Random(1).randbytes(3500)})
    issued: Counter[str] = Counter()
    used: set[str] = set()

    def guard(request: web.Request) -> web.Response | None:
        if request.path == "/token":
            if request.headers.get("Authorization") != "Basic dXNlcjpwYXNzd29yZA==":
                return web.Response(status=401)
            issued["tokens"] += 1
            return web.json_response({"token": f"t{issued['tokens']}"})
        given = request.headers.get("Authorization", "")
        if given != f"Bearer t{issued['tokens']}" or given in used:
            challenge = f'Bearer realm="http://{request.host}/token",scope="repository:repo:pull,push"'
            return web.Response(status=401, headers={"WWW-Authenticate": challenge})
        used.add(given)
        return None

    with run_registry(tmp_path / "r") as server, run_proxy(server.host) as proxy:
        proxy.fault = through(guard)
        push_group(f"{proxy.host}/repo:t", [layer], credentials=credentials_of(proxy.host))
        passed = [one for one in proxy.seen if one.status < 400 and one.method == "PATCH"]
        assert len(passed) >= 4
        assert sum(one.sent_bytes for one in passed if one.status == 202) >= layer.stat().st_size
        assert resolve_group(f"{server.host}/repo:t").layers[0].size_bytes == layer.stat().st_size
    assert issued["tokens"] == len(used)


def test_an_upload_that_is_sent_elsewhere_takes_no_authorization_along(tmp_path: Path) -> None:
    layer = make_layer(tmp_path, "layer", {"f": b"f"})
    seen: list[str | None] = []

    def elsewhere(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.Response(status=201)

    with run_server(answering(elsewhere)) as other:

        def registry(request: web.Request) -> web.Response:
            if not request.headers.get("Authorization"):
                return web.Response(status=401, headers={"WWW-Authenticate": "Basic realm=r"})
            if request.method == "POST":
                return web.Response(status=202, headers={"Location": f"http://{other}/upload?state=1"})
            return web.Response(status=404 if request.method == "HEAD" else 201)

        with run_server(answering(registry)) as host:
            push_group(f"{host}/repo:t", [layer], credentials=credentials_of(host))
    assert seen == [None, None]


@pytest.mark.parametrize("status", [200, 202])
def test_an_upload_without_a_place_is_refused(status: int, tmp_path: Path) -> None:
    layer = make_layer(tmp_path, "layer", {"f": b"f"})
    statuses = {"HEAD": 404, "POST": status}
    handler = answering(lambda request: web.Response(status=statuses[request.method], text="{}"))
    with run_server(handler) as host, pytest.raises(RegistryError, match="expected an upload to be accepted"):
        push_group(f"{host}/repo:t", [layer])


def test_a_registry_that_stores_another_manifest_is_caught(tmp_path: Path) -> None:
    layer = make_layer(tmp_path, "layer", {"f": b"f"})

    def rewriting(request: web.Request) -> web.Response:
        headers = {"Docker-Content-Digest": f"sha256:{'1' * 64}"} if request.method == "PUT" else {}
        return web.Response(status=201 if request.method == "PUT" else 200, headers=headers)

    with (
        run_server(answering(rewriting)) as host,
        pytest.raises(IntegrityError, match="the registry stored sha256:1111"),
    ):
        push_group(f"{host}/repo:t", [layer])

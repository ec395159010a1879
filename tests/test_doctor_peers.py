"""`weenv node doctor` and peers: each thing that can be wrong between two nodes is found, and said as what it is."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from peer_harness import GONE, addresses, cluster, make_certificates, misbehaving, never, node, peering
from plane_harness import Mounted, layers_of, wait_until
from registry_fixture import CHUNK, RegistryServer, make_layer
from strategies import make_content

from registry import push_group, resolve_group
from weefs import doctor_peers
from weefs.doctor_peers import check_membership
from weefs.peerconfig import PeersConfig
from weefs.protocol import Check, Layer

LARGE = make_content(CHUNK * 4, 1, False)


@pytest.fixture(scope="module")
def layers(server: RegistryServer, tmp_path_factory: pytest.TempPathFactory) -> list[Layer]:
    reference = f"{server.host}/doctor:t"
    push_group(reference, [make_layer(tmp_path_factory.mktemp("layer"), "layer", {"large": LARGE})])
    return layers_of(resolve_group(reference))


async def checks(mount: Mounted) -> dict[str, Check]:
    return {check.name: check for check in await mount.plane.diagnose()}


async def told_of(directory: Path, layers: list[Layer], peer: str, **settings: object) -> Check:
    """What a node that has the layer says of this peer."""
    (name,) = addresses(1)
    config = msgspec.structs.replace(PeersConfig(listen=name, members=[name, peer]), **settings)
    async with node(directory / "n", layers, config) as mount:
        await mount.read("large")
        return (await checks(mount))[f"peer {peer}"]


def test_nodes_that_are_well(layers: list[Layer], tmp_path: Path) -> None:
    async def run() -> None:
        token = tmp_path / "token"
        token.write_text("a-token-of-both-nodes")
        tls = make_certificates(tmp_path / "tls")
        async with cluster(tmp_path, [layers, layers], token_file=str(token), **tls) as (one, two):
            peer = f"peer {peering(two).name}"
            found = await checks(one)
            assert found["peers"] == Check(name="peers", ok=True, detail=found["peers"].detail)
            assert (found[peer].ok, found[peer].detail) == (True, "answers"), "neither has anything"
            await asyncio.gather(one.read("large"), two.read("large"))
            found = await checks(one)
            assert (found[peer].ok, found[peer].detail) == (True, f"{CHUNK} bytes of {layers[0].digest[:19]}: right")

    asyncio.run(run())


def test_a_peer_that_has_nothing_is_well(layers: list[Layer], tmp_path: Path) -> None:
    async def absent(_request: web.Request) -> web.StreamResponse:
        return web.json_response({"reason": "absent", "holders": []}, status=404)

    with misbehaving(absent) as peer:
        found = asyncio.run(told_of(tmp_path, layers, peer))
    assert (found.ok, found.detail) == (True, "answers; has none of what this node has")


async def _refuses_the_token(_request: web.Request) -> web.StreamResponse:
    return web.json_response({"reason": "wrong token"}, status=401)


async def _lies(request: web.Request) -> web.StreamResponse:
    wanted = request.http_range
    assert wanted.start is not None
    headers = {"Content-Range": f"bytes {wanted.start}-{wanted.stop - 1}/{len(LARGE)}"}
    return web.Response(status=206, body=bytes(wanted.stop - wanted.start), headers=headers)


async def _other_program(_request: web.Request) -> web.StreamResponse:
    return web.Response(status=404, text="<h1>404 page not found</h1>")


async def _other_version(_request: web.Request) -> web.StreamResponse:
    return web.json_response({"reason": "expected GET /v2"}, status=400)


async def _other_clock(_request: web.Request) -> web.StreamResponse:
    return web.json_response({"reason": "absent"}, status=404, headers={"Date": "Tue, 01 Jan 2019 00:00:00 GMT"})


async def _nests_deeply(_request: web.Request) -> web.StreamResponse:
    return web.Response(status=404, body=b'{"reason": ' + b"[" * 10000)


async def _talks_much(_request: web.Request) -> web.StreamResponse:
    return web.json_response({"reason": "\x1b[2J" + "x" * (15 << 20)}, status=400)


async def _no_date(_request: web.Request) -> web.StreamResponse:
    return web.json_response({"reason": 1}, status=400, headers={"Date": "Tue, 01 Jan 99999999999999999999 00:00:00 GMT"})


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (_nests_deeply, "received 404: another version, or another program"),
        (_talks_much, "received 400: '\\x1b[2Jxxxx"),
        (_no_date, "received 400: another version, or another program"),
        (_refuses_the_token, "it refuses the token"),
        (_lies, "it lies: expected 65536 bytes at "),
        (_other_program, "received 404: another version, or another program"),
        (_other_version, "received 400: expected GET /v2: another version, or another program"),
        (_other_clock, "s behind this node's; set both by NTP"),
    ],
)
def test_a_peer_that_answers_wrongly(
    layers: list[Layer], tmp_path: Path, handler: Callable[[web.Request], Awaitable[web.StreamResponse]], said: str
) -> None:
    with misbehaving(handler) as peer:
        found = asyncio.run(told_of(tmp_path, layers, peer))
    assert not found.ok
    assert said in found.detail
    assert len(found.detail) < 1000


def test_a_peer_that_trickles_keeps_no_thread(layers: list[Layer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_peers, "LONGEST_S", 0.5)

    async def trickle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=404)
        response.content_length = 1 << 20
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b"x")
                await asyncio.sleep(0.01)
        return response

    before = {*threading.enumerate()}
    with misbehaving(trickle) as peer:
        found = asyncio.run(told_of(tmp_path, layers, peer))
        assert (found.ok, found.detail) == (False, "not done within 0.5 s")
        asyncio.run(wait_until(lambda: not any("ThreadPool" in one.name for one in {*threading.enumerate()} - before)))


def test_a_peer_that_is_gone(layers: list[Layer], tmp_path: Path) -> None:
    found = asyncio.run(told_of(tmp_path, layers, GONE))
    assert not found.ok
    assert found.detail.startswith("connection refused: nothing listens there")


def test_a_peer_that_says_nothing(layers: list[Layer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_peers, "ANSWER_S", 0.2)
    with misbehaving(never) as peer:
        found = asyncio.run(told_of(tmp_path, layers, peer))
    assert (found.ok, found.detail) == (False, "no answer within 0.2 s: a firewall, or it hangs")


def test_a_name_that_is_none(layers: list[Layer], tmp_path: Path) -> None:
    found = asyncio.run(told_of(tmp_path, layers, "none.invalid:7000"))
    assert not found.ok
    assert found.detail.startswith("its name is not known here")


def test_a_slow_peer(layers: list[Layer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer is slower than at once."""
    monkeypatch.setattr(doctor_peers, "SLOW_S", 0.0)

    async def run() -> None:
        async with cluster(tmp_path, [layers, layers]) as (one, two):
            found = (await checks(one))[f"peer {peering(two).name}"]
            assert not found.ok
            assert found.detail.startswith("slow: ")

    asyncio.run(run())


def test_a_peer_that_is_left_out(layers: list[Layer], tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, [layers, layers]) as (one, two):
            peering(one)._lied(peering(two).name, "a chunk")
            found = (await checks(one))[f"peer {peering(two).name}"]
            assert not found.ok
            assert "it sent wrong bytes 1 times lately, and is left out" in found.detail

    asyncio.run(run())


# TLS


@contextlib.asynccontextmanager
async def peer_with(directory: Path, layers: list[Layer], tls: dict[str, str]) -> AsyncIterator[str]:
    (name,) = addresses(1)
    async with node(directory / "peer", layers, msgspec.structs.replace(PeersConfig(listen=name, members=[name]), **tls)):
        yield name


def expired(directory: Path, tls: dict[str, str]) -> dict[str, str]:
    """A certificate of the same CA that was good for some days in 2020."""
    (directory / "index.txt").touch()
    (directory / "ca.cnf").write_text(
        "[ca]\ndefault_ca=it\n[it]\ndatabase=index.txt\nnew_certs_dir=.\nrand_serial=yes\ndefault_md=sha256\npolicy=any\n[any]\n"
        "commonName=supplied\n"
    )
    files = ["-config", "ca.cnf", "-cert", "ca.pem", "-keyfile", "ca.key", "-in", "node.csr", "-extfile", "extensions", "-out", "old.pem"]
    dates = ["-startdate", "20200101000000Z", "-enddate", "20200103000000Z"]
    subprocess.run(["openssl", "ca", "-batch", "-notext", *files, *dates], cwd=directory, check=True, capture_output=True)
    return tls | {"tls_cert": str(directory / "old.pem")}


def test_what_can_be_wrong_with_tls(layers: list[Layer], tmp_path: Path) -> None:
    tls, foreign = make_certificates(tmp_path / "tls"), make_certificates(tmp_path / "foreign")
    old = expired(tmp_path / "tls", tls)

    async def told(ours: dict[str, str], theirs: dict[str, str], number: int) -> str:
        async with peer_with(tmp_path / str(number), layers, theirs) as peer:
            found = await told_of(tmp_path / str(number), layers, peer, **ours)
            assert not found.ok
            return found.detail

    async def run() -> None:
        assert (await told(tls, {}, 1)).startswith("expected TLS, received something else")
        assert "does it speak TLS? This node has no peers_tls_cert" in await told({}, tls, 2)
        assert (await told(tls, foreign, 3)).startswith("its certificate is refused: ")
        said = await told(tls, old, 4)
        assert said.startswith("its certificate is refused: certificate has expired; or the clock of one of you is wrong")
        half = tls | {"tls_cert": foreign["tls_cert"], "tls_key": foreign["tls_key"]}
        assert "does it refuse this node's certificate?" in await told(half, tls, 5)

    asyncio.run(run())


# membership


def membership(listen: str, members: list[str], *, name: str | None = None, listening: bool = True) -> Check:
    return check_membership(PeersConfig(listen=listen, members=members), name or listen, members, listening=listening)


@pytest.mark.parametrize(
    ("check", "said"),
    [
        (membership("10.0.0.1:7000", ["10.0.0.1:7000", "10.0.0.2:7000"], listening=False), "cannot listen on 10.0.0.1:7000"),
        (membership("10.0.0.1:7000", ["10.0.0.1:7000"]), "nobody else is a member"),
        (membership("127.0.0.1:7000", ["127.0.0.1:7000", "10.0.0.2:7000"]), "listens on loopback only (127.0.0.1:7000), and 10.0.0.2:7000"),
        (membership("localhost:7000", ["localhost:7000", "[fd00::2]:7000"]), "listens on loopback only"),
        (membership("0.0.0.0:7000", ["10.0.0.1:7000"], name="127.0.0.1:7000"), "its name is 127.0.0.1:7000, which for 10.0.0.1:7000"),
        (membership("0.0.0.0:7000", ["10.0.0.1:7000"], name="node1:7000"), "node1:7000 is not among the 1 members"),
    ],
)
def test_a_membership_that_is_wrong(check: Check, said: str) -> None:
    assert not check.ok
    assert check.detail.startswith(said)


def test_memberships_that_are_right() -> None:
    assert membership("10.0.0.1:7000", ["10.0.0.1:7000", "10.0.0.2:7000"]).ok
    assert membership("127.0.0.1:7000", ["127.0.0.1:7000", "127.0.0.1:7001"]).ok


def test_of_many_members_some_are_asked(layers: list[Layer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_peers, "CHECKED_MAX", 2)

    async def run() -> None:
        async with cluster(tmp_path, [layers], more=[f"127.0.0.1:{port}" for port in (1, 2, 3, 4, 5)]) as (one,):
            found = await checks(one)
            assert len([name for name in found if name.startswith("peer ")]) == 2
            assert found["further peers"].detail == "3 of 5 were not asked"

    asyncio.run(run())

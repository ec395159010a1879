"""Who the members are: a list, DNS and etcd, and a node's settings for them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import dns.asyncresolver
import dns.message
import dns.rcode
import dns.resolver
import dns.rrset
import msgspec
import pytest
from etcd_fixture import Etcd, run_etcd
from plane_harness import wait_until
from registry_fixture import free_port

from envlet.dataplane import DataPlaneConfig, _command
from envlet.keeper import Kept
from tools import settings
from tools.exits import CommandError
from weefs.etcd import PREFIX, EtcdError, EtcdMembers, _lives
from weefs.members import DnsMembers, Members, Resolve, addresses_of, services_of, sources_of
from weefs.peerconfig import PeersConfig

A, B, C = "192.0.2.1:9465", "192.0.2.2:9465", "node-c.example:9465"


@contextlib.asynccontextmanager
async def following(members: Members) -> AsyncIterator[Members]:
    task = asyncio.create_task(members.run())
    try:
        yield members
    finally:
        task.cancel()
        await asyncio.wait([task])


# DNS


def test_members_come_and_go_with_the_addresses_of_a_name() -> None:
    answers: list[list[str] | OSError] = [[A, B], OSError("no such name"), [B, C, "not an address"], []]
    seen: list[frozenset[str]] = []
    left: list[frozenset[str]] = []
    over = asyncio.Event()

    async def resolve(name: str) -> list[str]:
        assert name == "peers.example"
        seen.append(members.names)
        if not answers:
            over.set()
            await asyncio.Event().wait()
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    members = Members(["192.0.2.9:1"], [DnsMembers("peers.example", resolve, every_s=0)], left.append)

    async def run() -> None:
        async with following(members):
            await over.wait()

    asyncio.run(run())
    fixed = frozenset(["192.0.2.9:1"])
    assert seen == [fixed, fixed | {A, B}, fixed | {A, B}, fixed | {B, C}, fixed]
    assert left == [frozenset([A]), frozenset([B, C])]


def test_addresses_get_the_port_of_this_node() -> None:
    assert "127.0.0.1:9465" in asyncio.run(addresses_of(9465)("localhost"))
    assert asyncio.run(addresses_of(9465)("::1")) == ["[::1]:9465"]
    with pytest.raises(OSError):
        asyncio.run(addresses_of(9465)("name.invalid"))


class Nameserver(asyncio.DatagramProtocol):
    """Answers SRV questions with `records`; without any, that there is no such name."""

    def __init__(self) -> None:
        self.records: list[str] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        question = dns.message.from_wire(data)
        answer = dns.message.make_response(question)
        if self.records:
            answer.answer.append(dns.rrset.from_text(question.question[0].name, 1, "IN", "SRV", *self.records))
        else:
            answer.set_rcode(dns.rcode.NXDOMAIN)
        self.transport.sendto(answer.to_wire(), address)


def test_services_have_ports_of_their_own() -> None:
    async def run() -> None:
        transport, server = await asyncio.get_running_loop().create_datagram_endpoint(Nameserver, local_addr=("127.0.0.1", 0))
        at = (transport.get_extra_info("sockname"),)
        try:
            server.records = ["10 5 9465 node-a.example.", "10 5 9466 node-b.example."]
            assert await services_of("_weenv._tcp.example", nameservers=at) == ["node-a.example:9465", "node-b.example:9466"]
            server.records = []
            with pytest.raises(OSError, match="_weenv"):
                await services_of("_weenv._tcp.example", nameservers=at)
        finally:
            transport.close()

    asyncio.run(run())


def test_which_name_is_asked_how() -> None:
    def resolver(name: str) -> Resolve:
        [source] = sources_of(PeersConfig(listen=A, dns=name), A)
        assert isinstance(source, DnsMembers)
        return source._resolve

    assert resolver("_weenv._tcp.example") is services_of
    assert resolver("peers.example") is not services_of
    assert sources_of(PeersConfig(listen=A), A) == []


def test_a_source_with_a_defect_costs_members_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    class Defective:
        def __init__(self) -> None:
            self.runs = 0

        async def run(self, changed: Callable[[frozenset[str]], None]) -> None:
            self.runs += 1
            changed(frozenset([A] if self.runs == 1 else [B]))
            raise LookupError("a defect")

    async def run() -> None:
        async with following(Members([C], [Defective()], again_s=0.01)) as members:
            await wait_until(lambda: members.names == {B, C})

    asyncio.run(run())
    assert "a defect" in capfd.readouterr().err


def test_what_no_resolver_can_be_asked_for_is_a_failure_of_dns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"a\.\.b"):
        asyncio.run(addresses_of(1)("a..b"))
    with pytest.raises(OSError, match="label"):
        asyncio.run(services_of("_weenv._tcp.a..b"))

    def no_configuration(*_: object, **__: object) -> None:
        raise dns.resolver.NoResolverConfiguration  # there is no /etc/resolv.conf

    monkeypatch.setattr(dns.asyncresolver, "Resolver", no_configuration)
    with pytest.raises(OSError, match="_weenv"):
        asyncio.run(services_of("_weenv._tcp.example"))


# etcd


@pytest.mark.parametrize("kept", [{"result": None}, {"result": {"TTL": "much"}}, {"result": [1]}])
def test_an_answer_that_is_no_lease_is_a_failure_of_etcd(kept: dict[str, Any]) -> None:
    with pytest.raises(EtcdError, match="TTL"):
        _lives(kept)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    with run_etcd(tmp_path / "etcd", free_port()) as etcd:
        yield etcd


def of_etcd(endpoints: list[str], name: str, lease_s: int = 3) -> Members:
    return Members([], [EtcdMembers(endpoints, name, lease_s=lease_s)])


def test_members_join_and_leave_in_etcd(etcd: Etcd) -> None:
    async def run() -> None:
        dead = f"http://127.0.0.1:{free_port()}"
        async with following(of_etcd([dead, etcd.url], A)) as one:
            await wait_until(lambda: one.names == {A})
            async with following(of_etcd([etcd.url], B)) as other:
                await wait_until(lambda: one.names == other.names == {A, B})
            await wait_until(lambda: one.names == {A})

    asyncio.run(run())


def test_a_node_that_is_gone_without_a_word_is_no_member_when_its_lease_ends(etcd: Etcd) -> None:
    async def run() -> None:
        granted = await etcd.call("lease/grant", TTL=2)
        key = base64.b64encode((PREFIX + B).encode()).decode()
        await etcd.call("kv/put", key=key, value="", lease=granted["ID"])
        async with following(of_etcd([etcd.url], A)) as one:
            await wait_until(lambda: one.names == {A, B})
            await wait_until(lambda: one.names == {A})

    asyncio.run(run())


def test_a_lost_lease_is_taken_anew(etcd: Etcd, capfd: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        source = EtcdMembers([etcd.url], A, lease_s=3)
        async with following(Members([], [source])) as one, following(of_etcd([etcd.url], B)) as other:
            await wait_until(lambda: one.names == other.names == {A, B})
            before = source._lease
            await etcd.call("lease/revoke", ID=before)
            await wait_until(lambda: source._lease not in (None, before))
            found = await etcd.call("kv/range", key=base64.b64encode((PREFIX + A).encode()).decode())
            assert found["count"] == "1"
            await wait_until(lambda: one.names == other.names == {A, B})

    asyncio.run(run())
    assert "the lease was lost" in capfd.readouterr().err


def test_while_etcd_is_away_the_members_of_before_stay(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()

    async def run() -> None:
        with run_etcd(tmp_path / "etcd", port) as etcd:
            task = following(of_etcd([etcd.url], A))
            one = await task.__aenter__()
            await wait_until(lambda: one.names == {A})
            await etcd.call("kv/put", key=base64.b64encode((PREFIX + B).encode()).decode(), value="")
            await wait_until(lambda: one.names == {A, B})
        said: list[str] = []
        await wait_until(lambda: said.append(capfd.readouterr().err) or "peers: etcd: " in "".join(said))  # type: ignore[func-returns-value]
        assert one.names == {A, B}
        with run_etcd(tmp_path / "anew", port):  # which knows nothing of its lease
            await wait_until(lambda: one.names == {A})
            await task.__aexit__(None, None, None)

    asyncio.run(run())


# a node's settings


def written(directory: Path, text: str) -> settings.NodeSettings:
    (directory / "node.toml").write_text(text)
    return settings.load_node_settings(directory / "node.toml")


def test_settings_reach_the_data_plane(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0123456789abcdef")
    text = f"""
        peers_listen = "0.0.0.0:9465"
        peers_name = "{A}"
        peers = ["{A}", "{B}"]
        peers_dns = "_weenv._tcp.example"
        peers_etcd = ["http://etcd:2379"]
        peers_token_file = "{tmp_path}/token"
        peers_sources = ["r.example"]
    """
    config = written(tmp_path, text).peers_config
    expected = PeersConfig(
        listen="0.0.0.0:9465", name=A, members=[A, B], dns="_weenv._tcp.example", etcd=["http://etcd:2379"],
        token_file=f"{tmp_path}/token", sources=["r.example"],
    )  # fmt: skip
    assert config == expected
    plane = DataPlaneConfig(mount_path=tmp_path, cache_path=tmp_path, run_dir=tmp_path, peers=config)
    command = _command(plane, Kept(listener=3, session=4, fuse=(5,)))
    given = command[command.index("--peers") + 1]
    assert "0123456789abcdef" not in given
    assert msgspec.json.decode(given, type=PeersConfig) == expected
    assert "--peers" not in _command(attrs.evolve(plane, peers=None), Kept(listener=3, session=4, fuse=(5,)))


def test_without_peers_listen_there_are_none(tmp_path: Path) -> None:
    assert settings.NodeSettings().peers_config is None
    with pytest.raises(CommandError, match="peers_listen"):
        _ = written(tmp_path, f'peers = ["{A}"]').peers_config


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('peers_listen = "9465"', "HOST:PORT"),
        ('peers = "x:1"', "a list of strings"),
        ("peers = [1]", "a list of strings"),
        ('peers_open = "yes"', "bool"),
        ("peers_token_file = 1", "a path"),
        ('peers_listen = "192.0.2.1:1"', "peers_token_file"),
        ('peers_listen = "127.0.0.1:1"\npeers_token_file = "/nowhere/token"', "peers_token_file"),
        ('peers_listen = "127.0.0.1:1"\npeers_tls_cert = "/nowhere/cert"', "peers_tls"),
        ('peers_listen = "127.0.0.1:1"\npeers_tls_cert = "/n/c"\npeers_tls_key = "/n/k"\npeers_tls_ca = "/n/a"', "peers_tls"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(CommandError, match=reason):
        _ = written(tmp_path, text).peers_config

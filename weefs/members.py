"""Who the members are: from a list, DNS and etcd, together. A source that does not answer leaves what it said before."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from weefs.log import say, say_traceback
from weefs.peerconfig import PeersConfig, is_address, split_address

DNS_EVERY_S = 30.0
AGAIN_S = 5.0
MAX_MEMBERS = 65536


class Source(Protocol):
    """Of members."""

    async def run(self, changed: Callable[[frozenset[str]], None]) -> None:
        """Says who they are now, each time it may have changed, until cancelled."""
        ...


class Members:
    """The union of a fixed list and of what sources say."""

    def __init__(
        self,
        fixed: Iterable[str],
        sources: Iterable[Source],
        on_left: Callable[[frozenset[str]], None] = lambda left: None,
        again_s: float = AGAIN_S,
    ) -> None:
        """`on_left`: they are members no more. `again_s`: after which a source that ended with a defect is run again."""
        self._fixed = frozenset(fixed)
        self._sources = [*sources]
        self._said: dict[int, frozenset[str]] = {}
        self._on_left = on_left
        self._again_s = again_s
        self.names = self._fixed
        self.changed = asyncio.Event()
        """Set, and replaced by another one, when `names` has changed."""

    async def run(self) -> None:
        """Follows the sources until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for number, source in enumerate(self._sources):
                tasks.create_task(self._follow(number, source))

    async def _follow(self, number: int, source: Source) -> None:
        """Whatever a source receives costs members, and not the data plane."""
        while True:
            try:
                await source.run(lambda names: self._hear(number, names))
            except Exception:
                say_traceback()
            await asyncio.sleep(self._again_s)

    def _hear(self, number: int, names: frozenset[str]) -> None:
        strange = [name for name in names if not is_address(name)]
        for name in strange[:3]:
            say(f"peers: expected a member's \"HOST:PORT\", received {name[:100]!r}")
        self._said[number] = frozenset(sorted(names.difference(strange))[:MAX_MEMBERS])
        before = self.names
        self.names = self._fixed.union(*self._said.values())
        if before != self.names:
            if left := before - self.names:
                self._on_left(left)
            self.changed.set()
            self.changed = asyncio.Event()


Resolve = Callable[[str], Awaitable[list[str]]]
"""Addresses (`host:port`) behind a name; OSError."""


def addresses_of(port: int) -> Resolve:
    """A and AAAA, by the system's resolver."""

    async def resolve(name: str) -> list[str]:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
        except UnicodeError as error:
            raise OSError(f"{name}: {error}") from error
        hosts = {str(address[0]) for *_, address in found}
        return sorted(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts)

    return resolve


async def services_of(name: str, *, nameservers: tuple[tuple[str, int], ...] = ()) -> list[str]:
    """SRV: `target:port`. `nameservers`: instead of the system's."""
    import dns.asyncresolver
    import dns.exception

    try:
        resolver = dns.asyncresolver.Resolver(configure=not nameservers)
        if nameservers:
            resolver.nameservers = [host for host, _ in nameservers]
            resolver.nameserver_ports = dict(nameservers)
        answer = await resolver.resolve(name, "SRV", lifetime=DNS_EVERY_S / 3)
    except dns.exception.DNSException as error:
        raise OSError(f"{name}: {error}") from error
    return sorted(f"{record.target.to_text(omit_final_dot=True)}:{record.port}" for record in answer)


class DnsMembers:
    """Asks for a name again and again."""

    def __init__(self, name: str, resolve: Resolve, every_s: float = DNS_EVERY_S) -> None:
        self._name = name
        self._resolve = resolve
        self._every_s = every_s

    async def run(self, changed: Callable[[frozenset[str]], None]) -> None:
        while True:
            try:
                changed(frozenset(await self._resolve(self._name)))
            except OSError as error:
                say(f"peers: DNS: {error}")
            await asyncio.sleep(self._every_s)


def sources_of(config: PeersConfig, name: str) -> list[Source]:
    """What the settings say, apart from the fixed list. `name`: this node's own."""
    sources: list[Source] = []
    if config.dns is not None:
        _, port = split_address(config.listen)
        resolve: Resolve = services_of if config.dns.startswith("_") else addresses_of(port)
        sources.append(DnsMembers(config.dns, resolve))
    if config.etcd:
        from weefs.etcd import EtcdMembers

        sources.append(EtcdMembers(config.etcd, name))
    return sources

"""Members in etcd, by its JSON gateway (v3): each node keeps a key with a lease, and reads everybody's.

A lease that was lost, since this node stood still or etcd forgot it, is taken anew. While etcd is away, the members of before stay.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

from weefs.log import say

PREFIX = "/weenv/peers/"
LEASE_S = 15
TIMEOUT_S = 5.0


class EtcdError(Exception):
    """No endpoint answered as it should."""


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _lives(kept: dict[str, Any]) -> bool:
    """What was answered to keeping a lease alive. EtcdError."""
    try:
        return int(kept.get("result", {}).get("TTL", 0)) > 0
    except (AttributeError, TypeError, ValueError) as error:
        raise EtcdError(f"expected a lease's TTL, received {str(kept)[:200]}") from error


class EtcdMembers:
    """A `members.Source`. `lease_s`: how long a node that is gone stays a member; kept alive, and members read, thrice in that time."""

    def __init__(self, endpoints: Sequence[str], name: str, *, lease_s: int = LEASE_S) -> None:
        self._endpoints = [endpoint.rstrip("/") for endpoint in endpoints]
        self._name = name
        self._lease_s = lease_s
        self._lease: str | None = None
        self._names: frozenset[str] = frozenset()
        self._revision = 0
        """Of etcd, at the last reading."""
        self._number = 0
        """Of keys, then."""

    async def run(self, changed: Callable[[frozenset[str]], None]) -> None:
        timeout = aiohttp.ClientTimeout(total=min(TIMEOUT_S, self._lease_s / 3))
        async with aiohttp.ClientSession(timeout=timeout) as session:
            try:
                while True:
                    try:
                        await self._keep(session)
                        changed(await self._read(session))
                    except EtcdError as error:
                        say(f"peers: etcd: {error}")
                    await asyncio.sleep(self._lease_s / 3)
            finally:
                await self._leave(session)

    async def _keep(self, session: aiohttp.ClientSession) -> None:
        """The lease lives, and the key is there with it."""
        if self._lease is not None:
            kept = await self._call(session, "lease/keepalive", {"ID": self._lease})
            if _lives(kept):
                return
            say("peers: etcd: the lease was lost, and is taken anew")
            self._lease = None
        granted = await self._call(session, "lease/grant", {"TTL": self._lease_s})
        if "ID" not in granted:
            raise EtcdError(f"expected a lease, received {str(granted)[:200]}")
        lease = str(granted["ID"])
        await self._call(session, "kv/put", {"key": _encoded(PREFIX + self._name), "value": _encoded(self._name), "lease": lease})
        self._lease = lease

    async def _read(self, session: aiohttp.ClientSession) -> frozenset[str]:
        """Asks for what was put since the last time, and how many there are: among thousands who read, the whole list would be too much.
        When the number does not fit, some have gone, and all are read; also when it is another etcd.
        """
        before = self._revision
        if before:
            self._names |= await self._range(session, before + 1)
        if not before or self._revision < before or len(self._names) != self._number:
            self._names = await self._range(session, 0)
        return self._names

    async def _range(self, session: aiohttp.ClientSession, since: int) -> frozenset[str]:
        """Names whose keys were put in revision `since` or later."""
        end = PREFIX[:-1] + chr(ord(PREFIX[-1]) + 1)
        wanted = {"key": _encoded(PREFIX), "range_end": _encoded(end), "keys_only": True, "min_mod_revision": since}
        found = await self._call(session, "kv/range", wanted)
        try:
            names = frozenset(base64.b64decode(entry["key"]).decode().removeprefix(PREFIX) for entry in found.get("kvs", []))
            self._revision, self._number = int(found["header"]["revision"]), int(found.get("count", 0))
        except (KeyError, TypeError, ValueError) as error:
            raise EtcdError(f"expected keys, received {str(found)[:200]}") from error
        return names

    async def _leave(self, session: aiohttp.ClientSession) -> None:
        """A node that ends in order is no member at once."""
        if self._lease is None:
            return
        try:
            await self._call(session, "lease/revoke", {"ID": self._lease})
        except EtcdError as error:
            say(f"peers: etcd: {error}; this node stays a member for {self._lease_s} s")
        self._lease = None

    async def _call(self, session: aiohttp.ClientSession, method: str, request: dict[str, Any]) -> dict[str, Any]:
        """The answer of the first endpoint that gives one; it is asked first from now on."""
        failures = []
        for endpoint in [*self._endpoints]:
            try:
                async with session.post(f"{endpoint}/v3/{method}", json=request) as response:
                    answer = await response.json(content_type=None)
                    if response.status == 200 and isinstance(answer, dict):
                        return answer
                    failures.append(f"{endpoint}: {method}: {response.status} {str(answer)[:200]}")
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError, RecursionError) as error:
                failures.append(f"{endpoint}: {type(error).__name__}: {error}")
            self._endpoints.remove(endpoint)
            self._endpoints.append(endpoint)
        raise EtcdError("; ".join(failures))

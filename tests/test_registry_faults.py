"""Registries that misbehave, as a range reader meets them: ranges that are none, early ends, tokens, redirects."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter

import pytest
from aiohttp import web
from attrs import define, field
from registry_fixture import answering, run_server

from registry import (
    AuthenticationFailed,
    Connections,
    Credentials,
    IntegrityError,
    NotFound,
    RegistryError,
    Unreachable,
    open_ranges,
    resolve_group,
)
from registry.challenges import Challenge, Token, TokenRequest, answer, parse_challenges, received_token
from registry.http_ranges import MAX_WHOLE_BLOB_BYTES

BLOB = bytes(range(256)) * 400
DIGEST = f"sha256:{hashlib.sha256(BLOB).hexdigest()}"


def credentials_of(host: str) -> Credentials:
    return Credentials(pairs={host: ("user", "password")})


def partial(request: web.Request, blob: bytes = BLOB) -> web.Response:
    """The right answer to a Range request."""
    wanted = request.http_range
    begin, end = wanted.start or 0, wanted.stop or len(blob)
    headers = {"Content-Range": f"bytes {begin}-{end - 1}/{len(blob)}"}
    return web.Response(status=206, body=blob[begin:end], headers=headers)


def read(host: str, offset: int, size: int, *, credentials: Credentials | None = None, timeout_s: float = 30) -> bytes:
    async def run() -> bytes:
        connections = Connections(timeout_s=timeout_s)
        reader = await open_ranges(f"http://{host}/repo", credentials=credentials, connections=connections)
        try:
            return await reader.read(DIGEST, offset, size)
        finally:
            await reader.close()
            await connections.close()

    return asyncio.run(run())


# ranges


def test_a_small_blob_that_comes_whole_is_sliced() -> None:
    with run_server(answering(lambda _: web.Response(body=BLOB))) as host:
        for offset, size in ((0, 10), (1000, 5000), (len(BLOB) - 7, 7), (0, len(BLOB))):
            assert read(host, offset, size) == BLOB[offset : offset + size]
        with pytest.raises(
            Unreachable, match=rf"expected 8 bytes at {len(BLOB) - 7}, the answer ends after {len(BLOB)}"
        ):
            read(host, len(BLOB) - 7, 8)


def test_a_large_blob_that_comes_whole_is_refused_and_not_read() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(1 << 40)})
        await response.prepare(request)
        await response.write(b"x" * 1000)
        return response

    with (
        run_server(endless) as host,
        pytest.raises(RegistryError, match=r"received the whole blob .status 200.") as caught,
    ):
        read(host, MAX_WHOLE_BLOB_BYTES, 1)
    assert type(caught.value) is RegistryError  # not to be asked again


@pytest.mark.parametrize(
    ("header", "body"),
    [
        ("bytes 100-199/102400", b"x" * 99),
        ("bytes 100-199/102400", b"x" * 101),
        ("bytes 100-199/102400", b""),
        ("bytes 0-99/102400", b"x" * 100),
        ("bytes 100-198/102400", b"x" * 100),
        ("bytes 100-199", b"x" * 100),
        ("100-199/102400", b"x" * 100),
        (None, b"x" * 100),
    ],
)
def test_another_range_than_the_one_asked_for_is_an_error(header: str | None, body: bytes) -> None:
    headers = {"Content-Range": header} if header else {}
    handler = answering(lambda _: web.Response(status=206, body=body, headers=headers))
    wanted = r"expected (bytes 100-199|100 bytes at 100), received"
    with run_server(handler) as host, pytest.raises(Unreachable, match=wanted):
        read(host, 100, 100)


def test_a_total_size_that_is_not_known_is_no_error() -> None:
    headers = {"Content-Range": "bytes 100-199/*"}
    with run_server(answering(lambda _: web.Response(status=206, body=b"x" * 100, headers=headers))) as host:
        assert read(host, 100, 100) == b"x" * 100


@pytest.mark.parametrize(
    ("status", "headers", "kind", "after_s"),
    [
        (400, {}, RegistryError, None),
        (401, {}, AuthenticationFailed, None),
        (403, {}, AuthenticationFailed, None),
        (404, {}, NotFound, None),
        (408, {}, Unreachable, None),
        (416, {}, IntegrityError, None),
        (429, {"Retry-After": "7"}, Unreachable, 7.0),
        (429, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, Unreachable, None),
        (500, {}, Unreachable, None),
        (503, {"Retry-After": "1"}, Unreachable, 1.0),
    ],
)
def test_a_status_is_an_error_of_its_kind(
    status: int, headers: dict[str, str], kind: type[RegistryError], after_s: float | None
) -> None:
    requests: list[web.Request] = []

    def refuse(request: web.Request) -> web.Response:
        requests.append(request)
        return web.Response(status=status, headers=headers, text='{"errors":\n [{"code":"WHY"}]}')

    with run_server(answering(refuse)) as host, pytest.raises(kind) as caught:
        read(host, 0, 10)
    assert type(caught.value) is kind
    assert f"http://{host}/v2/repo/blobs/{DIGEST}" in str(caught.value) or status == 401
    assert getattr(caught.value, "retry_after_s", None) == after_s
    assert len(requests) == 1  # retries are the caller's


def test_a_connection_that_is_reset_midway_is_unreachable() -> None:
    async def reset(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(
            status=206, headers={"Content-Range": "bytes 0-999/2000", "Content-Length": "1000"}
        )
        await response.prepare(request)
        await response.write(b"x" * 500)
        assert request.transport is not None
        request.transport.abort()
        return response

    with run_server(reset) as host, pytest.raises(Unreachable, match="no whole answer"):
        read(host, 0, 1000)


def test_a_server_that_says_nothing_is_unreachable() -> None:
    async def silent(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    with run_server(silent) as host, pytest.raises(Unreachable, match="Timeout"):
        read(host, 0, 10, timeout_s=0.2)


def test_a_registry_without_tls_is_not_spoken_to_in_the_clear_nor_asked_again() -> None:
    """0.0.0.0 is this machine by an address that could be another's: https."""
    served: list[str] = []

    async def serve(request: web.Request) -> web.Response:
        served.append(request.path)
        return web.Response()

    with run_server(serve) as loopback:
        host = loopback.replace("127.0.0.1", "0.0.0.0")

        async def read_range() -> None:
            reader = await open_ranges(f"https://{host}/repo")
            try:
                await reader.read(DIGEST, 0, 10)
            finally:
                await reader.close()

        for call in (lambda: resolve_group(f"{host}/repo"), lambda: asyncio.run(read_range())):
            with pytest.raises(RegistryError, match=f"https://{host}/v2/repo/.*TLS failed") as caught:
                call()
            assert type(caught.value) is RegistryError
    assert served == []


# tokens


@define
class TokenServer:
    """A registry with a token service. Tokens are `t1`, `t2`, …; `expire` makes the last one worthless."""

    anonymous: bool = False
    lifetime_s: float | None = None
    refuses_with: int = 401
    """A token that is not valid; it asks for one with 401 in any case."""
    forbids: bool = False
    issued: int = 0
    valid: int = 0
    requests: Counter[int] = field(factory=Counter)
    queries: list[dict[str, str]] = field(factory=list)
    barrier: asyncio.Event | None = None
    waiting: int = 0
    expected_waiting: int = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/token":
            self.queries.append(dict(request.query))
            allowed = self.anonymous or request.headers.get("Authorization") == "Basic dXNlcjpwYXNzd29yZA=="
            if not allowed:
                return web.Response(status=401)
            self.issued += 1
            self.valid = self.issued
            return web.json_response({"token": f"t{self.issued}"} | ({"expires_in": self.lifetime_s} if self.lifetime_s else {}))
        received = request.headers.get("Authorization")
        authorized = received == f"Bearer t{self.valid}" and self.valid > 0 and not self.forbids
        if received and not authorized and self.refuses_with != 401:
            self.requests[self.refuses_with] += 1
            return web.Response(status=self.refuses_with)
        if not authorized:
            await self._meet()
            realm = f"http://{request.host}/token"
            challenge = f'Bearer realm="{realm}",service="registry, inc",scope="repository:repo:pull"'
            self.requests[401] += 1
            return web.Response(status=401, headers={"WWW-Authenticate": challenge})
        self.requests[206] += 1
        return partial(request)

    async def _meet(self) -> None:
        """Refuses only when all that are expected are here, so that they are refused together."""
        if self.barrier is None:
            return
        self.waiting += 1
        if self.waiting == self.expected_waiting:
            self.barrier.set()
        await self.barrier.wait()


def test_a_token_is_fetched_by_challenge_and_kept() -> None:
    server = TokenServer()

    async def run(host: str) -> None:
        reader = await open_ranges(f"http://{host}/repo", credentials=credentials_of(host))
        for _ in range(3):
            assert await reader.read(DIGEST, 10, 10) == BLOB[10:20]
        await reader.close()

    with run_server(server.handle) as host:
        asyncio.run(run(host))
    assert server.queries == [{"service": "registry, inc", "scope": "repository:repo:pull"}]
    assert server.requests == {401: 1, 206: 3}


@pytest.mark.parametrize("lifetime_s", [0.25, None])
def test_a_token_is_renewed_before_it_ends(lifetime_s: float | None) -> None:
    """One that does not say is good for a minute: kept here. The other is renewed, and no request refused."""
    server = TokenServer(lifetime_s=lifetime_s)

    async def run(host: str) -> None:
        reader = await open_ranges(f"http://{host}/repo", credentials=credentials_of(host))
        for _ in range(3):
            await reader.read(DIGEST, 0, 1)
            await asyncio.sleep(0.22)
        await reader.close()

    with run_server(server.handle) as host:
        asyncio.run(run(host))
    assert server.requests == {401: 1, 206: 3}
    assert server.issued == (1 if lifetime_s is None else 3)


def test_a_token_that_the_registry_forbids_is_replaced_and_a_forbidden_blob_is_not_asked_for_for_ever() -> None:
    """Some say 403 of a token that has ended, and do not say what they want instead."""
    server = TokenServer(refuses_with=403)

    async def run(host: str) -> None:
        reader = await open_ranges(f"http://{host}/repo", credentials=credentials_of(host))
        await reader.read(DIGEST, 0, 1)
        server.valid = 0
        assert await reader.read(DIGEST, 5, 3) == BLOB[5:8]
        server.forbids = True
        before = server.requests[403]
        with pytest.raises(AuthenticationFailed, match="status 403"):
            await reader.read(DIGEST, 0, 1)
        assert server.requests[403] == before + 2
        await reader.close()

    with run_server(server.handle) as host:
        asyncio.run(run(host))


def test_an_expired_token_is_renewed_once_by_sixteen_readers() -> None:
    server = TokenServer()

    async def run(host: str) -> None:
        reader = await open_ranges(f"http://{host}/repo", credentials=credentials_of(host))
        await reader.read(DIGEST, 0, 1)
        server.valid = 0  # expired
        server.barrier, server.expected_waiting = asyncio.Event(), 16
        found = await asyncio.gather(*(reader.read(DIGEST, i, 100) for i in range(16)))
        assert found == [BLOB[i : i + 100] for i in range(16)]
        await reader.close()

    with run_server(server.handle) as host:
        asyncio.run(run(host))
    assert server.issued == 2
    assert server.requests == {401: 1 + 16, 206: 1 + 16}


def test_an_anonymous_token_needs_no_credentials() -> None:
    server = TokenServer(anonymous=True)
    with run_server(server.handle) as host:
        assert read(host, 0, 10) == BLOB[:10]


def test_a_realm_that_gives_no_token_is_an_authentication_failure() -> None:
    server = TokenServer()
    with (
        run_server(server.handle) as host,
        pytest.raises(AuthenticationFailed, match=r"/token: no token for .* status 401"),
    ):
        read(host, 0, 10)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("no json", "expected a token as JSON"),
        ("{}", "the answer holds none"),
        ('{"token": "a\\nb"}', "the answer holds none"),
    ],
)
def test_a_realm_that_answers_nonsense_is_an_error(body: str, sentence: str) -> None:
    def nonsense(request: web.Request) -> web.Response:
        if request.path == "/token":
            return web.Response(text=body)
        return web.Response(status=401, headers={"WWW-Authenticate": f'Bearer realm="http://{request.host}/token"'})

    with run_server(answering(nonsense)) as host, pytest.raises(RegistryError, match=sentence):
        read(host, 0, 10)


def test_a_fresh_token_that_is_refused_is_not_tried_for_ever() -> None:
    asked: Counter[str] = Counter()

    def refuse(request: web.Request) -> web.Response:
        asked[request.path] += 1
        if request.path == "/token":
            return web.json_response({"access_token": "worthless"})
        return web.Response(status=401, headers={"WWW-Authenticate": f'Bearer realm="http://{request.host}/token"'})

    with run_server(answering(refuse)) as host, pytest.raises(AuthenticationFailed):
        read(host, 0, 10)
    assert sorted(asked.values()) == [1, 2]


def test_challenges_are_parsed() -> None:
    assert parse_challenges(
        ['Basic realm="a \\"b\\", c", Bearer realm=x,scope="s t"', "Negotiate", "BEARER Realm = y"]
    ) == [
        Challenge("basic", {"realm": 'a "b", c'}),
        Challenge("bearer", {"realm": "x", "scope": "s t"}),
        Challenge("bearer", {"realm": "y"}),
    ]


def test_what_answers_a_challenge() -> None:
    def ask(challenge: str, basic: str | None = "cred", refused: str | None = None) -> object:
        offered = parse_challenges([challenge])
        return answer(offered, host="h", repository="a/b", basic=basic, refused=refused)

    wanted = {"scope": "repository:a/b:pull"}
    assert ask('Bearer realm="https://r/t"') == TokenRequest("https://r/t", wanted, {"Authorization": "Basic cred"})
    assert ask('Bearer realm="http://r/t"', None) == TokenRequest("http://r/t", wanted, {})
    assert ask('Basic realm="x", Bearer realm="https://r/t"', None) == TokenRequest("https://r/t", wanted, {})
    with pytest.raises(AuthenticationFailed, match="not sent over http to another machine"):
        ask('Bearer realm="http://r/t"')
    with pytest.raises(
        AuthenticationFailed, match="expected a realm with http or https to fetch a token from, received 'r'"
    ):
        ask('Bearer realm="r"')
    with pytest.raises(AuthenticationFailed, match="in a way that is not known: digest"):
        ask('Digest realm="r"')
    with pytest.raises(AuthenticationFailed, match="in a way that is not known: it does not say how"):
        ask("")
    with pytest.raises(AuthenticationFailed, match="refuses the user and password"):
        ask("Basic realm=r", refused="Basic cred")
    assert received_token("r", json.dumps({"access_token": "x", "expires_in": 1}).encode()) == Token("Bearer x", 1.0)
    assert received_token("r", b'{"token": "x"}') == Token("Bearer x", 60.0)


# redirects


def test_a_redirect_to_another_host_gets_no_authorization() -> None:
    server = TokenServer()
    seen: list[str | None] = []

    def storage(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return partial(request)

    with run_server(answering(storage)) as storage_host:

        async def redirecting(request: web.Request) -> web.StreamResponse:
            response = await server.handle(request)
            if response.status != 206:
                return response
            return web.Response(status=307, headers={"Location": f"http://{storage_host}/signed?by=registry"})

        with run_server(redirecting) as host:
            assert read(host, 10, 10, credentials=credentials_of(host)) == BLOB[10:20]
    assert seen == [None]


def test_a_redirect_on_the_same_host_keeps_the_authorization() -> None:
    server = TokenServer()

    async def redirecting(request: web.Request) -> web.StreamResponse:
        if "/blobs/" in request.path:
            return web.Response(status=302, headers={"Location": "/elsewhere"})
        return await server.handle(request)

    with run_server(redirecting) as host:
        assert read(host, 10, 10, credentials=credentials_of(host)) == BLOB[10:20]


def test_another_host_that_asks_for_a_password_gets_none() -> None:
    asked: list[str] = []

    def thief(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(status=401, headers={"WWW-Authenticate": f'Bearer realm="http://{request.host}/token"'})

    with run_server(answering(thief)) as thief_host:
        location = {"Location": f"http://{thief_host}/blob"}
        with run_server(answering(lambda _: web.Response(status=302, headers=location))) as host:
            secret = credentials_of(host)
            with pytest.raises(AuthenticationFailed):
                read(host, 0, 10, credentials=secret)
            with pytest.raises(AuthenticationFailed):
                resolve_group(f"{host}/repo", credentials=secret)
    assert asked == ["/blob", "/blob"]


def test_redirects_that_lead_nowhere_end() -> None:
    count: Counter[str] = Counter()

    def around(request: web.Request) -> web.Response:
        count["requests"] += 1
        return web.Response(status=302, headers={"Location": request.path})

    with run_server(answering(around)) as host, pytest.raises(RegistryError, match="expected at most 5 redirects"):
        read(host, 0, 10)
    assert count["requests"] == 6


@pytest.mark.parametrize("location", ["", "ftp://host/blob", "file:///etc/passwd"])
def test_a_redirect_to_what_is_no_web_address_is_refused(location: str) -> None:
    handler = answering(lambda _: web.Response(status=302, headers={"Location": location}))
    with run_server(handler) as host, pytest.raises(RegistryError, match="expected a redirect to http or https"):
        read(host, 0, 10)


# storage that the registry redirects to


@define
class Storage:
    """A registry that only redirects, and its storage, at an address with a signature that ends when told."""

    signature: int = 1
    refusal: int = 403
    redirects: int = 0
    reads: int = 0
    host: str = ""
    away: bool = False

    async def registry(self, request: web.Request) -> web.StreamResponse:
        self.redirects += 1
        return web.Response(status=307, headers={"Location": f"http://{self.host}/data?signature={self.signature}"})

    async def storage(self, request: web.Request) -> web.StreamResponse:
        self.reads += 1
        if self.away:
            assert request.transport is not None
            request.transport.abort()
        if request.query["signature"] != str(self.signature):
            return web.Response(status=self.refusal)
        return partial(request)


@pytest.mark.parametrize("refusal", [400, 401, 403, 404, 410])
def test_where_a_blob_is_is_remembered_until_that_place_refuses(refusal: int) -> None:
    storage = Storage(refusal=refusal)

    async def run(host: str) -> None:
        reader = await open_ranges(f"http://{host}/repo", credentials=credentials_of(host))
        for offset in range(5):
            assert await reader.read(DIGEST, offset, 10) == BLOB[offset : offset + 10]
        assert (storage.redirects, storage.reads) == (1, 5)
        storage.signature = 2  # the old one has ended
        assert await reader.read(DIGEST, 7, 10) == BLOB[7:17]
        assert (storage.redirects, storage.reads) == (2, 7)
        await reader.close()

    with run_server(storage.storage) as storage.host, run_server(storage.registry) as host:
        asyncio.run(run(host))


def test_a_place_that_is_gone_is_asked_for_anew() -> None:
    storage = Storage()

    async def run(host: str) -> None:
        reader = await open_ranges(f"http://{host}/repo")
        with run_server(storage.storage) as storage.host:
            await reader.read(DIGEST, 0, 10)
        with run_server(storage.storage) as storage.host:
            assert await reader.read(DIGEST, 7, 10) == BLOB[7:17]
            assert storage.redirects == 2
        await reader.close()

    with run_server(storage.registry) as host:
        asyncio.run(run(host))


def test_a_place_that_is_busy_is_not_taken_for_gone() -> None:
    """Its Retry-After reaches whoever retries."""
    storage = Storage(refusal=429)

    async def run(host: str) -> None:
        reader = await open_ranges(f"http://{host}/repo")
        await reader.read(DIGEST, 0, 10)
        storage.signature = 2
        with pytest.raises(Unreachable, match="429"):
            await reader.read(DIGEST, 0, 10)
        assert storage.redirects == 1
        await reader.close()

    with run_server(storage.storage) as storage.host, run_server(storage.registry) as host:
        asyncio.run(run(host))


def test_repositories_of_one_host_share_one_bound_of_connections() -> None:
    open_now, most = 0, 0

    async def slow(request: web.Request) -> web.StreamResponse:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0.02)  # so that those who may come at once do
        open_now -= 1
        return partial(request)

    async def run(host: str) -> None:
        connections = Connections(per_host=4)
        readers = [await open_ranges(f"http://{host}/repo{number}", connections=connections) for number in range(3)]
        found = await asyncio.gather(*(reader.read(DIGEST, i, 10) for i in range(10) for reader in readers))
        assert found == [BLOB[i : i + 10] for i in range(10) for _ in readers]
        for reader in readers:
            await reader.close()
        await connections.close()

    with run_server(slow) as host:
        asyncio.run(run(host))
    assert most == 4

"""How a registry asks for authentication and what answers it, without any input or output: shared by both HTTP clients.

A registry that wants credentials answers 401 with WWW-Authenticate. `Basic`: user and password go with every request.
`Bearer`: a token is fetched from the realm that the challenge names (with user and password, if there are any), and the
token goes with every request until the next 401. Passwords are sent to the registry and to its realm only, and never in
the clear to another machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import urlsplit

import attrs
import msgspec

from registry.errors import AuthenticationFailed, RegistryError
from registry.reference import is_loopback

MAX_TOKEN_ANSWER_BYTES = 1 << 20

_CHALLENGE = re.compile(r'([A-Za-z]+)\s+((?:[A-Za-z_]+\s*=\s*(?:"(?:[^"\\]|\\.)*"|[^\s,"]+)\s*(?:,\s*)?)*)')
_PARAMETER = re.compile(r'([A-Za-z_]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))')


@attrs.frozen
class Challenge:
    """One scheme that would do, in lower case, with its parameters."""

    scheme: str
    parameters: dict[str, str]


@attrs.frozen
class Basic:
    """The answer is user and password; `value` is the Authorization header."""

    value: str


@attrs.frozen
class TokenRequest:
    """The answer is a token, to be had with GET `realm`?`query`."""

    realm: str
    query: dict[str, str]
    headers: dict[str, str] = attrs.field(repr=False)


def parse_challenges(values: Iterable[str]) -> list[Challenge]:
    """WWW-Authenticate headers (RFC 9110 §11.6.1, as far as registries use it); what cannot be understood is passed
    over."""
    challenges = []
    for match in (match for text in values for match in _CHALLENGE.finditer(text)):
        parameters = {
            name.lower(): plain or re.sub(r"\\(.)", r"\1", quoted)
            for name, quoted, plain in _PARAMETER.findall(match[2])
        }
        challenges.append(Challenge(match[1].lower(), parameters))
    return challenges


def answer(
    challenges: Iterable[Challenge], *, host: str, repository: str, basic: str | None, refused: str | None
) -> Basic | TokenRequest:
    """What to do about a 401. `basic`: base64 of user:password, if known; `refused`: the Authorization that got it.

    AuthenticationFailed: nothing can be done.
    """
    found = {challenge.scheme: challenge.parameters for challenge in challenges}
    if "realm" in found.get("bearer", {}):
        return _token_request(found["bearer"], repository, basic)
    if "basic" not in found:
        wanted = ", ".join(found) or "it does not say how"
        raise AuthenticationFailed(f"{host}: the registry asks for authentication in a way that is not known: {wanted}")
    if basic is None:
        raise AuthenticationFailed(f"{host}: the registry asks for user and password; log in with docker or podman")
    if refused == f"Basic {basic}":
        raise AuthenticationFailed(f"{host}: the registry refuses the user and password; log in again")
    return Basic(f"Basic {basic}")


def _token_request(parameters: dict[str, str], repository: str, basic: str | None) -> TokenRequest:
    realm = parameters["realm"]
    parts = urlsplit(realm)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise AuthenticationFailed(f"expected a realm with http or https to fetch a token from, received '{realm}'")
    if basic and parts.scheme == "http" and not is_loopback(parts.netloc):
        raise AuthenticationFailed(f"{realm}: the password is not sent over http to another machine; https is needed")
    query = {name: value for name, value in parameters.items() if name in ("service", "scope")}
    query.setdefault("scope", f"repository:{repository}:pull")
    return TokenRequest(realm, query, {"Authorization": f"Basic {basic}"} if basic else {})


TOKEN_LIFETIME_S = 60.0
"""Of a token whose answer does not say, by the distribution specification's token authentication."""


class _TokenAnswer(msgspec.Struct):
    token: str | None = None
    access_token: str | None = None
    expires_in: float | None = None


@attrs.frozen
class Token:
    """`authorization` is the header; it is good for `lifetime_s` from when it was asked for."""

    authorization: str = attrs.field(repr=False)
    lifetime_s: float


def received_token(realm: str, data: bytes) -> Token:
    """What a realm's answer holds. RegistryError: no token."""
    try:
        received = msgspec.json.decode(data, type=_TokenAnswer)
    except msgspec.MsgspecError as error:
        raise RegistryError(f"{realm}: expected a token as JSON: {error}") from error
    token = received.token or received.access_token
    if not token or not token.isascii() or not token.isprintable():
        raise RegistryError(f"{realm}: expected a token, the answer holds none")
    lifetime_s = received.expires_in
    return Token(f"Bearer {token}", lifetime_s if lifetime_s is not None and lifetime_s > 0 else TOKEN_LIFETIME_S)


def refusal_of_token(realm: str, host: str, status: int) -> AuthenticationFailed:
    """A realm that gives no token."""
    return AuthenticationFailed(f"{realm}: no token for {host}: status {status}; log in with docker or podman")

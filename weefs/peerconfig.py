"""What a node is told of its peers: the values, and which of them go together."""

from __future__ import annotations

import ipaddress
import re
import ssl
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from weefs.errors import WeefsError

MIN_TOKEN_BYTES = 16
_LABEL = "[A-Za-z0-9_-]{1,63}"
_ADDRESS = re.compile(rf"(\[[0-9A-Fa-f:.]{{2,45}}\]|(?=[^:]{{1,253}}:){_LABEL}(?:\.{_LABEL})*\.?):([0-9]{{1,5}})")


class PeersRefused(WeefsError):
    """The peers' settings do not go together, or a file of theirs cannot be used."""


class PeersConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """docs/node.md says what each is. Addresses are `host:port`; files are paths."""

    listen: str
    name: str | None = None
    members: list[str] = []
    dns: str | None = None
    etcd: list[str] = []
    token_file: str | None = None
    open: bool = False
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    sources: list[str] = []


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`, an IPv6 address in brackets. PeersRefused."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match[2]) < 65536:
        raise PeersRefused(f"peers: expected \"HOST:PORT\", received {address[:200]!r}")
    return match[1].strip("[]"), int(match[2])


def is_address(address: str) -> bool:
    """Whether split_address() takes it."""
    try:
        split_address(address)
    except PeersRefused:
        return False
    return True


def _parsed(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def own_name(config: PeersConfig) -> str:
    """As others reach this node. PeersRefused: it must be said."""
    if config.name is not None:
        split_address(config.name)
        return config.name
    host, _ = split_address(config.listen)
    address = _parsed(host)
    if address is not None and address.is_unspecified:
        needed = f"expected this node's \"HOST:PORT\" as others reach it, since peers_listen is {config.listen}"
        raise PeersRefused(f"peers_name: {needed}; there is none")
    return config.listen


def check(config: PeersConfig) -> None:
    """PeersRefused: it would serve everybody, or cannot work."""
    host, _ = split_address(config.listen)
    own_name(config)
    for member in config.members:
        split_address(member)
    address = _parsed(host)
    loopback = host == "localhost" if address is None else address.is_loopback
    if config.token_file is None and not loopback and not config.open:
        raise PeersRefused(
            f"peers_listen: expected a loopback address, since there is no peers_token_file, received {config.listen}; "
            "set peers_token_file, or peers_open = true if everybody who can connect may read layers"
        )
    tls = (config.tls_cert, config.tls_key, config.tls_ca)
    if any(tls) and not all(tls):
        raise PeersRefused("peers_tls: expected all of peers_tls_cert, peers_tls_key and peers_tls_ca, or none, received some")


def read_token(config: PeersConfig) -> str | None:
    """The bearer token, without the white space around it. PeersRefused."""
    if config.token_file is None:
        return None
    try:
        token = Path(config.token_file).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise PeersRefused(f"peers_token_file: {error}") from error
    if len(token) < MIN_TOKEN_BYTES or not token.isprintable() or " " in token:
        received = f"{config.token_file} has {len(token)}"
        raise PeersRefused(f"peers_token_file: expected one word of at least {MIN_TOKEN_BYTES} characters; {received}")
    return token


def tls_contexts(config: PeersConfig) -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
    """For serving and for asking; each shows its certificate and demands one of the CA. None: plain HTTP. PeersRefused."""
    if config.tls_cert is None or config.tls_ca is None:
        return None
    try:
        serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=config.tls_ca)
        serving.verify_mode = ssl.CERT_REQUIRED
        asking = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=config.tls_ca)
        for context in (serving, asking):
            context.load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise PeersRefused(f"peers_tls: {error}") from error
    return serving, asking


def source_host(source: str) -> str | None:
    """`host` or `host:port` of a registry's source; None: it is a directory of this machine."""
    return None if source.startswith("oci:") else urlsplit(source).netloc


def may_open(source: str, allowed: list[str], used: set[str], has_token: bool) -> bool:
    """Whether a layer of this source may be opened because a peer wants it: never of a directory, whose name means nothing here."""
    host = source_host(source)
    if not host or urlsplit(source).scheme not in ("http", "https"):
        return False
    return host in used or (host in allowed if allowed else has_token)

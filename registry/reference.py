"""References to layer groups: `oci:DIR:TAG` (a local layout) and `HOST[:PORT]/REPO[:TAG][@DIGEST]` (a registry).

`oci:DIR` may be followed by `:TAG`, `@sha256:…`, or both. DIR may hold colons and `@`: the tag begins behind the last
colon that has no `/` after it, so a directory whose last component has a colon needs its tag spelled out; and what
looks like a digest in the last component is one. A registry reference without tag and digest means the tag `latest`;
one with a digest is that digest, whatever its tag says. Registries on the loopback are spoken to in http, all others
in https.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path

import attrs

from registry.errors import InvalidReference

_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(?::[1-9][0-9]{0,4})?")
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*")
DEFAULT_TAG = "latest"


@attrs.frozen
class LayoutReference:
    """A group in a local layout. At least one of `tag` and `digest` is set; with both, the digest decides."""

    directory: Path
    tag: str | None
    digest: str | None

    @property
    def source(self) -> str:
        """Where its blobs are: what a range reader is opened with."""
        return f"oci:{self.directory.absolute()}"

    def __str__(self) -> str:
        return f"oci:{self.directory}{_suffix(self.tag, self.digest)}"


@attrs.frozen
class RegistryReference:
    """A group in a registry. At least one of `tag` and `digest` is set; with both, the digest decides."""

    host: str
    repository: str
    tag: str | None
    digest: str | None

    @property
    def scheme(self) -> str:
        """http or https."""
        return "http" if is_loopback(self.host) else "https"

    @property
    def source(self) -> str:
        """Where its blobs are: what a range reader is opened with."""
        return f"{self.scheme}://{self.host}/{self.repository}"

    def __str__(self) -> str:
        return f"{self.host}/{self.repository}{_suffix(self.tag, self.digest)}"


Reference = LayoutReference | RegistryReference


def _suffix(tag: str | None, digest: str | None) -> str:
    return (f":{tag}" if tag else "") + (f"@{digest}" if digest else "")


def with_digest(reference: Reference, digest: str) -> Reference:
    """The same group, pinned to a digest."""
    return attrs.evolve(reference, digest=digest)


def is_loopback(host: str) -> bool:
    """Whether `HOST[:PORT]` is this machine by an address that cannot be another."""
    name = host.rsplit(":", 1)[0] if re.search(r":\d+$", host) else host
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def parse_reference(text: str) -> Reference:
    """InvalidReference says what was expected and which part is not that."""
    if text.startswith("oci:"):
        return _parse_layout(text)
    return _parse_registry(text)


def parse_source(source: str) -> tuple[Path | None, str, str]:
    """What `source` of a reference made: `oci:/abs/dir` → (dir, "", ""), `http(s)://host/repo` → (None, host, repo)."""
    if source.startswith("oci:") and len(source) > len("oci:"):
        return Path(source.removeprefix("oci:")), "", ""
    scheme, _, rest = source.partition("://")
    host, _, repository = rest.partition("/")
    if scheme not in ("http", "https") or not _HOST.fullmatch(host) or not _REPOSITORY.fullmatch(repository):
        raise InvalidReference(f"source '{source}': expected oci:DIR or http(s)://HOST[:PORT]/REPO")
    return None, host, repository


def _parse_layout(text: str) -> LayoutReference:
    rest, digest = _split_digest(text.removeprefix("oci:"), text)
    directory, separator, tag = rest.rpartition(":")
    if not separator or "/" in tag:
        directory, tag = rest, ""
    elif tag or digest:
        _check(_TAG, tag, "tag (letters, digits, '_', '.', '-', at most 128)", text)
    if not directory or "\0" in directory:
        raise InvalidReference(f"'{text}': expected oci:DIR:TAG, the directory is missing")
    if not tag and digest is None:
        raise InvalidReference(f"'{text}': expected oci:DIR:TAG or oci:DIR@sha256:…, received neither tag nor digest")
    return LayoutReference(Path(directory), tag or None, digest)


def _parse_registry(text: str) -> RegistryReference:
    rest, digest = _split_digest(text, text)
    host, separator, path = rest.partition("/")
    if not separator or not path:
        raise InvalidReference(f"'{text}': expected oci:DIR:TAG or HOST[:PORT]/REPO[:TAG][@DIGEST]")
    _check(_HOST, host, "host (HOST[:PORT])", text)
    repository, colon, tag = path.partition(":")
    _check(_REPOSITORY, repository, "repository (lower case, digits, and '.', '_', '-', '/' between)", text)
    if colon:
        _check(_TAG, tag, "tag (letters, digits, '_', '.', '-', at most 128)", text)
    return RegistryReference(host, repository, tag or (None if digest else DEFAULT_TAG), digest)


def _split_digest(rest: str, text: str) -> tuple[str, str | None]:
    before, separator, digest = rest.rpartition("@")
    if not separator:
        return rest, None
    if _DIGEST.fullmatch(digest):
        return before, digest
    if text.startswith("oci:") and ("/" in digest or not digest.startswith("sha256:")):
        return rest, None  # an @ in the directory's name
    raise InvalidReference(f"'{text}': expected sha256: and 64 hexadecimal digits behind @, received '{digest}'")


def _check(pattern: re.Pattern[str], value: str, what: str, text: str) -> None:
    if not pattern.fullmatch(value):
        raise InvalidReference(f"'{text}': expected a {what}, received '{value}'")

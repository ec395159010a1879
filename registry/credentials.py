"""Credentials of registries, from the auth files that docker and containers tools write."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path

import attrs
import msgspec

from registry.errors import RegistryError


class _Auth(msgspec.Struct):
    auth: str | None = None
    username: str | None = None
    password: str | None = None


class _AuthFile(msgspec.Struct):
    auths: dict[str, _Auth] = {}
    credential_helpers: dict[str, str] = msgspec.field(name="credHelpers", default={})
    credentials_store: str | None = msgspec.field(name="credsStore", default=None)


@attrs.frozen
class Credentials:
    """User and password by host (`HOST[:PORT]`), and the files that they came from, first one first."""

    files: tuple[Path, ...]
    by_host: dict[str, tuple[str, str]]

    def find(self, host: str) -> tuple[str, str] | None:
        return self.by_host.get(host)

    def basic(self, host: str) -> str | None:
        """The value behind `Authorization: Basic `, or None."""
        found = self.find(host)
        return base64.b64encode(":".join(found).encode()).decode() if found else None


def load_credentials(paths: Sequence[Path]) -> Credentials:
    """Reads auth files; the first that names a host wins. RegistryError: a file is there and cannot be understood."""
    by_host: dict[str, tuple[str, str]] = {}
    for path in paths:
        try:
            loaded = msgspec.json.decode(path.read_bytes(), type=_AuthFile)
        except OSError as error:
            raise RegistryError(f"{path}: cannot be read: {error.strerror}") from error
        except msgspec.MsgspecError as error:
            raise RegistryError(f"{path}: expected docker's auth file: {error}") from error
        for name, auth in loaded.auths.items():
            if pair := _pair(auth, path, name):
                by_host.setdefault(name.removeprefix("https://").removeprefix("http://").split("/")[0], pair)
    return Credentials(tuple(paths), by_host)


def _pair(auth: _Auth, path: Path, name: str) -> tuple[str, str] | None:
    if auth.username is not None and auth.password is not None:
        return auth.username, auth.password
    if not auth.auth:
        return None  # kept by a credential helper
    try:
        user, separator, password = base64.b64decode(auth.auth, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        separator = ""
    if not separator:
        raise RegistryError(f"{path}: the entry of {name}: expected base64 of user:password")
    return user, password

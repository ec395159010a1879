"""Credentials of registries: from the auth files of docker and containers tools, and the helpers that they name.

A file is read once. A helper (`docker-credential-NAME`, which keeps passwords elsewhere or makes short-lived ones) is
asked anew whenever a registry asks for authentication, since what it said last may have expired by then; it gets a
bounded time and its answer a bounded size. Keys of auth files are `HOST[:PORT]`, the same with a scheme or `/v1/`
around it (docker), or with a namespace behind it (containers); the longest that fits a repository counts.
"""

from __future__ import annotations

import base64
import binascii
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import msgspec

from registry.errors import AuthenticationFailed, RegistryError

HELPER_TIMEOUT_S = 15.0
MAX_HELPER_ANSWER_BYTES = 64 << 10
DOCKER_HUB = "registry-1.docker.io"
_DOCKER_HUB_NAMES = ("index.docker.io", "docker.io")
"""Under which auth files know it."""

_HELPER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class _Auth(msgspec.Struct):
    auth: str | None = None
    username: str | None = None
    password: str | None = None
    identity_token: str | None = msgspec.field(name="identitytoken", default=None)


class _AuthFile(msgspec.Struct):
    auths: dict[str, _Auth | None] | None = None
    credential_helpers: dict[str, str] | None = msgspec.field(name="credHelpers", default=None)
    credentials_store: str | None = msgspec.field(name="credsStore", default=None)


class _HelperAnswer(msgspec.Struct):
    username: str = msgspec.field(name="Username")
    secret: str = msgspec.field(name="Secret")


@attrs.frozen
class Credentials:
    """Where user and password of a registry are to be had.

    files    what was read, the first one to be asked first
    pairs    user and password by `HOST[:PORT][/NAMESPACE]`
    helpers  name of the helper by `HOST[:PORT][/NAMESPACE]`
    store    the helper for every other host, if there is one
    """

    files: tuple[Path, ...] = ()
    pairs: Mapping[str, tuple[str, str]] = attrs.field(factory=dict, repr=False)
    helpers: Mapping[str, str] = attrs.field(factory=dict)
    store: str | None = None

    def find(self, host: str, repository: str = "") -> tuple[str, str] | None:
        """User and password for a repository of `HOST[:PORT]`.

        Blocks while a helper is asked; AuthenticationFailed: it fails.
        """
        for key in _keys(host, repository):
            if key in self.helpers:
                return ask_helper(self.helpers[key], key)
            if key in self.pairs:
                return self.pairs[key]
        return ask_helper(self.store, host) if self.store else None

    def basic(self, host: str, repository: str = "") -> str | None:
        """The value behind `Authorization: Basic `, or None; otherwise as `find`."""
        found = self.find(host, repository)
        return base64.b64encode(":".join(found).encode()).decode() if found else None


def _keys(host: str, repository: str) -> Iterator[str]:
    parts = repository.split("/") if repository else []
    for name in (host, *_DOCKER_HUB_NAMES) if host == DOCKER_HUB else (host,):
        for count in range(len(parts), -1, -1):
            yield "/".join([name, *parts[:count]])


def load_credentials(paths: Sequence[Path]) -> Credentials:
    """Reads auth files; the first that names a host wins. RegistryError: one cannot be read or understood."""
    pairs: dict[str, tuple[str, str]] = {}
    helpers: dict[str, str] = {}
    store: str | None = None
    for path in paths:
        try:
            loaded = msgspec.json.decode(path.read_bytes(), type=_AuthFile)
        except OSError as error:
            raise RegistryError(f"{path}: cannot be read: {error.strerror}") from error
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RegistryError(f"{path}: expected docker's auth file (JSON): {error}; mend or remove it") from error
        fresh = {_key(name): _pair(auth, path, name) for name, auth in (loaded.auths or {}).items() if auth}
        asked = {_key(name): _helper(helper, path) for name, helper in (loaded.credential_helpers or {}).items()}
        known = pairs.keys() | helpers.keys()
        helpers |= {key: helper for key, helper in asked.items() if key not in known}
        pairs |= {key: pair for key, pair in fresh.items() if pair and key not in known}
        if store is None and loaded.credentials_store:
            store = _helper(loaded.credentials_store, path)
    return Credentials(tuple(paths), pairs, helpers, store)


def _key(name: str) -> str:
    """`https://host/v1/` → `host`."""
    bare = name.removeprefix("https://").removeprefix("http://").rstrip("/")
    host, separator, rest = bare.partition("/")
    return host if rest in ("v1", "v2") else f"{host}{separator}{rest}"


def _helper(name: str, path: Path) -> str:
    if not _HELPER_NAME.fullmatch(name):
        raise RegistryError(f"{path}: expected a credential helper's name, received '{name}'")
    return name


def _pair(auth: _Auth, path: Path, name: str) -> tuple[str, str] | None:
    if auth.username is not None and auth.password is not None:
        return auth.username, auth.password
    if auth.identity_token:
        raise RegistryError(
            f"{path}: the entry of {name} is an identity token; expected user and password, log in with an access key"
        )
    if not auth.auth:
        return None  # a helper keeps it
    try:
        user, separator, password = base64.b64decode(auth.auth, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        separator = ""
    if not separator:
        raise RegistryError(f"{path}: the entry of {name}: expected base64 of user:password; log in again")
    return user, password.rstrip("\0")


def ask_helper(name: str, host: str, timeout_s: float = HELPER_TIMEOUT_S) -> tuple[str, str] | None:
    """What `docker-credential-NAME get` says about a host; None: that it knows nothing.

    AuthenticationFailed: it fails.
    """
    program = f"docker-credential-{name}"
    with tempfile.TemporaryFile() as output:
        try:
            done = subprocess.run(
                [program, "get"],
                input=host.encode(),
                stdout=output,
                stderr=subprocess.DEVNULL,
                timeout=timeout_s,
                check=False,
            )
        except FileNotFoundError:
            raise AuthenticationFailed(
                f"{host}: the auth file names the credential helper {program}, which is not in $PATH"
            ) from None
        except OSError as error:
            raise AuthenticationFailed(f"{host}: {program} cannot be run: {error.strerror}") from error
        except subprocess.TimeoutExpired:
            raise AuthenticationFailed(f"{host}: {program} did not answer within {timeout_s:g} s") from None
        output.seek(0)
        data = output.read(MAX_HELPER_ANSWER_BYTES + 1)
    if done.returncode != 0:
        text = " ".join(data[:300].decode(errors="replace").split()) or "it says nothing"
        if "credentials not found" in text:
            return None
        raise AuthenticationFailed(f"{host}: {program} failed with status {done.returncode}: {text}")
    return _pair_of_answer(data, program, host)


def _pair_of_answer(data: bytes, program: str, host: str) -> tuple[str, str]:
    if len(data) > MAX_HELPER_ANSWER_BYTES:
        raise AuthenticationFailed(f"{host}: {program}: expected at most {MAX_HELPER_ANSWER_BYTES} bytes")
    try:
        answer = msgspec.json.decode(data, type=_HelperAnswer)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        # Without the decoder's words: the answer is a secret.
        raise AuthenticationFailed(f"{host}: {program}: expected JSON with Username and Secret") from None
    if answer.username == "<token>":
        raise AuthenticationFailed(f"{host}: {program} keeps an identity token; expected user and password")
    return answer.username, answer.secret

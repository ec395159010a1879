"""Environment variables and configuration files: read here and nowhere else.

The node's configuration is TOML; every key has a default, and an unknown key is an error, since a mistyped limit must
not become no limit."""

from __future__ import annotations

import argparse
import os
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs

from tools import exits, output

if TYPE_CHECKING:
    from registry import Credentials
    from weefs.peerconfig import PeersConfig

DEFAULT_RUN_DIR = Path("/run/weenv")
DEFAULT_STATE_DIR = Path("/var/lib/weenv")
SOCKET_VARIABLE = "WEENV_SOCKET"
CACHE_VARIABLE = "WEENV_CACHE"


def socket_path(given: Path | None) -> Path:
    """--socket, else $WEENV_SOCKET, else the default."""
    return given or Path(os.environ.get(SOCKET_VARIABLE) or DEFAULT_RUN_DIR / "envlet.sock")


def cache_path(given: Path | None) -> Path:
    """--cache, else $WEENV_CACHE, else the default."""
    return given or Path(os.environ.get(CACHE_VARIABLE) or DEFAULT_STATE_DIR / "cache")


def other_node() -> str | None:
    """$WEENV_SOCKET, when it leads to a daemon whose cache neither the default nor $WEENV_CACHE tells."""
    socket = os.environ.get(SOCKET_VARIABLE)
    if not socket or os.environ.get(CACHE_VARIABLE) or Path(socket) == DEFAULT_RUN_DIR / "envlet.sock":
        return None
    return socket


def auth_files() -> tuple[Path, ...]:
    """Where docker and containers keep credentials, those that exist, the first to be asked first."""
    home = Path(os.environ.get("HOME") or "/root")
    docker = Path(os.environ.get("DOCKER_CONFIG") or home / ".docker") / "config.json"
    candidates = [docker]
    if explicit := os.environ.get("REGISTRY_AUTH_FILE"):
        candidates.insert(0, Path(explicit))
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        candidates.append(Path(runtime) / "containers" / "auth.json")
    return tuple(path for path in candidates if path.is_file())


def credentials() -> Credentials | None:
    from registry import load_credentials

    files = auth_files()
    return load_credentials(files) if files else None


def conversions_path() -> Path:
    """Where this user's finished conversions are kept: $XDG_CACHE_HOME/weenv/convert."""
    home = Path(os.environ.get("HOME") or "/root")
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "weenv" / "convert"


def source_date_epoch() -> int | None:
    """$SOURCE_DATE_EPOCH: the latest time, seconds since 1970, that a reproducible build may show. CommandError."""
    text = os.environ.get("SOURCE_DATE_EPOCH")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise exits.CommandError(f"$SOURCE_DATE_EPOCH: expected seconds since 1970, received {text[:100]!r}", exits.USAGE)
    return int(text)


@attrs.frozen(kw_only=True)
class NodeSettings:
    """What `weenv node serve` is told. Sizes in bytes, times in seconds."""

    state_dir: Path = DEFAULT_STATE_DIR
    run_dir: Path = DEFAULT_RUN_DIR
    socket: Path | None = None
    cache_dir: Path | None = None
    runtime: str = "crun"
    cgroup_parent: str = "/weenv"
    cpu: float = 2.0
    memory: int = 2 << 30
    pids: int = 1024
    cache_size: int | None = None
    """None: as much as its filesystem has room for."""
    cache_free_min: int = 1 << 30
    fill: Literal["off", "idle", "eager"] = "idle"
    fill_rate: int | None = None
    """Bytes a second. None: no bound."""
    profiles: bool = True
    fuse_threads: int = 4
    chunk_deadline_s: float = 30.0
    view: Literal["auto", "kernel", "merged"] = "auto"
    host_network: bool = False
    metrics_listen: str | None = None
    peers_listen: str | None = None
    """None: no peers."""
    peers_name: str | None = None
    peers: tuple[str, ...] | None = None
    peers_dns: str | None = None
    peers_etcd: tuple[str, ...] | None = None
    peers_token_file: Path | None = None
    peers_open: bool = False
    peers_tls_cert: Path | None = None
    peers_tls_key: Path | None = None
    peers_tls_ca: Path | None = None
    peers_sources: tuple[str, ...] | None = None
    environments_max: int = 1024
    starting_max: int | None = None
    """None: 1.5 x the cores, as envlet decides."""

    @property
    def socket_path(self) -> Path:
        return self.socket or self.run_dir / "envlet.sock"

    @property
    def cache_path(self) -> Path:
        return self.cache_dir or self.state_dir / "cache"

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """Host and port of `metrics_listen`."""
        if self.metrics_listen is None:
            return None
        host, _, port = self.metrics_listen.rpartition(":")
        return host.removeprefix("[").removesuffix("]"), int(port)


    @property
    def peers_config(self) -> PeersConfig | None:
        """For the data plane. CommandError: the settings do not go together."""
        from weefs.peerconfig import PeersConfig, PeersRefused, check, read_token, tls_contexts

        if self.peers_listen is None:
            if self.peers or self.peers_dns or self.peers_etcd:
                raise exits.CommandError("peers_listen: expected it with peers, peers_dns or peers_etcd; there is none", exits.USAGE)
            return None

        def absolute(path: Path | None) -> str | None:
            return None if path is None else str(path.absolute())

        config = PeersConfig(
            listen=self.peers_listen,
            name=self.peers_name,
            members=[*(self.peers or ())],
            dns=self.peers_dns,
            etcd=[*(self.peers_etcd or ())],
            token_file=absolute(self.peers_token_file),
            open=self.peers_open,
            tls_cert=absolute(self.peers_tls_cert),
            tls_key=absolute(self.peers_tls_key),
            tls_ca=absolute(self.peers_tls_ca),
            sources=[*(self.peers_sources or ())],
        )
        try:
            check(config)
            read_token(config)
            tls_contexts(config)
        except PeersRefused as error:
            raise exits.CommandError(str(error), exits.USAGE) from error
        return config


VIEWS = ("auto", "kernel", "merged")
FILLS = ("off", "idle", "eager")
_CHOICES = {"view": VIEWS, "fill": FILLS}
_SIZES = {"memory": 4 << 20, "cache_size": 64 << 20, "cache_free_min": 0, "fill_rate": 64 << 10}
"""And the least that makes sense: in a smaller cache, a few readers' chunks and a plan's metadata leave no room for anything; a slower
fill could not keep to its rate with one chunk a second."""
_PATHS = {"state_dir", "run_dir", "socket", "cache_dir", "peers_token_file", "peers_tls_cert", "peers_tls_key", "peers_tls_ca"}
_LISTS = {"peers", "peers_etcd", "peers_sources"}
_TEXTS = {"runtime", "cgroup_parent", "view", "fill", "metrics_listen", "peers_listen", "peers_name", "peers_dns"}
_FLAGS = {"host_network", "peers_open", "profiles"}
_ADDRESSES = {"metrics_listen", "peers_listen", "peers_name"}


def _is_address(text: str) -> bool:
    """HOST:PORT, of an IPv6 address in brackets: whoever leaves the host out would serve the whole network."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]\s]+):(\d{1,5})", text)
    return match is not None and 0 < int(match[2]) < 65536


def _value(name: str, given: Any, path: Path) -> Any:
    field = next((field for field in attrs.fields(NodeSettings) if field.name == name), None)
    if field is None:
        known = ", ".join(field.name for field in attrs.fields(NodeSettings))
        raise exits.CommandError(f"{path}: unknown key '{name}'; expected one of {known}", exits.USAGE)
    value: Any = given
    if name in _PATHS:
        if not isinstance(value, str):
            raise exits.CommandError(f"{path}: {name}: expected a path, received {value!r}", exits.USAGE)
        return Path(value)
    if name in _LISTS:
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise exits.CommandError(f"{path}: {name}: expected a list of strings, received {value!r}", exits.USAGE)
        return tuple(value)
    if name in _SIZES and isinstance(value, str):
        try:
            value = output.parse_size(value)
        except argparse.ArgumentTypeError as error:
            raise exits.CommandError(f"{path}: {name}: {error}", exits.USAGE) from error
    expected: tuple[type, ...] = (
        (str,)
        if name in _TEXTS
        else (int, float)
        if name in ("cpu", "chunk_deadline_s")
        else (bool,)
        if name in _FLAGS
        else (int,)
    )
    if not isinstance(value, expected) or (isinstance(value, bool) and bool not in expected):
        wanted = " or ".join(kind.__name__ for kind in expected)
        raise exits.CommandError(f"{path}: {name}: expected {wanted}, received {value!r}", exits.USAGE)
    if name in _ADDRESSES and not _is_address(str(value)):
        raise exits.CommandError(f"{path}: {name}: expected \"HOST:PORT\", received {value!r}", exits.USAGE)
    if name in _SIZES and isinstance(value, int) and value < _SIZES[name]:
        raise exits.CommandError(f"{path}: {name}: expected at least {_SIZES[name]} bytes, received {value}", exits.USAGE)
    if name in _CHOICES and value not in _CHOICES[name]:
        raise exits.CommandError(f"{path}: {name}: expected one of {', '.join(_CHOICES[name])}, received {value!r}", exits.USAGE)
    return value


def load_node_settings(path: Path | None) -> NodeSettings:
    """The file's values over the defaults. CommandError names the key that is wrong."""
    if path is None:
        return NodeSettings()
    try:
        loaded = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise exits.CommandError(f"{path}: expected TOML: {error}", exits.USAGE) from error
    return NodeSettings(**{name: _value(name, value, path) for name, value in loaded.items()})

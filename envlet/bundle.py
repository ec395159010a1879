"""The OCI runtime configuration of an environment: values in, JSON-able values out.

What an environment may do is what docker allows by default, and less where a root needs no more: no network but
loopback unless it is lent the node's, no new privileges, masked paths, a short capability list. There is no seccomp
filter yet.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from envlet.users import ROOT, User

INIT_PATH = "/dev/.weenv-init"
"""Where our program is seen inside: on the environment's own /dev, so that the upper directory never has it."""
CONTROL_FD = 3
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

CAPABILITIES = tuple(
    f"CAP_{name}"
    for name in (
        "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "NET_RAW",
        "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
    )
)  # fmt: skip
MASKED_PATHS = (
    "/proc/acpi", "/proc/asound", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/sched_debug", "/proc/scsi",
    "/proc/timer_list", "/proc/timer_stats", "/sys/devices/virtual/powercap", "/sys/firmware",
)  # fmt: skip
READONLY_PATHS = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
NAMESPACES = ("pid", "mount", "ipc", "uts", "network", "cgroup")
OPEN_FILES_MAX = 1 << 20


@attrs.frozen
class BundleSpec:
    """What differs between environments."""

    root: Path
    """The merged root, mounted."""
    hostname: str
    cgroup_path: str
    """Absolute and not a root: an OCI runtime that gets an empty path acts on the group that it runs in itself."""
    init_program: Path
    """Our static program, on the machine."""
    workdir: str
    env: tuple[str, ...]
    open_files: int
    resolv_conf: Path | None = None
    """For an environment with the machine's network: what its /etc/resolv.conf is. None: loopback alone."""
    shm_bytes: int = 64 << 20


def merge_env(layers: Iterable[Iterable[str]], last: Mapping[str, str]) -> tuple[str, ...]:
    """`NAME=value` of the groups in plan order, then of the request; a later value replaces an earlier one, in its
    place.
    """
    merged: dict[str, str] = {"PATH": DEFAULT_PATH}
    for layer in layers:
        for item in layer:
            name, separator, value = item.partition("=")
            if name and separator:
                merged[name] = value
    merged.update(last)
    return tuple(f"{name}={value}" for name, value in merged.items())


def process_config(
    argv: Iterable[str], env: tuple[str, ...], workdir: str, user: User, *, terminal: bool, open_files: int
) -> dict[str, Any]:
    """The `process` object: of pid 1, or of a command run later. `open_files`: at most our own hard limit."""
    names = {item.partition("=")[0] for item in env}
    added = [] if "HOME" in names else [f"HOME={user.home}"]
    if terminal and "TERM" not in names:
        added.append("TERM=xterm")
    root_only = list(CAPABILITIES) if user.uid == 0 else []
    return {
        "terminal": terminal,
        "user": {"uid": user.uid, "gid": user.gid, "additionalGids": list(user.groups)},
        "args": list(argv),
        "env": [*env, *added],
        "cwd": workdir,
        "noNewPrivileges": True,
        "capabilities": {
            "bounding": list(CAPABILITIES),
            "effective": root_only,
            "permitted": root_only,
            "inheritable": [],
            "ambient": [],
        },
        "rlimits": [
            {"type": "RLIMIT_NOFILE", "soft": open_files, "hard": open_files},
            {"type": "RLIMIT_CORE", "soft": 0, "hard": 0},
        ],
        "oomScoreAdj": 200,
    }


def runtime_config(spec: BundleSpec) -> dict[str, Any]:
    """The whole `config.json`. Raises ValueError for a control group path that an OCI runtime must never get."""
    parts = [part for part in spec.cgroup_path.split("/") if part]
    if not spec.cgroup_path.startswith("/") or len(parts) < 2:
        raise ValueError(f"the control group path must be absolute and two levels deep; received {spec.cgroup_path!r}")
    return {
        "ociVersion": "1.0.2",
        "process": process_config(
            [INIT_PATH, "init", str(CONTROL_FD)], spec.env, spec.workdir, ROOT, terminal=False, open_files=spec.open_files
        ),
        "root": {"path": str(spec.root), "readonly": False},
        "hostname": spec.hostname,
        "mounts": _mounts(spec),
        "linux": {
            "cgroupsPath": spec.cgroup_path,
            "namespaces": [{"type": name} for name in NAMESPACES if name != "network" or spec.resolv_conf is None],
            "resources": {"devices": [{"allow": False, "access": "rwm"}]},
            "maskedPaths": list(MASKED_PATHS),
            "readonlyPaths": list(READONLY_PATHS),
        },
    }


def _mounts(spec: BundleSpec) -> list[dict[str, Any]]:
    def entry(destination: str, kind: str, source: str, *options: str) -> dict[str, Any]:
        return {"destination": destination, "type": kind, "source": source, "options": list(options)}

    quiet = ("nosuid", "noexec", "nodev")
    mounts = [
        entry("/proc", "proc", "proc", *quiet),
        entry("/dev", "tmpfs", "tmpfs", "nosuid", "strictatime", "mode=755", "size=65536k"),
        entry("/dev/pts", "devpts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"),
        entry("/dev/shm", "tmpfs", "shm", *quiet, "mode=1777", f"size={spec.shm_bytes}"),
        entry("/dev/mqueue", "mqueue", "mqueue", *quiet),
        entry("/sys", "sysfs", "sysfs", *quiet, "ro"),
        entry(INIT_PATH, "bind", str(spec.init_program), "bind", "ro", "nosuid", "nodev"),
    ]
    if spec.resolv_conf is not None and spec.resolv_conf.exists():
        mounts.append(entry("/etc/resolv.conf", "bind", str(spec.resolv_conf.resolve()), "bind", "ro", *quiet))
    return mounts

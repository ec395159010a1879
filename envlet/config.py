"""What a node daemon is told at its start: values only, read from files and variables elsewhere."""

import os
from pathlib import Path
from typing import Literal

import attrs

from envlet.types import CPU_MAX, CPU_MIN

SOCKET_PATH_MAX_BYTES = 107
INIT_PROGRAM = Path(__file__).parent / "weenv-init"


@attrs.frozen(kw_only=True)
class NodeConfig:
    """Every path is absolute. `state_dir` belongs to one daemon at a time (a lock file sees to it)."""

    state_dir: Path
    """Upper directories and what must outlive a restart. A filesystem that can be an overlay's upper (ext4, xfs,
    btrfs; not overlay).
    """
    run_dir: Path
    """Mount points, bundles, runtime state. Short: sockets are made below it."""
    socket_path: Path
    socket_group: int | None = None
    """The group that may use the socket besides root and the daemon's own user; None: the daemon's own group."""
    runtime: str = "crun"
    """crun or runc, a name to look for or an absolute path."""
    init_program: Path = INIT_PROGRAM
    cgroup_parent: str = "/weenv"
    """Of the environments' control groups, from the root of each hierarchy."""
    cpu: float = 2.0
    """Cores of an environment that does not say."""
    memory_bytes: int = 2 << 30
    pids: int = 1024
    view: Literal["auto", "kernel", "merged"] = "auto"
    """How roots are shown: `kernel` from EROFS images of the layers' metadata, `merged` by weefs itself; `auto` is `kernel` where the
    kernel can.
    """
    host_network: bool = False
    """Whether environments may ask for the machine's own network, as recipes that install packages do. What listens on its loopback and
    on abstract sockets is then theirs to talk to.
    """
    resolv_conf: Path = Path("/etc/resolv.conf")
    """Where such environments find their name servers."""
    environments_max: int = 1024
    starting_max: int = attrs.field(factory=lambda: (3 * (os.cpu_count() or 1) + 1) // 2)
    """How many are started at once; the rest waits, first come first served. Of 16 at once on 2 busy cores, 3 gave a
    median of 87-96 ms, 4 of 96-121, 8 of 102-133: the kernel's part of a start is serial in places.
    """
    starting_slot_s: float = 1.0
    """How long init commands keep a place among those that start: slow ones do not hold up the others."""
    remembered_max: int = 1000
    """How many deleted environments `env.get` still knows."""
    metrics_listen: tuple[str, int] | None = None
    """Host and port of GET /metrics for Prometheus; None: not served."""
    connections_max: int = 256
    requests_max: int = 1024
    """At once, of one connection."""

    def __attrs_post_init__(self) -> None:
        for path in (self.state_dir, self.run_dir, self.socket_path, self.init_program):
            if not path.is_absolute():
                raise ValueError(f"paths of the node are absolute; received {str(path)!r}")
        longest = max(len(os.fsencode(self.socket_path)), len(os.fsencode(self.run_dir)) + len("/console/0123456789.sock"))
        if longest > SOCKET_PATH_MAX_BYTES:
            raise ValueError(
                f"a socket below {self.run_dir} would need {longest} bytes, {SOCKET_PATH_MAX_BYTES} at most; choose a shorter path"
            )
        if self.view not in ("auto", "kernel", "merged"):
            raise ValueError(f"view is auto, kernel or merged; received {self.view!r}")
        if not CPU_MIN <= self.cpu <= CPU_MAX:
            raise ValueError(f"cpu is {CPU_MIN:g} to {CPU_MAX} cores; received {self.cpu:g}")
        if not self.cgroup_parent.startswith("/") or not self.cgroup_parent.strip("/"):
            raise ValueError(f"cgroup_parent is absolute and not the root; received {self.cgroup_parent!r}")

    @property
    def uppers_dir(self) -> Path:
        """One directory per environment, there for as long as anything of it is."""
        return self.state_dir / "envs"

    @property
    def bundles_dir(self) -> Path:
        return self.run_dir / "envs"

    @property
    def runtime_dir(self) -> Path:
        """The OCI runtime's own state."""
        return self.run_dir / "runtime"

    @property
    def images_dir(self) -> Path:
        """Mount points of images, one each."""
        return self.run_dir / "meta"

    @property
    def console_dir(self) -> Path:
        return self.run_dir / "console"

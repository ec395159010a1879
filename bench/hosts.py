"""Hosts on one machine, for measurements: network namespaces with an address and a link of their own, on one switch.

Nothing has a name in the machine's own network: the bridge is in a namespace, too, and a namespace lasts as long as a process is in it.
Each has a keeper, which waits for the end of a pipe that this process holds; and what runs on a host is told to end when its starter is
gone. So nothing is left however the measurement ends, by kill -9 as well.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

NETWORK = "10.77.0"
GIGABIT = 125e6
"""Bytes a second."""
BURST_BYTES = 256 << 10
"""That a link lets pass at once: more than a segment that the kernel has not cut up yet."""


@attrs.frozen
class Host:
    """A network namespace; `keeper`: the process that holds it."""

    address: str
    keeper: int

    @property
    def enter(self) -> list[str]:
        """Begins a command that runs there, and that is told to end (SIGTERM) when the thread that started it has ended."""
        return ["setpriv", "--pdeathsig", "TERM", "nsenter", f"--net=/proc/{self.keeper}/ns/net", "--"]

    def run(self, *command: str | Path) -> str:
        """Its output. SystemExit: it failed."""
        result = subprocess.run([*self.enter, *command], capture_output=True, text=True)
        if result.returncode != 0:
            raise SystemExit(f"{' '.join(map(str, command))}: status {result.returncode}: {result.stderr}")
        return result.stdout.strip()


@contextlib.contextmanager
def _namespace(address: str) -> Iterator[Host]:
    """In a session of its own: Ctrl-C ends first what runs there."""
    command = ["unshare", "--net", "sh", "-c", "echo; exec cat"]
    keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    try:
        if keeper.stdout.readline() != b"\n":
            raise SystemExit("a network namespace could not be made: expected to be root")
        host = Host(address, keeper.pid)
        host.run("ip", "link", "set", "lo", "up")
        yield host
    finally:
        keeper.stdin.close()
        keeper.wait()
        keeper.stdout.close()


def _connect(switch: Host, number: int, host: Host, bytes_per_s: float | None) -> None:
    port = f"port{number}"
    switch.run("ip", "link", "add", "name", port, "type", "veth", "peer", "name", "link0", "netns", str(host.keeper))
    switch.run("ip", "link", "set", port, "master", "switch", "up")
    host.run("ip", "address", "add", f"{host.address}/24", "dev", "link0")
    host.run("ip", "link", "set", "link0", "up")
    if bytes_per_s is not None:
        shape = ["root", "tbf", "rate", f"{int(bytes_per_s * 8)}bit", "burst", str(BURST_BYTES), "latency", "100ms"]
        switch.run("tc", "qdisc", "add", "dev", port, *shape)
        host.run("tc", "qdisc", "add", "dev", "link0", *shape)


@contextlib.contextmanager
def connected_hosts(n: int, bytes_per_s: float | None = GIGABIT) -> Iterator[Sequence[Host]]:
    """`n` hosts on one switch; each link lets so many bytes a second pass in each direction."""
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(_namespace(""))
        switch.run("ip", "link", "add", "name", "switch", "type", "bridge")
        switch.run("ip", "link", "set", "switch", "up")
        hosts = [stack.enter_context(_namespace(f"{NETWORK}.{number}")) for number in range(1, n + 1)]
        for number, host in enumerate(hosts, 1):
            _connect(switch, number, host, bytes_per_s)
        yield hosts


@contextlib.contextmanager
def registry_on(host: Host, directory: Path, port: int) -> Iterator[str]:
    """docker-registry on all addresses of a host, storing below `directory`; its HOST:PORT for others."""
    config = directory / "config.yml"
    config.write_text(
        "version: 0.1\nlog: {level: info, accesslog: {disabled: true}}\n"
        f'storage: {{filesystem: {{rootdirectory: "{directory}/storage"}}}}\nhttp: {{addr: ":{port}"}}\n'
    )
    with (directory / "log").open("wb") as log:
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "OTEL_TRACES_EXPORTER": "none"}
        command = [*host.enter, "docker-registry", "serve", config]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.PIPE, env=environment)
    assert process.stderr is not None
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            if b"listening on" in line:
                break
        else:
            raise SystemExit(f"docker-registry did not start:\n{b''.join(said).decode()}")
        drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        try:
            yield f"{host.address}:{port}"
        finally:
            process.terminate()
            process.wait()
            drain.wait()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()

"""`python -m bench.cold_start [ROOT]`: until the first program of a task has run (it imports a large package and runs some of its tests),
on a node that has never seen the task, from a registry 20 ms and 1 Gb/s away.

    full pull   the root as a tar.gz, downloaded and unpacked, then the program in it (chroot)
    on demand   an environment and the program in it; what is read is fetched when it is read
    profile     the same with a profile that another node has published beside the group
    warm        a second environment on that node

The kernel's caches are dropped before each but the last. Nothing is filled.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import attrs

from bench.lazy import _upload, measure_unpacked, registry
from bench.measure import WEENV, drop_caches
from bench.real_root import make_real_root
from bench.served import ServedNode, served_node
from bench.shaping import shaped
from tools.demo import groups
from tools.output import duration, print_table, size

PROGRAM = """\
import sympy
from sympy.core.tests import test_basic, test_symbol, test_numbers
from sympy.testing.pytest import Skipped, XFail
for module in (test_basic, test_symbol, test_numbers):
    for name in [name for name in vars(module) if name.startswith("test_")]:
        try:
            getattr(module, name)()
        except (Skipped, XFail):
            continue
"""


@attrs.frozen
class Start:
    """`read_bytes`: of what arrived, what was read; `waited`: READs that had to wait for a fetch."""

    wall_s: float
    arrived_bytes: int
    requests: int
    read_bytes: int
    waited: int = 0


def run_in(node: ServedNode, reference: str, program: str) -> tuple[float, str]:
    """A new environment, and the program in it: seconds, and its id."""
    begin = time.perf_counter()
    environment = node.create(reference)
    node.weenv("env", "exec", environment, "--", "/usr/bin/python3", "-B", "-c", program)
    return time.perf_counter() - begin, environment


def start(scratch: Path, reference: str, program: str, *, profiles: bool) -> tuple[Start, float]:
    """On a node of its own; and how long a second one takes."""
    settings = f'fill = "off"\nprofiles = {str(profiles).lower()}\n'
    drop_caches()
    with served_node(scratch, "auto", settings) as node:
        wall_s, environment = run_in(node, reference, program)
        plane = node.data_plane()
        (layer,) = plane["layers"].values()
        unread = plane["profiles"]["prefetched_bytes"] - plane["profiles"]["used_bytes"]
        requests = layer["requests"] + layer["metadata_requests"]
        arrived = layer["bytes"] + layer["metadata_bytes"]
        cold = Start(wall_s, arrived, requests, arrived - unread, plane["fuse"]["reads_waited"])
        warm_s, second = run_in(node, reference, program)
        node.weenv("env", "rm", environment, second)
    return cold, warm_s


def publish_profile(scratch: Path, reference: str, program: str) -> None:
    """By a node that has run the program once, and has written down what it read."""
    drop_caches()
    with served_node(scratch, "auto", 'fill = "off"\n') as node:
        cache = node.directory / "state/cache"
        _, environment = run_in(node, reference, program)
        node.weenv("env", "rm", environment)
        kept = scratch / "profiled"
        # The node writes it when it ends, and takes its directory along.
        node.process.terminate()
        node.process.wait()
        shutil.copytree(cache / "profiles", kept / "profiles")
    subprocess.run([WEENV, "profile", "publish", reference, "--cache", kept], check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, nargs="?", default=Path("build/bench/root"))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--scratch", type=Path, default=Path("build/bench"), help="needs twice the root's size")
    parser.add_argument("--round-trip", type=float, default=0.02, metavar="S")
    parser.add_argument("--rate", type=float, default=125e6, metavar="BYTES")
    parser.add_argument("--program", default=PROGRAM)
    arguments = parser.parse_args()
    root = groups.made_once(arguments.root.absolute(), make_real_root)
    arguments.scratch.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="cold-start-", dir=arguments.scratch.absolute()))
    try:
        measure(root, scratch, arguments)
    finally:
        shutil.rmtree(scratch)


def measure(root: Path, scratch: Path, arguments: argparse.Namespace) -> None:
    archive = scratch / "root.tar.gz"
    subprocess.run(f"tar --sort=name -C {root} -c . | gzip -6 > {archive}", shell=True, check=True)
    digest = f"sha256:{subprocess.run(['sha256sum', archive], check=True, capture_output=True, text=True).stdout.split()[0]}"
    archive_bytes = archive.stat().st_size
    (scratch / "registry").mkdir()
    with registry(scratch / "registry") as host, shaped(host, arguments.round_trip, arguments.rate) as far:
        push = [WEENV, "group", "push", f"{host}/bench/root:1", "--rootfs", root]
        pushed = subprocess.run(push, check=True, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL).stdout.strip()
        blob = _upload(host, archive, digest).replace(host, far)
        archive.unlink()
        reference = pushed.replace(host, far)
        found: dict[str, list[Start]] = {"full pull": [], "on demand": [], "profile": []}
        warm: list[float] = []
        for _ in range(arguments.runs):
            pulled_s = measure_unpacked(blob, arguments.program, scratch)
            found["full pull"].append(Start(pulled_s, archive_bytes, 1, archive_bytes))
            found["on demand"].append(start(scratch, reference, arguments.program, profiles=False)[0])
        publish_profile(scratch, reference, arguments.program)
        for _ in range(arguments.runs):
            cold, warm_s = start(scratch, reference, arguments.program, profiles=True)
            found["profile"].append(cold)
            warm.append(warm_s)
    report(found, warm)


def report(found: dict[str, list[Start]], warm: list[float]) -> None:
    medians = {name: statistics.median(one.wall_s for one in runs) for name, runs in found.items()}
    warm_s = statistics.median(warm)
    rows: list[tuple[object, ...]] = []
    for name, runs in found.items():
        last = runs[-1]
        share = f"{last.arrived_bytes / last.read_bytes:.2f}"
        rows.append((name, duration(medians[name]), size(last.arrived_bytes), last.requests, share, last.waited))
    rows.append(("warm", duration(warm_s), "", "", "", ""))
    print_table(("START", "TIME", "ARRIVED", "REQUESTS", "ARRIVED/READ", "READS WAITED"), rows)
    ratios = {**medians, "warm": warm_s}
    said = ", ".join(f"{medians['profile'] / ratios[name]:.2f} × {name}" for name in ("full pull", "on demand", "warm"))
    print(f"time with a profile: {said}")


if __name__ == "__main__":
    main()

"""`python -m bench.lazy [ROOT]`: what a large root costs before it can be used: lazily from a registry, against pulling
and unpacking it.

1. Opening: bytes and requests until `ls` answers, and the time from `weenv mount` to that.
2. A cold `import` of large packages inside the root: bytes fetched as a share of the layer, and the time, beside
   download + unpack + the same import of the root as a tar.gz. Caches of the kernel are dropped before each run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.measure import WEENV, drop_caches
from bench.real_root import make_real_root
from tools.demo import groups
from tools.output import share, size

IMPORTS = ("import pandas, scipy.stats, sklearn.linear_model", "import django, sympy", "import json")


@contextlib.contextmanager
def registry(directory: Path) -> Iterator[str]:
    """docker-registry on a loopback port; its HOST:PORT."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{probe.getsockname()[1]}"
    config = {"version": 0.1, "storage": {"filesystem": {"rootdirectory": str(directory)}}, "http": {"addr": host}}
    path = directory / "config.yml"
    path.write_text(json.dumps({**config, "log": {"level": "error", "accesslog": {"disabled": True}}}))
    process = subprocess.Popen(["docker-registry", "serve", path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(host.split(":"), 1):  # type: ignore[arg-type]
                break
            time.sleep(0.05)
        yield host
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def lazy_mount(reference: str, scratch: Path) -> Iterator[tuple[Path, dict[str, float], list[str]]]:
    """`weenv mount` with an empty cache; the mount point, and after the block the statistics that it printed."""
    mountpoint = Path(tempfile.mkdtemp(dir=scratch))
    times: dict[str, float] = {}
    output: list[str] = []
    begin = time.perf_counter()
    process = subprocess.Popen(
        [WEENV, "mount", "--format", "json", reference, mountpoint],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    process.stderr.readline()  # "mounted on …"
    times["mounted"] = time.perf_counter() - begin
    os.listdir(mountpoint)
    times["listed"] = time.perf_counter() - begin
    try:
        yield mountpoint, times, output
    finally:
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate()
        if process.returncode != 0:
            raise SystemExit(f"weenv mount ended with {process.returncode}: {stderr}")
        output.append(stdout)
        mountpoint.rmdir()


def run_import(root: Path, program: str) -> float:
    begin = time.perf_counter()
    command = ["/usr/sbin/chroot", root, "/usr/bin/python3", "-B", "-c", program]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={"PATH": "/usr/bin:/bin", "HOME": "/root"})
    return time.perf_counter() - begin


def measure_lazy(reference: str, program: str, scratch: Path) -> dict[str, float]:
    drop_caches()
    begin = time.perf_counter()
    with lazy_mount(reference, scratch) as (root, times, output):
        if program:
            run_import(root, program)
        total = time.perf_counter() - begin
    (layer,) = json.loads(output[0])["layers"].values()
    return times | layer | {"total": total}


def measure_unpacked(archive: str, program: str, scratch: Path) -> float:
    """Download the tar.gz over HTTP, unpack it, and import."""
    drop_caches()
    root = Path(tempfile.mkdtemp(dir=scratch))
    begin = time.perf_counter()
    subprocess.run(f"curl -sf {archive} | tar -xz --numeric-owner -C {root}", shell=True, check=True)
    run_import(root, program)
    total = time.perf_counter() - begin
    shutil.rmtree(root)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, nargs="?", default=Path("build/bench/root"))
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    root = groups.made_once(arguments.root.absolute(), make_real_root)
    scratch = Path(tempfile.mkdtemp(prefix="weenv-bench-", dir=root.parent))
    archive = root.parent / f"{root.name}.tar.gz"
    if not archive.exists():
        subprocess.run(f"tar --sort=name -C {root} -c . | gzip -6 > {archive}", shell=True, check=True)
    try:
        (scratch / "registry").mkdir()
        with registry(scratch / "registry") as host:
            push = [WEENV, "group", "push", f"{host}/bench/root:1", "--rootfs", root]
            reference = subprocess.run(
                push, check=True, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
            ).stdout.strip()
            digest = f"sha256:{subprocess.run(['sha256sum', archive], check=True, capture_output=True, text=True).stdout.split()[0]}"
            blob = _upload(host, archive, digest)
            report_opening(reference, arguments.runs, scratch)
            for program in IMPORTS:
                report_import(reference, blob, program, arguments.runs, scratch)
    finally:
        shutil.rmtree(scratch)


def _upload(host: str, archive: Path, digest: str) -> str:
    """The archive as a blob of the same registry; its URL."""
    base = f"http://{host}/v2/bench/root/blobs"
    headers = subprocess.run(
        ["curl", "-sfi", "-X", "POST", f"{base}/uploads/"], check=True, capture_output=True, text=True
    ).stdout
    location = next(
        line.split(" ", 1)[1].strip() for line in headers.splitlines() if line.lower().startswith("location:")
    )
    target = f"{location}&digest={digest}"
    subprocess.run(
        ["curl", "-sf", "-X", "PUT", "-T", archive, "-H", "Content-Type: application/octet-stream", target], check=True
    )
    return f"{base}/{digest}"


def report_opening(reference: str, runs: int, scratch: Path) -> None:
    results = [measure_lazy(reference, "", scratch) for _ in range(runs)]
    one = results[0]
    print(
        f"opening: metadata {size(one['metadata_bytes'])} in {one['metadata_requests']} request, contents {one['bytes']} B; "
        f"weenv mount to the first ls: {statistics.median(r['listed'] for r in results):.2f} s "
        f"(mounted after {statistics.median(r['mounted'] for r in results):.2f} s)"
    )


def report_import(reference: str, blob: str, program: str, runs: int, scratch: Path) -> None:
    lazy, unpacked = [], []
    for _ in range(runs):
        lazy.append(measure_lazy(reference, program, scratch))
        unpacked.append(measure_unpacked(blob, program, scratch))
    one = lazy[-1]
    lazy_s, unpacked_s = statistics.median(r["total"] for r in lazy), statistics.median(unpacked)
    print(
        f"{program}: fetched {size(one['bytes'])} of {size(one['stored_bytes'])} ({share(one['bytes'], one['stored_bytes'])}) in "
        f"{one['requests']} requests; lazily {lazy_s:.2f} s, unpacking first {unpacked_s:.2f} s (ratio {lazy_s / unpacked_s:.2f})"
    )


if __name__ == "__main__":
    main()

"""`python -m bench.convert [ROOT]`: throughput, memory and size of `weenv layer convert`, beside gzip and zstd of the
same tar.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
from pathlib import Path

from bench.measure import WEENV, Run, median_wall, run, side_by_side
from bench.real_root import make_real_root
from tools.demo import groups
from tools.output import size


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, nargs="?", default=Path("build/bench/root"))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--chunk-size", action="append", default=[], help="also convert with these, for their sizes")
    arguments = parser.parse_args()
    root = groups.made_once(arguments.root.absolute(), make_real_root)
    work = root.parent
    tar = work / f"{root.name}.tar"
    if not tar.exists():
        subprocess.run(["tar", "--sort=name", "--format=pax", "--xattrs", "-C", root, "-cf", tar, "."], check=True)
    bytes_in = tar.stat().st_size
    entries = int(subprocess.run(f"tar tf {tar} | wc -l", shell=True, check=True, capture_output=True).stdout)
    print(f"{tar.name}: {size(bytes_in)}, {entries} entries")

    def convert(jobs: int) -> Run:
        return run([WEENV, "layer", "convert", "-j", str(jobs), tar, work / f"j{jobs}.weenv"])

    commands = {
        "convert -j 1": lambda: convert(1),
        "convert -j 2": lambda: convert(2),
        "zstd -3": lambda: run(["zstd", "-q", "-f", "-3", tar, "-o", work / "root.tar.zst"]),
        "zstd -3 -T2": lambda: run(["zstd", "-q", "-f", "-3", "-T2", tar, "-o", work / "root.tar.zst2"]),
    }
    results = side_by_side(commands, arguments.runs)
    for name, runs in results.items():
        peak = max(one.peak_bytes for one in runs)
        wall = median_wall(runs)
        print(
            f"{name:14} {bytes_in / wall / 1e6:7.1f} MB/s of input, {wall:6.2f} s, CPU {runs[0].cpu_s:6.2f} s, peak {size(peak)}"
        )
    gzip = int(subprocess.run(f"gzip -6 < {tar} | wc -c", shell=True, check=True, capture_output=True).stdout)
    layer = (work / "j2.weenv").stat().st_size
    zstd = (work / "root.tar.zst").stat().st_size
    print(
        f"size: layer {size(layer)}, gzip -6 {size(gzip)} (layer is {layer / gzip:.3f} of it), zstd -3 {size(zstd)} ({layer / zstd:.3f})"
    )
    same = digest(work / "j1.weenv") == digest(work / "j2.weenv")
    print(f"-j 1 and -j 2: {'identical' if same else 'DIFFERENT'} bytes")
    for chunk_size in arguments.chunk_size:
        target = work / f"chunk-{chunk_size}.weenv"
        subprocess.run(
            [WEENV, "layer", "convert", "--chunk-size", chunk_size, tar, target], check=True, capture_output=True
        )
        inspected = json.loads(
            subprocess.run(
                [WEENV, "layer", "inspect", "--format", "json", target], check=True, capture_output=True
            ).stdout
        )
        blob, toc = inspected["size_bytes"], inspected["toc_bytes"]
        print(
            f"chunks of {chunk_size:>5}: {size(blob)} ({blob / zstd:.3f} of zstd -3), metadata {size(toc)}, {inspected['chunks']} chunks"
        )
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

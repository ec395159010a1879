"""`python -m bench.chunk_size [ROOT]`: what the chunk size costs: size of the layer and its metadata against bytes
fetched by real programs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from bench.lazy import IMPORTS, lazy_mount, run_import
from bench.measure import WEENV
from bench.real_root import make_real_root
from tools.demo import groups
from tools.output import print_table, share, size


def fetched(reference: str, program: str, scratch: Path) -> tuple[int, int]:
    """Bytes and requests that a cold run of `program` fetches."""
    with lazy_mount(reference, scratch) as (root, _times, output):
        run_import(root, program)
    (layer,) = json.loads(output[0])["layers"].values()
    return layer["bytes"], layer["requests"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, nargs="?", default=Path("build/bench/root"))
    parser.add_argument("--sizes", nargs="+", default=["64K", "128K", "256K", "1M"])
    arguments = parser.parse_args()
    root = groups.made_once(arguments.root.absolute(), make_real_root)
    scratch = Path(tempfile.mkdtemp(prefix="weenv-bench-", dir=root.parent))
    rows = []
    try:
        for chunk_size in arguments.sizes:
            layer = scratch / "layer"
            subprocess.run(
                [WEENV, "layer", "convert", "--chunk-size", chunk_size, root, layer], check=True, capture_output=True
            )
            inspect = subprocess.run(
                [WEENV, "layer", "inspect", "--format", "json", layer], check=True, capture_output=True
            )
            inspected = json.loads(inspect.stdout)
            reference = f"oci:{scratch / 'layout'}:{chunk_size}"
            subprocess.run([WEENV, "group", "push", reference, "--layer", layer], check=True, capture_output=True)
            stored = inspected["toc_offset"]
            row = [chunk_size, size(inspected["size_bytes"]), size(inspected["toc_bytes"])]
            for program in IMPORTS:
                count, requests = fetched(reference, program, scratch)
                row.append(f"{size(count)} ({share(count, stored)}), {requests} requests")
            rows.append(row)
    finally:
        shutil.rmtree(scratch)
    print_table(("CHUNKS", "LAYER", "METADATA", *IMPORTS), rows)


if __name__ == "__main__":
    main()

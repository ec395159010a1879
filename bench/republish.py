"""`python -m bench.republish [ROOT]`: a harness is published again after one small file changed: what is uploaded, and what a node that
has the earlier one must fetch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path

from bench.measure import WEENV
from bench.real_root import make_real_root
from tools.demo import groups
from tools.output import print_table, size

HARNESS = ("botocore", "numpy", "networkx", "pydantic", "pydantic_core", "jinja2", "requests", "yaml", "cryptography", "rich", "httpx2",
           "tokenizers", "regex", "pygments")  # fmt: skip
"""What an agent's harness in Python is made of, as far as the root has it."""
SMALL_BYTES = 64 * 1024


def weenv(*arguments: str | Path) -> str:
    return subprocess.run([WEENV, *arguments], check=True, capture_output=True, text=True).stdout


def push(tree: Path, reference: str) -> None:
    weenv("group", "push", reference, "--rootfs", tree, "--role", "harness")


def change(path: Path) -> None:
    """A line more, in the middle."""
    data = path.read_bytes()
    at = data.find(b"\n", len(data) // 2) + 1
    path.write_bytes(data[:at] + b"# one line more\n" + data[at:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, nargs="?", default=Path("build/bench/root"))
    parser.add_argument("--changes", type=int, default=10, help="files, each changed by itself")
    arguments = parser.parse_args()
    root = groups.made_once(arguments.root.absolute(), make_real_root)
    packages = root / "usr/local/lib" / f"python{groups.python_of(root)}" / "dist-packages"
    scratch = Path(tempfile.mkdtemp(prefix="weenv-bench-", dir=root.parent))
    try:
        tree = scratch / "tree"
        tree.mkdir()
        for name in HARNESS:
            if (packages / name).is_dir():
                shutil.copytree(packages / name, tree / "opt/harness" / name, symlinks=True)
        push(tree, f"oci:{scratch}/layout:before")
        files = sorted(path for path in tree.rglob("*.py") if 0 < path.stat().st_size < SMALL_BYTES)
        fetched, uploaded, whole = [], 0, 0
        for path in random.Random(1).sample(files, arguments.changes):
            data, status = path.read_bytes(), path.stat()
            change(path)
            push(tree, f"oci:{scratch}/layout:after")
            told = json.loads(weenv("group", "diff", f"oci:{scratch}/layout:before", f"oci:{scratch}/layout:after", "--format", "json"))
            fetched.append(told["summary"]["fetch_bytes"])
            whole = told["summary"]["size_bytes"]
            uploaded = json.loads(weenv("group", "resolve", f"oci:{scratch}/layout:after", "--format", "json"))["size_bytes"]
            path.write_bytes(data)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        rows = [
            ["files in the group", str(sum(1 for path in tree.rglob("*") if path.is_file()))],
            ["the group", size(whole)],
            ["uploaded again", size(uploaded)],
            ["a node fetches, median", f"{size(int(statistics.median(fetched)))} ({statistics.median(fetched) / whole:.2%})"],
            ["a node fetches, most", f"{size(max(fetched))} ({max(fetched) / whole:.2%})"],
        ]
        print_table([f"{arguments.changes} files, each changed by itself", ""], rows)
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()

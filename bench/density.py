"""`python -m bench.density`: what 100 environments of one plan on one node cost while they stand there, each with a process in it that has
walked its root and read some of it: memory of the data plane, of the daemon, the kernel's slab, and page cache, for each environment.

The demo's base and task groups, for each view. Figures are differences of /proc/meminfo and of /proc/PID/smaps_rollup, divided by the
number of environments; the first environment has warmed up what all share. """

from __future__ import annotations

import argparse
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs

from bench.measure import drop_caches
from bench.real_root import make_real_root
from bench.served import ServedNode, push, served_node
from tools.demo import groups
from tools.output import print_table, size

WALK = "find / -xdev -fprintf /dev/null '%s'"
READ = "cat /usr/lib/python3*/*.py > /dev/null"


@attrs.frozen
class Memory:
    """Bytes, of the machine's slab and page cache and of the two processes."""

    slab: int
    cached: int
    data_plane: int
    daemon: int

    @classmethod
    def now(cls, node: ServedNode) -> Memory:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        values = {name: int(lines[name].split()[0]) << 10 for name in ("Slab", "Cached")}
        return cls(values["Slab"], values["Cached"], _pss(node.data_plane()["process"]["pid"]), _pss(node.process.pid))

    def per_environment(self, before: Memory, n: int) -> list[str]:
        return [size(max(0, getattr(self, name) - getattr(before, name)) // n) for name in ("slab", "cached", "data_plane", "daemon")]


def _pss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise SystemExit(f"/proc/{pid}/smaps_rollup has no Pss")


def measure(view: str, reference: str, scratch: Path, n: int) -> list[tuple[str, ...]]:
    with served_node(scratch, view, "environments_max = 1024\ncpu = 0.5\n") as node:
        first = node.create(reference)
        for command in (WALK, READ):
            node.weenv("env", "exec", first, "--", "sh", "-c", command)
        drop_caches()
        node.weenv("env", "exec", first, "--", "sh", "-c", READ)
        rows = []
        before = Memory.now(node)
        with ThreadPoolExecutor(8) as threads:
            made = list(threads.map(lambda _: node.create(reference), range(n)))
            rows.append((view, "idle", *Memory.now(node).per_environment(before, n)))
            for what, command in (("read", READ), ("walked", WALK)):
                list(threads.map(lambda one, command=command: node.weenv("env", "exec", one, "--", "sh", "-c", command), made))
                rows.append((view, what, *Memory.now(node).per_environment(before, n)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, nargs="?", default=Path("build/bench/root"))
    parser.add_argument("--environments", type=int, default=100)
    arguments = parser.parse_args()
    root = groups.made_once(arguments.root.absolute(), make_real_root)
    kept = root.parent / "density"
    kept.mkdir(exist_ok=True)
    reference = push(kept, "root", root)
    with tempfile.TemporaryDirectory(prefix="weenv-bench-", dir=kept) as scratch:
        rows = [row for view in ("merged", "kernel") for row in measure(view, reference, Path(scratch), arguments.environments)]
    print_table(("VIEW", "AFTER", "SLAB", "PAGE CACHE", "WEEFS", "DAEMON"), rows)


if __name__ == "__main__":
    main()

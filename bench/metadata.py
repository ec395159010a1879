"""`python -m bench.metadata [ROOT]`: what people do with a tree of files, in an environment's root and in the same tree in other
filesystems, each below an overlay of its own: ext4 (unpacked), squashfs (kernel), squashfuse_ll, weefs' merged and kernel view.

warm: everything was read before. cold: the kernel's caches are dropped before each run, all layers are in the node's cache. Then the
requests of FUSE that a first, a second environment of the same plan, and one of another plan with the same layer cost.

Figures are medians of `--runs` rounds, side by side, and their ratio to ext4. """

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs

from bench.measure import Run, drop_caches
from bench.real_root import make_real_root
from bench.served import ServedNode, fill, make_squashfs, overlay_on, push, served_node, squashfs
from tools.demo import groups
from tools.output import duration, print_table

IMPORTS = "import pandas, scipy.stats, sklearn.linear_model, sympy, django.db, plotly, botocore, networkx"
REPOSITORY = "srv/repository"


@attrs.frozen
class Way:
    """One of the ways to show the tree: its root, in the namespace of a node."""

    name: str
    node: ServedNode
    root: Path


def workloads(packages: str) -> dict[str, Callable[[Way], Run]]:
    """Each a command on a root. `packages`: the directory with the Python packages, from the root."""
    return {
        "find": lambda way: way.node.run("find", way.root, "-xdev", "-fprintf", "/dev/null", "%p"),
        "find + stat": lambda way: way.node.run("find", way.root, "-xdev", "-fprintf", "/dev/null", "%s %m %T@ %n"),
        "grep -r": lambda way: way.node.run("sh", "-c", f"grep -rIc no-file-has-this {way.root}/{packages}/django > /dev/null; true"),
        "git status": lambda way: way.node.run("git", "-c", "safe.directory=*", "-C", way.root / REPOSITORY, "status", "--short"),
        "python imports": lambda way: way.node.run("chroot", way.root, "/usr/bin/python3", "-B", "-c", IMPORTS),
    }


def make_root(root: Path) -> None:
    """The real root, and in it a repository: a commit of a large package's source."""
    real = groups.made_once(root.with_name("root"), make_real_root)
    subprocess.run(["cp", "-a", f"{real}/.", root], check=True)
    repository = root / REPOSITORY
    repository.mkdir(parents=True)
    packages = root / packages_of(root)
    for name in ("django", "sympy", "networkx"):
        shutil.copytree(packages / name, repository / name, symlinks=True)
    identity = ["-c", "user.name=weenv", "-c", "user.email=weenv@localhost"]
    for arguments in (["init", "--quiet"], ["add", "."], [*identity, "commit", "--quiet", "-m", "all"]):
        subprocess.run(["git", *arguments], cwd=repository, check=True)


def packages_of(root: Path) -> str:
    return f"usr/local/lib/python{groups.python_of(root)}/dist-packages"


@contextlib.contextmanager
def all_ways(root: Path, scratch: Path, only: set[str]) -> Iterator[list[Way]]:
    """The tree in every way of `only`, ext4 first; all chunks and metadata are on this machine's disk."""
    reference = push(scratch, "tree", root)
    image = make_squashfs(root, scratch / "tree.squashfs")
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weenv-bench-", dir=scratch)))
        merged = stack.enter_context(served_node(work, "merged"))
        ways = [Way("ext4", merged, stack.enter_context(overlay_on(merged, root, work)))]
        for name, fuse in (("squashfs", False), ("squashfuse_ll", True)):
            if name in only:
                lower = stack.enter_context(squashfs(merged, image, work, fuse=fuse))
                ways.append(Way(name, merged, stack.enter_context(overlay_on(merged, lower, work))))
        for view in ("merged", "kernel"):
            if view in only:
                node = merged if view == "merged" else stack.enter_context(served_node(work, view))
                environment = node.create(reference)
                fill(node, environment)
                ways.append(Way(view, node, node.root(environment)))
        yield ways


def measure(ways: list[Way], packages: str, runs: int, only: list[str], *, cold: bool) -> None:
    rows = []
    for name, work in workloads(packages).items():
        if only and name not in only:
            continue
        times: dict[str, list[float]] = {way.name: [] for way in ways}
        for number in range(-1, runs):
            for way in ways:
                if cold:
                    drop_caches()
                wall_s = work(way).wall_s
                if number >= 0:  # the first round makes warm what is to be warm
                    times[way.name].append(wall_s)
        base = statistics.median(times["ext4"])
        ratios = [statistics.median(mine / its for mine, its in zip(times[way.name], times["ext4"], strict=True)) for way in ways]
        medians = [statistics.median(times[way.name]) for way in ways]
        rows.append((name, duration(base), *(f"{m * 1000:.0f} ms {r:.2f}" for m, r in zip(medians[1:], ratios[1:], strict=True))))
    print_table(("COLD" if cold else "WARM", "EXT4", *(f"{way.name.upper()} (x ext4)" for way in ways[1:])), rows)


def count_requests(view: str, root: Path, scratch: Path) -> None:
    """What a first, a second, and an environment of another plan cost: a walk with stat, and reading a package."""
    reference = push(scratch, "tree", root)
    other = scratch / "other"
    other.mkdir(exist_ok=True)
    (other / "task").write_text("another plan\n")
    with served_node(scratch, view) as node:
        fill(node, node.create(reference))
        drop_caches()
        rows = []
        plans = {"first": [reference], "same plan": [reference], "other plan": [reference, push(scratch, "other", other)]}
        for name, references in plans.items():
            environment = node.create(*references)
            before = node.fuse_requests()
            path = node.root(environment)
            node.run("find", path, "-xdev", "-fprintf", "/dev/null", "%s %m %T@ %n")
            walked = node.fuse_requests()
            node.run("sh", "-c", f"cat {path}/{packages_of(root)}/sympy/*/*.py > /dev/null")
            read = node.fuse_requests()
            rows.append((name, difference(before, walked), difference(walked, read)))
    print_table((f"REQUESTS, {view.upper()} VIEW", "WALK + STAT", "READ A PACKAGE"), rows)


def difference(before: dict[str, int], after: dict[str, int]) -> str:
    changed = {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0) and "forget" not in name}
    return f"{sum(changed.values())}" + (f" ({', '.join(f'{name} {n}' for name, n in changed.items())})" if changed else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, nargs="?", default=Path("build/bench/tree"))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", action="append", choices=[*workloads("")], help="default: all")
    parser.add_argument("--part", choices=("warm", "cold", "requests"), action="append", help="default: all")
    arguments = parser.parse_args()
    root = groups.made_once(arguments.root.absolute(), make_root)
    scratch = root.parent / "metadata"
    scratch.mkdir(exist_ok=True)
    parts = arguments.part or ["warm", "cold", "requests"]
    packages = packages_of(root)
    if "warm" in parts:
        with all_ways(root, scratch, {"merged", "kernel"}) as ways:
            measure(ways, packages, arguments.runs, arguments.only or [], cold=False)
    if "cold" in parts:
        with all_ways(root, scratch, {"squashfs", "squashfuse_ll", "merged", "kernel"}) as ways:
            measure(ways, packages, arguments.runs, arguments.only or [], cold=True)
    if "requests" in parts:
        for view in ("merged", "kernel"):
            count_requests(view, root, scratch)


if __name__ == "__main__":
    main()

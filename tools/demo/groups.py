"""Builds the demo's four root directories from real input: Debian's archive and PyPI.

Kept below the build directory for the next run.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

PROJECT = "jinja2"
VERSIONS = ("3.1.4", "3.1.5", "3.1.6")
"""Its releases become the commits of the task's git repository."""
DEPENDENCIES = ("MarkupSafe", "pytest", "trio")
PROGRAMS = Path(__file__).parent
GIT_ENVIRONMENT = {
    "GIT_AUTHOR_NAME": "demo", "GIT_AUTHOR_EMAIL": "demo@localhost", "GIT_COMMITTER_NAME": "demo",
    "GIT_COMMITTER_EMAIL": "demo@localhost",
    "GIT_AUTHOR_DATE": "2025-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2025-01-01T00:00:00Z",
    "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull,
}  # fmt: skip


def _run(command: list[str], cwd: Path | None = None) -> str:
    result = subprocess.run(command, cwd=cwd, env=os.environ | GIT_ENVIRONMENT, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command[:4])} … failed with status {result.returncode}:\n"
            f"{result.stdout[-2000:]}{result.stderr[-2000:]}"
        )
    return result.stdout


def made_once(directory: Path, make: Callable[[Path], None]) -> Path:
    """`directory`, made by `make` in another place and renamed, unless it is there."""
    if not directory.exists():
        unfinished = directory.with_name(directory.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        make(unfinished)
        unfinished.rename(directory)
    return directory


def suite() -> str:
    """The distribution of this machine, so that its own mirrors and keys serve."""
    for line in Path("/etc/os-release").read_text().splitlines():
        if line.startswith("VERSION_CODENAME="):
            return line.partition("=")[2].strip('"')
    raise RuntimeError("/etc/os-release: expected VERSION_CODENAME")


def make_base(root: Path) -> None:
    """Debian's (or Ubuntu's) minimal root with python3 and git, without what no task reads."""
    root.rmdir()
    _run(
        [
            "mmdebstrap", "--quiet", "--variant=minbase", "--include=python3,git", suite(), str(root),
            "--dpkgopt=path-exclude=/usr/share/man/*", "--dpkgopt=path-exclude=/usr/share/doc/*",
        ]
    )  # fmt: skip
    shutil.rmtree(root / "dev")
    (root / "dev").mkdir()  # device nodes are the runtime's business


def python_of(root: Path) -> str:
    """Version of the root's python3, such as 3.11."""
    return (root / "usr/bin/python3").readlink().name.removeprefix("python")


def make_task(root: Path, base: Path) -> None:
    """The project's git repository at /src, its dependencies at /opt/deps."""
    repository = root / "src"
    repository.mkdir()
    _run(["git", "init", "--quiet", "--initial-branch=main", str(repository)])
    # The index's stat data does not survive packing: without these, `git status` would read the whole work tree.
    _run(["git", "config", "core.checkStat", "minimal"], repository)
    _run(["git", "config", "core.trustctime", "false"], repository)
    for version in VERSIONS:
        for entry in repository.iterdir():
            if entry.name != ".git":
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        _unpack_release(version, repository)
        _run(["git", "add", "--all", "--force"], repository)
        _run(["git", "commit", "--quiet", "-m", f"{PROJECT} {version}"], repository)
        _run(["git", "tag", version], repository)
    _run(["git", "gc", "--quiet"], repository)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--target",
        str(root / "opt/deps"),
        "--only-binary=:all:",
        "--no-compile",
    ]
    pip += [
        "--python-version",
        python_of(base),
        "--implementation",
        "cp",
        "--platform",
        f"manylinux2014_{platform.machine()}",
    ]
    _run([*pip, *DEPENDENCIES])


def _unpack_release(version: str, repository: Path) -> None:
    downloads = repository.parent.parent / "downloads"
    if not list(downloads.glob(f"*{version}.tar.gz")):
        _run(
            [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--no-binary=:all:",
                "-d",
                str(downloads),
                f"{PROJECT}=={version}",
            ]
        )
    archive = next(downloads.glob(f"*{version}.tar.gz"))
    _run(
        [
            "tar",
            "--extract",
            "--gzip",
            "--file",
            str(archive),
            "--strip-components=1",
            "--no-same-owner",
            "-C",
            str(repository),
        ]
    )


def make_harness(root: Path) -> None:
    target = root / "opt/harness/repair.py"
    target.parent.mkdir(parents=True)
    shutil.copy(PROGRAMS / "harness/repair.py", target)
    target.chmod(0o755)


def make_evaluator(root: Path, task: Path) -> None:
    """/eval: the hidden tests, and the visible ones as they were before anybody could change them."""
    shutil.copytree(task / "src/tests", root / "eval")
    for name in ("test_hidden.py", "evaluate.py"):
        shutil.copy(PROGRAMS / "evaluator" / name, root / "eval" / name)
    for async_suite in (root / "eval").glob("test_async*.py"):
        async_suite.unlink()

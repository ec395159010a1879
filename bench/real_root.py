"""`python -m bench.real_root DIR`: a real root of about 1 GB: Debian with python3 and git, and a large Python
environment from PyPI.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

from tools.demo import groups

PACKAGES = (
    "numpy", "scipy", "pandas", "matplotlib", "scikit-learn", "sympy", "django", "plotly", "botocore", "pyarrow",
    "polars", "opencv-python-headless", "ansible", "transformers", "networkx",
)  # fmt: skip


def make_real_root(root: Path) -> None:
    """Makes `root`; needs the archives' mirrors and about five minutes."""
    groups.make_base(root)
    target = root / "usr/local/lib" / f"python{groups.python_of(root)}" / "dist-packages"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target), "--only-binary=:all:"]
    command += ["--no-compile", "--python-version", groups.python_of(root), "--implementation", "cp"]
    command += [
        "--platform",
        f"manylinux2014_{platform.machine()}",
        "--platform",
        f"manylinux_2_28_{platform.machine()}",
    ]
    subprocess.run([*command, *PACKAGES], check=True)


def main() -> None:
    root = groups.made_once(Path(sys.argv[1]).absolute(), make_real_root)
    entries = sum(1 for _ in root.rglob("*"))
    print(f"{root}: {entries} entries")


if __name__ == "__main__":
    main()

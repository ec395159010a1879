"""`python -m bench.recovery [--kills N]`: weefs killed N times in a row under 8 readers that compare every byte, with RESEND and without.

The exercise is that of tests/test_weefs_recovery.py, with more kills and more files. Exit status 1 when any reader met an error.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from weefs_kills import exercise

FILES_PER_KILL = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100, metavar="N")
    parser.add_argument("--delay", type=float, default=0.02, metavar="S", help="of each answer of the registry, seconds")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    failed = False
    for resend in (True, False):
        with tempfile.TemporaryDirectory() as directory:
            counted = exercise(
                Path(directory),
                resend=resend,
                kills=arguments.kills,
                files=max(60, FILES_PER_KILL * arguments.kills),
                delay_s=arguments.delay,
                seed=arguments.seed,
            )
        print("with RESEND" if resend else "without RESEND", *counted.lines(), sep="\n  ")
        for error in counted.errors[:10]:
            print(f"  {error}")
        failed = failed or bool(counted.errors)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

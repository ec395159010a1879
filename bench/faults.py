"""`python -m bench.faults`: what readers see of a registry that fails: a table, one kind of failure a row.

12 readers want as many chunks while it fails; an outage that passes takes a quarter of the deadline. Then the registry is well again,
and everything is read. The exercise is that of tests/test_registry_outages.py. Exit status 1 when anything was not as it must be."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from outages import CHUNKS, a_layer, exercise, failures, outages

from tools.output import duration, print_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deadline", type=float, default=4.0, metavar="S", help="of a chunk, seconds")
    arguments = parser.parse_args()
    rows, wrong = [], []
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as quiet:
        quiet.enter_context(contextlib.redirect_stderr(quiet.enter_context(open(os.devnull, "w"))))
        logging.disable()
        layer = a_layer(Path(directory))
        for outage in outages():
            seen = exercise(Path(directory) / "m", *layer, outage, deadline_s=arguments.deadline)
            again = "yes" if seen.right_afterwards == CHUNKS else f"no, {CHUNKS - seen.right_afterwards} failed"
            rows.append((outage.name, seen.right, seen.failed, seen.wrong, duration(seen.longest_s), again))
            wrong += [f"{outage.name}: {failure}" for failure in failures(outage, seen)]
    print_table(("WHAT FAILS", "RIGHT", "EIO", "WRONG", "LONGEST WAIT", "WORKS AGAIN"), rows)
    print("\n".join(wrong) or "all as declared")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

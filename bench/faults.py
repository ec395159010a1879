"""`python -m bench.faults [registry|peers]`: what readers see of a registry, and of peers, that fail: a table each, a failure a row.

registry   12 readers want as many chunks while it fails; an outage that passes takes a quarter of the deadline. Then the registry is well
           again, and everything is read. The exercise is that of tests/test_registry_outages.py.
peers      12 readers want as many chunks that the node's peers have, and the registry has, too. Then all is well again, and everything is
           read. The exercise is that of tests/test_peer_outages.py.

Exit status 1 when anything was not as it was declared."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from outages import CHUNKS, Seen, a_layer, exercise, failures, outages
from peer_outages import PeerOutage, PeerSeen, exercise_peers, peer_failures, peer_outages

from tools.output import duration, print_table, size

PEERS_DEADLINE_S = 30.0
"""Where somebody has the bytes, it must not be reached."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What is logged of failures that are made is of no interest here."""
    with contextlib.redirect_stderr(open(os.devnull, "w")) as nowhere, nowhere:
        logging.disable()
        yield
        logging.disable(logging.NOTSET)


def again(seen: Seen) -> str:
    return "yes" if seen.right_afterwards == CHUNKS else f"no, {CHUNKS - seen.right_afterwards} failed"


def of_registry(scratch: Path, deadline_s: float) -> list[str]:
    """Prints the table; what was not as declared."""
    rows, wrong = [], []
    with quiet():
        layer = a_layer(scratch)
        for outage in outages():
            seen = exercise(scratch / "m", *layer, outage, deadline_s=deadline_s)
            rows.append((outage.name, seen.right, seen.failed, seen.wrong, duration(seen.longest_s), again(seen)))
            wrong += [f"{outage.name}: {failure}" for failure in failures(outage, seen)]
    print_table(("WHAT FAILS", "RIGHT", "EIO", "WRONG", "LONGEST WAIT", "WORKS AGAIN"), rows)
    return wrong


def _asked_again(outage: PeerOutage, seen: PeerSeen) -> str:
    if seen.left_out:
        return f"{seen.left_out} left out" if outage.lies else f"no: {seen.left_out} left out"
    return "yes" if seen.asked_again else "no"


def of_peers(scratch: Path, deadline_s: float) -> list[str]:
    """Prints the table; what was not as declared."""
    rows, wrong = [], []
    with quiet():
        layer = a_layer(scratch)
        for number, outage in enumerate(peer_outages()):
            patience_s = deadline_s if outage.must_fail else PEERS_DEADLINE_S
            seen = exercise_peers(scratch / f"scene{number}", *layer, outage, deadline_s=patience_s)
            row = (outage.name, seen.right, seen.failed, seen.wrong, size(seen.from_peers), duration(seen.longest_s), again(seen))
            rows.append((*row, _asked_again(outage, seen)))
            wrong += [f"{outage.name}: {failure}" for failure in peer_failures(outage, seen)]
    print_table(("WHAT FAILS", "RIGHT", "EIO", "WRONG", "SENT BY PEERS", "LONGEST WAIT", "WORKS AGAIN", "PEERS ASKED AGAIN"), rows)
    return wrong


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description=__doc__, formatter_class=formatter)
    parser.add_argument("what", nargs="?", choices=("registry", "peers"), help="default: both")
    parser.add_argument("--deadline", type=float, default=4.0, metavar="S", help="of a chunk, seconds")
    arguments = parser.parse_args()
    wrong = []
    for what, show in (("registry", of_registry), ("peers", of_peers)):
        if arguments.what in (None, what):
            with tempfile.TemporaryDirectory(prefix="bench-faults-") as directory:
                wrong += show(Path(directory), arguments.deadline)
            print()
    print("\n".join(wrong) or "all as declared")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

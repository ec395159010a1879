"""`python -m bench.create`: how long 16 environments at once take to be ready, warm, by stage; and one at a time.

The demo's groups and mutations. The clients are threads of one process, as a rollout server's would be; what is timed
is the daemon's own account. """

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from envlet.types import EnvironmentInfo
from tools.demo.__main__ import Batch, daemon, percentile_95, publish
from tools.demo.faults import FAULTS
from tools.output import duration, print_table

STAGES = ("resolve_s", "mount_s", "queue_s", "runtime_s", "mutation_s", "total_s")


def table(title: str, rounds: list[list[EnvironmentInfo]]) -> None:
    rows = []
    for stage in STAGES:
        values = [getattr(environment.timings, stage) for made in rounds for environment in made]
        rows.append((stage.removesuffix("_s"), duration(statistics.median(values)), duration(percentile_95(values))))
    print_table((title, "MEDIAN", "P95"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--build", type=Path, default=Path("build/demo"))
    arguments = parser.parse_args()
    arguments.build.mkdir(parents=True, exist_ok=True)
    published = publish(arguments.build.absolute())
    scratch = Path(tempfile.mkdtemp(prefix="weenv-bench-"))
    try:
        with daemon(scratch) as socket:
            batch = Batch(published, socket, [FAULTS[i % len(FAULTS)] for i in range(arguments.environments)])
            batch.remove_all(batch.create_all())  # what is cold becomes warm
            together, walls = [], []
            for _ in range(arguments.rounds):
                begin = time.perf_counter()
                together.append(batch.create_all())
                walls.append(time.perf_counter() - begin)
                batch.remove_all(together[-1])
            alone = []
            for fault in FAULTS[:4] * 3:
                alone.append([batch.create(fault)])
                batch.remove_all(alone[-1])
            print()
            table(f"{arguments.environments} AT ONCE, {arguments.rounds} ROUNDS", together)
            print(f"all ready after {duration(statistics.median(walls))} (median)\n")
            table("ONE AT A TIME", alone)
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()

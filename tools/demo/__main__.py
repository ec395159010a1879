"""`make demo`: the main job on real input, from layers to a reward, by hand once and then 16 at once. Leaves nothing
behind but its build directory.

The first environment goes through the command line, each command shown as a user would type it. The 16 go through the
client, in threads, so that what is timed is the daemon and not the start of 16 Python interpreters."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs

from envlet.client import Client
from envlet.types import EnvironmentInfo
from tools import exits, output
from tools.demo import groups
from tools.demo.faults import FAULTS, Fault

WEENV = Path(sys.executable).with_name("weenv")
TIMES = ("resolve_s", "mount_s", "runtime_s", "mutation_s", "queue_s", "total_s")
LIMIT_S = 600
ROUNDS = 3
"""Of making all environments at once; the figures are of all rounds together."""
TASK_ENV = ("PYTHONPATH=/src/src:/opt/deps", "PYTHONDONTWRITEBYTECODE=1")


def step(text: str) -> None:
    print(f"\n== {text}", flush=True)


def weenv(*arguments: str, show: bool = True, shown: Sequence[str] | None = None) -> str:
    """Runs the command line, shows the command and what it printed; returns stdout."""
    if show:
        print(f"$ {shlex.join(['weenv', *(shown or arguments)])}", flush=True)
    result = subprocess.run([WEENV, *arguments], stdout=subprocess.PIPE, text=True)
    if result.returncode != 0:
        raise SystemExit(f"demo: weenv {arguments[0]} {arguments[1]} ended with status {result.returncode}")
    if show and result.stdout:
        print(result.stdout.rstrip(), flush=True)
    return result.stdout.strip()


@attrs.frozen
class Published:
    """Layer groups and, for each fault, the shell command that makes the repository faulty."""

    base: str
    task: str
    harness: str
    evaluator: str
    init: dict[str, str]


def publish(build: Path) -> Published:
    step("1. four layer groups from real input")
    begin = time.perf_counter()
    base = groups.made_once(build / "base", groups.make_base)
    task = groups.made_once(build / "task", lambda root: groups.make_task(root, base))
    shutil.rmtree(build / "harness", ignore_errors=True)
    shutil.rmtree(build / "evaluator", ignore_errors=True)
    harness = groups.made_once(build / "harness", groups.make_harness)
    evaluator = groups.made_once(build / "evaluator", lambda root: groups.make_evaluator(root, task))
    print(
        f"base (Debian, python3, git), task ({groups.PROJECT}, its tests, its dependencies), harness, evaluator: "
        f"{output.duration(time.perf_counter() - begin)}"
    )
    step("2. published into an OCI image layout, each under a reference of its own")
    shutil.rmtree(build / "registry", ignore_errors=True)
    layout = f"oci:{build / 'registry'}"
    references = {
        "base": weenv("group", "push", f"{layout}:base", "--rootfs", str(base), "--role", "base"),
        "task": weenv(
            "group",
            "push",
            f"{layout}:task",
            "--rootfs",
            str(task),
            "--role",
            "task",
            "--workdir",
            "/src",
            "--env",
            TASK_ENV[0],
            "--env",
            TASK_ENV[1],
        ),
        "harness": weenv("group", "push", f"{layout}:harness", "--rootfs", str(harness), "--role", "harness"),
        "evaluator": weenv("group", "push", f"{layout}:evaluator", "--rootfs", str(evaluator), "--role", "evaluator"),
    }
    init = {fault.name: f"git apply <<'EOF'\n{fault.patch(task / 'src')}EOF" for fault in FAULTS}
    return Published(init=init, **references)


@contextlib.contextmanager
def daemon(scratch: Path) -> Iterator[Path]:
    """The node daemon with a cold cache; ended and waited for."""
    config = scratch / "node.toml"
    config.write_text(
        f'state_dir = "{scratch}/state"\nrun_dir = "{scratch}/run"\ncgroup_parent = "/weenv-demo-{os.getpid()}"\n'
    )
    socket = scratch / "run/envlet.sock"
    with (scratch / "envlet.log").open("wb") as log:
        process = subprocess.Popen([WEENV, "node", "serve", "--config", config], stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 30
        while not socket.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"demo: the daemon did not start:\n{(scratch / 'envlet.log').read_text()}")
            time.sleep(0.02)
        yield socket
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(60)
        if status != 0:
            print((scratch / "envlet.log").read_text(), file=sys.stderr)
            raise SystemExit(f"demo: the daemon ended with status {status}")


def by_hand(published: Published, socket: Path, scratch: Path, fault: Fault) -> dict[str, Any]:
    step("3. one task by hand: make an environment, break it, let the harness repair it, judge the diff in a fresh one")
    os.environ["WEENV_SOCKET"] = str(socket)
    short = {getattr(published, role): f"oci:registry:{role}" for role in ("base", "task", "harness", "evaluator")}

    def create(*options: str, **roles: str) -> str:
        arguments = ["env", "create"]
        for reference in roles.values():
            arguments += ["--group", reference]
        arguments += options
        shown = [
            short.get(argument, argument if "\n" not in argument else f"git apply <{fault.name}.patch>")
            for argument in arguments
        ]
        return weenv(*arguments, shown=shown)

    environment = create(
        "--init", published.init[fault.name], base=published.base, task=published.task, harness=published.harness
    )
    cold = json.loads(weenv("env", "inspect", environment, show=False))
    weenv("env", "exec", environment, "--", "git", "diff", "--stat")
    weenv("env", "exec", environment, "--timeout", "120", "--", "/opt/harness/repair.py", "/src", fault.tests)
    diff = str(scratch / "solution.tar")
    weenv("env", "diff", environment, "-o", diff, shown=["env", "diff", environment, "-o", "solution.tar"])
    evaluation = create(
        "--role", "evaluation", "--apply", diff, base=published.base, task=published.task, evaluator=published.evaluator
    )
    reward = json.loads(weenv("env", "exec", evaluation, "--", "python3", "/eval/evaluate.py"))
    weenv("env", "rm", environment, evaluation)
    if reward["reward"] != 1.0:
        raise SystemExit(f"demo: the solution of {fault.name} was not accepted: {reward}")
    return dict(cold)


@attrs.frozen
class Episode:
    fault: str
    execution: EnvironmentInfo
    evaluation: EnvironmentInfo
    repair: dict[str, Any]
    reward: float


class Batch:
    """One client for each of the episodes that run at once."""

    def __init__(self, published: Published, socket: Path, faults: Sequence[Fault]) -> None:
        self._published = published
        self._socket = socket
        self._faults = faults

    def create(self, fault: Fault) -> EnvironmentInfo:
        p = self._published
        with Client(self._socket) as client:
            return client.create([p.base, p.task, p.harness], init=[p.init[fault.name]], labels={"fault": fault.name})

    def create_all(self) -> list[EnvironmentInfo]:
        with ThreadPoolExecutor(len(self._faults)) as pool:
            return list(pool.map(self.create, self._faults))

    def work(self, pair: tuple[Fault, EnvironmentInfo]) -> Episode:
        """The harness, the diff, the evaluation, in order; removes both environments."""
        fault, execution = pair
        p = self._published
        with Client(self._socket) as client, tempfile.TemporaryFile() as diff:
            result = client.exec(execution.id, ["/opt/harness/repair.py", "/src", fault.tests], timeout_s=LIMIT_S)
            if result.timed_out or result.exit_code not in (0, 1):
                how = f"was killed after {LIMIT_S} s" if result.timed_out else f"ended with {result.exit_code}"
                raise SystemExit(f"demo: the harness of {fault.name} {how}: {result.stderr.decode(errors='replace')}")
            client.diff(execution.id, diff.fileno())
            client.delete(execution.id)
            diff.seek(0)
            evaluation = client.create([p.base, p.task, p.evaluator], role="evaluation", apply_fd=diff.fileno())
            judged = client.exec(evaluation.id, ["python3", "/eval/evaluate.py"], timeout_s=LIMIT_S)
            client.delete(evaluation.id)
            return Episode(
                fault.name, execution, evaluation, json.loads(result.stdout), json.loads(judged.stdout)["reward"]
            )

    def remove_all(self, made: Sequence[EnvironmentInfo]) -> None:
        def remove(environment: EnvironmentInfo) -> None:
            with Client(self._socket) as client:
                client.delete(environment.id)

        with ThreadPoolExecutor(len(made)) as pool:
            list(pool.map(remove, made))

    def work_all(self, made: Sequence[EnvironmentInfo]) -> list[Episode]:
        """As many harnesses at once as there are cores: a model's turns would be waits, a search for a repair is all CPU."""
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            return list(pool.map(self.work, zip(self._faults, made, strict=True)))


def percentile_95(values: Sequence[float]) -> float:
    return sorted(values)[max(0, -(-95 * len(values) // 100) - 1)]


def report(
    cold: dict[str, Any], made: Sequence[EnvironmentInfo], episodes: Sequence[Episode], socket: Path
) -> None:
    step(f"5. what it took ({len(episodes)} environments at once, {os.cpu_count()} cores)")
    warm = [environment.timings for environment in made]
    rows = []
    for name in TIMES:
        values = [getattr(timings, name) for timings in warm]
        rows.append(
            (
                name.removesuffix("_s"),
                *(
                    output.duration(s)
                    for s in (cold["timings"][name], statistics.median(values), percentile_95(values))
                ),
            )
        )
    output.print_table(("INITIALISATION", "COLD, ONE", "WARM MEDIAN", "WARM P95"), rows)
    with Client(socket) as client:
        layers = client.info().statistics["data_plane"]["layers"].values()
    plan, fetched = sum(layer["stored_bytes"] for layer in layers), sum(layer["bytes"] for layer in layers)
    metadata = sum(layer["metadata_bytes"] for layer in layers)
    contents = sum(layer["content_bytes"] for layer in layers)
    print(
        f"\nplan: {output.size(plan)} stored ({output.size(contents)} of files); "
        f"fetched: {output.size(fetched)} ({output.share(fetched, plan)}), metadata {output.size(metadata)}"
    )
    rewards = [episode.reward for episode in episodes]
    print(f"rewards: {' '.join(f'{reward:g}' for reward in rewards)}; mean {statistics.mean(rewards):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.demo", description=__doc__)
    parser.add_argument(
        "--build", type=Path, default=Path("build/demo"), help="kept between runs: the base and task roots"
    )
    parser.add_argument("--environments", type=int, default=16)
    arguments = parser.parse_args()
    build = arguments.build.absolute()
    build.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    published = publish(build)
    scratch = Path(tempfile.mkdtemp(prefix="weenv-demo-"))
    try:
        with daemon(scratch) as socket:
            cold = by_hand(published, socket, scratch, FAULTS[0])
            faults = [FAULTS[i % len(FAULTS)] for i in range(arguments.environments)]
            step(f"4. {len(faults)} environments at once, each with its own fault")
            batch = Batch(published, socket, faults)
            rounds = [batch.create_all()]
            while len(rounds) < ROUNDS:
                batch.remove_all(rounds[-1])
                rounds.append(batch.create_all())
            made = rounds[-1]
            print(f"made {len(made)} environments, {ROUNDS} times over; the harnesses of the last run")
            episodes = batch.work_all(made)
            for episode in episodes:
                print(
                    f"{episode.fault:14} {episode.repair['tries']:3} tries  "
                    f"{episode.repair['change'] or 'nothing fails'}  reward {episode.reward:g}"
                )
            report(cold, [environment for made in rounds for environment in made], episodes, socket)
            with Client(socket) as client:
                left = client.list()
            if left:
                raise SystemExit(f"demo: environments are left: {[environment.id for environment in left]}")
    finally:
        shutil.rmtree(scratch)
    print(f"\ndone in {output.duration(time.perf_counter() - begin)}; nothing is left but {build}")


if __name__ == "__main__":
    with exits.terminable():
        main()

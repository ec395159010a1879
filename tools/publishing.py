"""What the commands that convert have in common: workers, a bar, and what is said about each layer that is published."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import attrs

from tools import exits, output, settings

if TYPE_CHECKING:
    from layerformat import ConvertReport, Progress
    from registry.publish import Encoding, GroupSource, LayerOutcome


def add_jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="workers of a conversion")


def add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--recipe", action="store_true", help="publish with each tar's layer what gives the tar back byte for byte (`group totar`)"
    )


def check_jobs(jobs: int) -> None:
    """CommandError."""
    if jobs < 1:
        raise exits.CommandError(f"-j: expected 1 or more, received {jobs}", exits.USAGE)


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[Progress], None] | None]:
    """A bar on stderr when that is a terminal; else nothing."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.fields[entries]} entries"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("convert", entries=0, total=None)

        def update(state: Progress) -> None:
            bar.update(task, completed=state.position_bytes, total=state.total_bytes, entries=state.entries)

        yield update


def target(prefix: str, name: str, tag: str | None) -> str:
    """The reference that a group is published under. InvalidReference."""
    from registry import InvalidReference, parse_reference

    if ":" in prefix.removeprefix("oci:").rpartition("/")[2] and (prefix.startswith("oci:") or "/" in prefix):
        raise InvalidReference(
            f"--to {prefix}: expected a PREFIX without a tag, to which the groups' names are added; "
            "a directory whose name has a colon is given with / behind it"
        )
    if prefix.startswith("oci:"):
        reference = f"{prefix}:{name}" + (f"-{tag}" if tag else "")
    else:
        reference = f"{prefix}/{name}:{tag or 'latest'}"
    parse_reference(reference)
    return reference


def publish(groups: Sequence[GroupSource], jobs: int, *, recipe: bool = False) -> tuple[list[str], list[LayerOutcome]]:
    """Converts and publishes, and says on stderr what became of each layer. The references with their digests, and the
    layers' outcomes in order."""
    from registry.conversions import Conversions
    from registry.publish import Encoding, publish_groups

    encoding = Encoding(recipe=recipe)
    outcomes: list[LayerOutcome] = []

    def report(outcome: LayerOutcome) -> None:
        outcomes.append(outcome)
        for warning in outcome.warnings:
            output.say(f"weenv: {warning}")
        output.say(describe(outcome))

    pinned = publish_groups(
        groups,
        conversions=Conversions(settings.conversions_path()),
        convert=partial(_convert, jobs, encoding),
        encoding=encoding,
        report=report,
        credentials=settings.credentials(),
    )
    return pinned, outcomes


def _convert(
    jobs: int, encoding: Encoding, source: Path | BinaryIO, layer: Path, *, diff_id: bool, recipe: Path | None
) -> ConvertReport:
    from layerformat import convert

    with progress_bar() as progress:
        return convert(
            source,
            layer,
            jobs=jobs,
            level=encoding.level,
            chunk_size=encoding.chunk_size,
            diff_id=diff_id,
            recipe=recipe,
            progress=progress,
        )


def describe(outcome: LayerOutcome) -> str:
    """One line about a layer."""
    sizes = output.size(outcome.bytes_out)
    if outcome.bytes_in is not None:
        sizes = f"{output.size(outcome.bytes_in)} in, {sizes} out"
    parts = [sizes]
    if outcome.done in ("already there", "converted before"):
        parts.insert(0, outcome.done)
    if (shared := outcome.shared) is not None:
        parts.append(
            f"{shared.chunks} of {shared.of_chunks} chunks ({output.size(shared.bytes)} of {output.size(shared.of_bytes)}) "
            "as under the tag before"
        )
    parts.append(output.duration(outcome.wall_s))
    return f"{outcome.name}: {', '.join(parts)}"


def described(outcome: LayerOutcome) -> dict[str, Any]:
    """The same for programs."""
    return attrs.asdict(outcome)

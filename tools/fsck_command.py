"""`weenv layer fsck FILE`: explains a damaged layer, and says which of its files can still be read."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools import exits, output

if TYPE_CHECKING:
    from layerformat.fsck import Report

_SHOWN_DAMAGES = 100


def register(commands: Any) -> None:
    fsck = commands.add_parser("fsck", help="explain a damaged layer: what, where, and which files it costs; exit 5 if damaged")
    fsck.add_argument("file", type=Path, metavar="FILE")
    fsck.add_argument("--all", action="store_true", help="list the whole files too, and every damage")
    output.add_format(fsck)
    fsck.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from layerformat.fsck import fsck

    with arguments.file.open("rb") as file:
        report = fsck(file)
    if arguments.format == "json":
        output.print_json(_described(arguments.file, report, all_paths=arguments.all))
    else:
        _print(arguments.file, report, all_paths=arguments.all)
    return exits.OK if report.is_whole else exits.INTEGRITY


def _print(path: Path, report: Report, *, all_paths: bool) -> None:
    """Damages, then paths, then the verdict, which is the last line."""
    from layerformat import printable

    shown = report.damages if all_paths else report.damages[:_SHOWN_DAMAGES]
    for damage in shown:
        print(damage)
    if len(shown) < len(report.damages):
        print(f"and {len(report.damages) - len(shown)} more damages; --all lists them")
    for name in report.affected:
        print(f"affected  {printable(name, whole=True)}")
    for name in report.whole if all_paths else ():
        print(f"whole     {printable(name, whole=True)}")
    print(f"{path}: {report.verdict}")


def _described(path: Path, report: Report, *, all_paths: bool) -> dict[str, Any]:
    """Of damages, all; of whole files, their number, and with `all_paths` their names."""
    import attrs

    from layerformat import printable

    states = [state.value for state in report.chunks]
    return {
        "file": str(path),
        "size_bytes": report.size_bytes,
        "whole": report.is_whole,
        "verdict": report.verdict,
        "toc": {"state": report.toc.value, "blob_offset": report.toc_offset},
        "chunks": {state: states.count(state) for state in ("whole", "damaged", "displaced", "missing")},
        "damages": [attrs.asdict(damage) for damage in report.damages],
        "files": {
            "judged": report.files_known,
            "whole": len(report.whole),
            "affected": len(report.affected),
            "affected_paths": [printable(name, whole=True) for name in report.affected],
            "whole_paths": [printable(name, whole=True) for name in report.whole] if all_paths else None,
        },
    }

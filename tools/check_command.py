"""`weenv group check REF`: what will go wrong in a plan, and with `--git` what gives a task's answer away; and its repair."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools import exits, output, settings

if TYPE_CHECKING:
    from registry import Group
    from tools.check.findings import Finding
    from tools.check.git_repair import RepairLayer, TreeRepair
    from tools.check.opening import Plan

_SHOWN_PATHS = 10
_EPILOG = (
    "Exit status: 0 without errors, 1 with errors, and with --strict also 1 with warnings; others as everywhere. With --fix, "
    "stdout is the new reference, and findings go to stderr."
)


def register(commands: Any) -> None:
    check = commands.add_parser("check", help="what will go wrong in a plan; reads metadata only", epilog=_EPILOG)
    check.add_argument("reference", metavar="REF")
    check.add_argument("--below", action="append", default=[], metavar="REF", help="a group that it goes on; repeatable, base first")
    check.add_argument("--git", action="store_true", help="what its git repositories give away, and whether git status is cheap")
    check.add_argument("--fix", metavar="NEWREF", help="with --git: publish it with repaired indexes, in one small layer more")
    check.add_argument("--strict", action="store_true", help="warnings are errors")
    check.add_argument("--all", action="store_true", help=f"every finding, not {_SHOWN_PATHS} of a kind")
    output.add_format(check)
    check.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from registry import resolve_group
    from registry.errors import needing_temporary_space
    from tools.check.opening import open_plan

    if arguments.fix is not None and not arguments.git:
        raise exits.CommandError("--fix: expected --git with it, for that is what it repairs", exits.USAGE)
    credentials = settings.credentials()
    below = [resolve_group(reference, credentials=credentials) for reference in arguments.below]
    group = resolve_group(arguments.reference, credentials=credentials)
    with needing_temporary_space(), open_plan(below, group, credentials) as plan:
        findings, repair = _check(arguments, below, group, plan)
        fetched = {"requests": plan.ranges.requests, "bytes": plan.ranges.bytes}
    fixed = _publish(group, arguments.fix, repair) if repair is not None else None
    if arguments.format == "json":
        output.print_json(_described(group, findings, fetched, repair, fixed))
    else:
        with contextlib.redirect_stdout(sys.stderr if fixed else sys.stdout):
            _print(group, findings, arguments)
        if fixed:
            print(fixed)
    output.say(f"read {output.size(fetched['bytes'])} in {fetched['requests']} requests")
    return _status(findings, strict=arguments.strict)


def _check(arguments: argparse.Namespace, below: Sequence[Group], group: Group, plan: Plan) -> tuple[list[Finding], RepairLayer | None]:
    """The findings, the worst first, and what repairs the indexes, if that is asked for."""
    from tools.check.filesystem import check_filesystem
    from tools.check.findings import Severity
    from tools.check.processes import check_processes

    is_complete = bool(plan.below) or group.role == "base"
    view, findings = check_filesystem(plan, complete=is_complete)
    if is_complete:
        findings += check_processes(view, [part.config for part in (*below, group)])
    repair = None
    if arguments.git:
        from tools.check.git import check_git
        from tools.check.git_repair import repair_layer
        from tools.check.git_repositories import find_repositories

        repositories = find_repositories(view)
        findings += check_git(plan, view, repositories)
        if arguments.fix is not None:
            with _progress() as progress:
                repair = repair_layer(plan, view, repositories, progress=progress)
    order = list(Severity)
    return sorted(findings, key=lambda finding: (order.index(finding.severity), finding.code, finding.path)), repair


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr when that is a terminal; else nothing."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("files compared"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("compare", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def say_repairs(repair: RepairLayer | TreeRepair) -> None:
    """What was repaired, and what was left, on stderr."""
    from layerformat import printable

    for sentence in repair.skipped:
        output.say(f"weenv: {sentence}: left as it is")
    for each in repair.repairs:
        left = [
            f"{number} {what}"
            for number, what in ((len(each.different), "whose contents are not what was checked out"), (each.missing, "without a file"))
            if number
        ]
        done = "repaired" if each.changed else "nothing to repair"
        more = "; left: " + ", ".join(left) if left else ""
        output.say(f"/{printable(each.worktree)}: {done}: {each.clean} entries that git status need not read{more}")


def _publish(group: Group, reference: str, repair: RepairLayer) -> str:
    """The group with the repair on top, and what was repaired said on stderr."""
    from registry.errors import needing_temporary_space
    from registry.extend import extend_group

    say_repairs(repair)
    with needing_temporary_space(), tempfile.TemporaryDirectory(prefix="weenv-fix-") as scratch:
        layers = []
        if repair.data is not None:
            layers = [Path(scratch) / "repair.weenv"]
            layers[0].write_bytes(repair.data)
        return extend_group(group, reference, layers, credentials=settings.credentials())


def _status(findings: Sequence[Finding], *, strict: bool) -> int:
    from tools.check.findings import Severity

    bad = {Severity.ERROR, Severity.WARNING} if strict else {Severity.ERROR}
    return exits.ERROR if any(finding.severity in bad for finding in findings) else exits.OK


def _print(group: Group, findings: Sequence[Finding], arguments: argparse.Namespace) -> None:
    """By kind, the worst first; the last line is the count."""
    for (severity, code), same in groupby(findings, key=lambda finding: (finding.severity.value, finding.code)):
        each = list(same)
        print(f"{severity} {code} ({len(each)})")
        shown = each if arguments.all else each[:_SHOWN_PATHS]
        for finding in shown:
            _print_finding(finding)
        if len(shown) < len(each):
            print(f"  and {len(each) - len(shown)} more; --all lists them")
        for remedy in dict.fromkeys(finding.remedy for finding in each):
            print(f"  → {remedy}")
    print(f"{group.reference}: {_counts(findings)}")


def _print_finding(finding: Finding) -> None:
    from layerformat import printable

    print(f"  /{printable(finding.path, whole=True)} {finding.what}")
    for line in finding.details:
        print(f"      {line}")


def _counts(findings: Sequence[Finding]) -> str:
    from tools.check.findings import Severity, count

    numbers = [(count(findings, severity), severity.value) for severity in Severity]
    return ", ".join(f"{number} {name}{'' if number == 1 else 's'}" for number, name in numbers)


def _described(
    group: Group, findings: Sequence[Finding], fetched: dict[str, int], repair: RepairLayer | None, fixed: str | None
) -> dict[str, Any]:
    from layerformat import printable
    from tools.check.findings import Severity, count

    return {
        "reference": group.reference,
        "findings": [
            {
                "severity": finding.severity.value,
                "code": finding.code,
                "path": printable(finding.path, whole=True),
                "what": finding.what,
                "remedy": finding.remedy,
                "details": list(finding.details),
            }
            for finding in findings
        ],
        "counts": {severity.value: count(findings, severity) for severity in Severity},
        "fetched": fetched,
        "fixed": None
        if repair is None
        else {
            "reference": fixed,
            "worktrees": [
                {
                    "path": printable(each.worktree, whole=True),
                    "changed": each.changed,
                    "clean": each.clean,
                    "different": [printable(path, whole=True) for path in each.different],
                    "missing": each.missing,
                }
                for each in repair.repairs
            ],
            "skipped": list(repair.skipped),
        },
    }

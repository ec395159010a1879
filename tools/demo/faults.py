"""The demo's tasks: one faulty token each, as a patch that is applied when the environment is made."""

from __future__ import annotations

import difflib
from pathlib import Path

import attrs


@attrs.frozen
class Fault:
    """`correct` occurs once in `file` (relative to the repository) and is replaced by `faulty`; `tests` see it."""

    name: str
    file: str
    correct: str
    faulty: str
    tests: str

    def patch(self, repository: Path) -> str:
        """A unified diff that makes the repository faulty."""
        before = (repository / self.file).read_text()
        if before.count(self.correct) != 1:
            raise ValueError(
                f"{self.file}: expected {self.correct!r} once, found it {before.count(self.correct)} times"
            )
        after = before.replace(self.correct, self.faulty)
        lines = difflib.unified_diff(
            before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{self.file}", f"b/{self.file}"
        )
        return "".join(lines)


FILTERS, UTILS = "src/jinja2/filters.py", "src/jinja2/utils.py"

FAULTS = (
    Fault("size-boundary", FILTERS, "elif bytes < base:", "elif bytes <= base:", "tests/test_filters.py"),
    Fault("size-unit", FILTERS, "unit = base ** (i + 2)", "unit = base ** (i + 1)", "tests/test_filters.py"),
    Fault("slice-offset", FILTERS, "            offset += 1\n", "            offset += 2\n", "tests/test_filters.py"),
    Fault("batch-full", FILTERS, "if len(tmp) == linecount:", "if len(tmp) != linecount:", "tests/test_filters.py"),
    Fault(
        "truncate-edge",
        FILTERS,
        "if len(s) <= length + leeway:",
        "if len(s) < length + leeway:",
        "tests/test_filters.py",
    ),
    Fault("indent-first", FILTERS, "rv = lines.pop(0)", "rv = lines.pop(1)", "tests/test_filters.py"),
    Fault("batch-fill", FILTERS, "and len(tmp) < linecount:", "and len(tmp) > linecount:", "tests/test_filters.py"),
    Fault(
        "cycle-step",
        UTILS,
        "self.pos = (self.pos + 1) % len(self.items)",
        "self.pos = (self.pos + 2) % len(self.items)",
        "tests/test_api.py",
    ),
)

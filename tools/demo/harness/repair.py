#!/usr/bin/python3
"""A scripted harness: repairs a one-token fault, given nothing but a repository and its failing tests.

1. Run the test file once under a line tracer; rank lines by suspicion (Ochiai: executed by failing tests, rarely by
passing ones).
2. Change the most suspicious lines, one token at a time, until the failing tests pass and then the whole test file
does.

Usage: repair.py REPOSITORY TEST_FILE. Prints one JSON line; exit status 0 when repaired (or nothing fails), 1 when not.
"""

import ast
import json
import math
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

SWAPS = {"<": ("<=", ">"), "<=": ("<", ">="), ">": (">=", "<"), ">=": (">", "<="), "==": ("!=", "<="), "!=": ("==",)}
MAX_LINES = 30
MAX_TRIES = 120

TRACER = """
import json, os, sys
import pytest

root, result_path = sys.argv[1], sys.argv[2]

class Tracer:
    def __init__(self):
        self.lines, self.results = {}, {}
    def trace(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(root):
            return None
        if event == "line":
            self.current.add((frame.f_code.co_filename, frame.f_lineno))
        return self.trace
    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        self.current = self.lines[item.nodeid] = set()
        sys.settrace(self.trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            self.results[report.nodeid] = report.passed

tracer = Tracer()
pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[3:]], plugins=[tracer])
with open(result_path, "w") as file:
    results = tracer.results.items()
    json.dump({test: {"passed": passed, "lines": sorted(tracer.lines[test])} for test, passed in results}, file)
"""


def pytest(repository, *arguments):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True).returncode == 0


def observe(repository, test_file):
    """Which tests pass, and which lines of the sources each executes."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-c", TRACER, str(repository / "src"), file.name, test_file]
        subprocess.run(command, cwd=repository, capture_output=True, text=True)
        return json.loads(Path(file.name).read_text())


def rank(observed):
    """Lines by Ochiai suspicion, the most suspicious first."""
    failing = [test for test in observed.values() if not test["passed"]]
    failed, passed = Counter(), Counter()
    for test in observed.values():
        (passed if test["passed"] else failed).update(tuple(line) for line in test["lines"])
    score = {line: n / math.sqrt(len(failing) * (n + passed[line])) for line, n in failed.items()}
    return sorted(score, key=lambda line: (-score[line], line))[:MAX_LINES]


def comparisons(line):
    """The line with one comparison changed."""
    for match in re.finditer(r"[<>=!]+", line):
        for other in SWAPS.get(match[0], ()):
            yield line[: match.start()] + other + line[match.end() :]


def numbers(line):
    """The line with one number changed by one."""
    for match in re.finditer(r"\b\d+\b", line):
        for change in (-1, 1):
            yield line[: match.start()] + str(int(match[0]) + change) + line[match.end() :]


def parses(source):
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def candidates(ranked):
    """Changed sources, comparisons before numbers: a constant that happens to satisfy the tests is the likelier
    mistake.
    """
    for variants in (comparisons, numbers):
        for name, number in ranked:
            path = Path(name)
            lines = path.read_text().splitlines(keepends=True)
            for changed in variants(lines[number - 1]):
                source = "".join([*lines[: number - 1], changed, *lines[number:]])
                if parses(source):
                    yield path, number, changed.strip(), source


def main():
    repository, test_file = Path(sys.argv[1]), sys.argv[2]
    observed = observe(repository, test_file)
    failing = [test for test, result in observed.items() if not result["passed"]]
    if not failing:
        print(json.dumps({"repaired": True, "tries": 0, "change": None}))
        return 0
    for tries, (path, number, changed, source) in enumerate(candidates(rank(observed)), 1):
        if tries > MAX_TRIES:
            break
        original = path.read_text()
        path.write_text(source)
        if pytest(repository, *failing[:3]) and pytest(repository, test_file):
            print(json.dumps({"repaired": True, "tries": tries, "change": f"{path.name}:{number}: {changed}"}))
            return 0
        path.write_text(original)
    print(json.dumps({"repaired": False, "tries": tries, "change": None}))
    return 1


sys.exit(main())

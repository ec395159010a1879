"""The command line in this process: what it prints and its exit status."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from tools import cli

OK, ERROR, USAGE, NOT_FOUND, AUTHENTICATION, INTEGRITY, CAPACITY = range(7)


@attrs.frozen
class Ran:
    """A command's exit status and what it printed."""

    status: int
    out: str
    err: str


Weenv = Callable[..., Ran]


def isolated_weenv(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Weenv:
    """The command line with `home` as its home directory: nobody's credentials, and no conversions of before."""
    monkeypatch.setenv("HOME", str(home))
    for name in ("DOCKER_CONFIG", "REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def run(*argv: object) -> Ran:
        capsys.readouterr()
        try:
            status = cli.run([str(word) for word in argv])
        except SystemExit as error:  # argparse's
            status = int(error.code or 0)
        captured = capsys.readouterr()
        return Ran(status, captured.out, captured.err)

    return run

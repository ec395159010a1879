"""The command line `weenv`: which commands there are. Each module registers its own and is the only reader of their
arguments.

stdout is the result; progress and chatter go to stderr. Modules that are slow to import are imported by the command
that needs them."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence


def build_parser() -> argparse.ArgumentParser:
    from tools import (
        cache_commands,
        catalog_command,
        env_commands,
        group_commands,
        image_commands,
        layer_commands,
        mount_command,
        node_commands,
        profile_commands,
    )

    parser = argparse.ArgumentParser(
        prog="weenv",
        description="Environments for agentic reinforcement learning: composed from layer groups, mounted before their "
        "contents arrive.",
        epilog="Exit status: 0 ok, 1 error, 2 usage, 3 not found, 4 authentication, 5 integrity, 6 capacity. "
        "References: oci:DIR:TAG (a local layout) or HOST[:PORT]/REPO[:TAG][@DIGEST] (a registry).",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = (
        layer_commands,
        group_commands,
        image_commands,
        catalog_command,
        mount_command,
        node_commands,
        env_commands,
        cache_commands,
        profile_commands,
    )
    for module in modules:
        module.register(commands)
    return parser


def run(argv: Sequence[str]) -> int:
    """Runs one command; returns its exit status."""
    from tools import exits

    parser = build_parser()
    # What stands behind `--` is a command for an environment: none of it is an option of ours, wherever ours stand
    # before it.
    ours, command = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, None)
    arguments = parser.parse_args(ours)
    if command is not None:
        if not hasattr(arguments, "argv"):
            parser.error("-- CMD... belongs to `weenv env exec`")
        arguments.argv = [*arguments.argv, *command]
    if (refused := exits.not_utf8(arguments)) is not None:
        return refused
    status: int = exits.guarded(arguments.run, arguments)
    return status


def main() -> None:
    """Entry point `weenv`."""
    sys.exit(_run_program(sys.argv[1:]))


def envlet_main() -> None:
    """Entry point `envlet`: the daemon, as `weenv node serve`."""
    sys.exit(_run_program(["node", "serve", *sys.argv[1:]]))


def _run_program(argv: Sequence[str]) -> int:
    """A ^C is an answer, also one that comes while our modules are imported. Names are printed as they are, UTF-8 or
    not, whatever the locale says. Who has closed a stream of ours does not want to see it."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as we run
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
        if isinstance(sys.stderr, io.TextIOWrapper):
            sys.stderr.reconfigure(encoding="utf-8", errors="backslashreplace")
        return run(argv)
    except KeyboardInterrupt:
        return 130

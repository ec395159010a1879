"""`weenv env …`: create, exec, ls, inspect, diff, rm. Everything through the daemon's socket."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from tools import exits, output, settings
from tools.node_commands import add_socket

DAEMON_ERROR = 125
TIMED_OUT = 124
_CAUSE_CHARACTERS = 60


def register(commands: Any) -> None:
    parser = commands.add_parser("env", help="environments on this node")
    sub = parser.add_subparsers(dest="env_command", required=True, metavar="COMMAND")

    create = sub.add_parser("create", help="make an environment; prints its id")
    create.add_argument(
        "--group", action="extend", nargs="+", required=True, metavar="REF", help="layer groups, base first; repeatable"
    )
    create.add_argument(
        "--init", action="append", default=[], metavar="CMD", help="a shell command at initialisation; repeatable"
    )
    create.add_argument("--role", choices=("execution", "evaluation"), default="execution")
    create.add_argument(
        "--apply", type=Path, metavar="DIFF", help="a diff of another environment, put in before the start"
    )
    create.add_argument("--cpu", type=output.parse_cores, metavar="N", help="cores")
    create.add_argument("--memory", type=output.parse_memory, metavar="SIZE")
    create.add_argument(
        "--network", choices=("none", "host"), default="none", help="host: the node's own, where its configuration has host_network"
    )
    create.add_argument("--ttl", type=output.parse_seconds, metavar="S", help="seconds until it ends by itself")
    create.add_argument("--env", type=output.parse_variable, action="append", default=[], metavar="K=V")
    create.add_argument("--workdir", type=output.parse_absolute, metavar="D")
    output.add_format(create)
    add_socket(create)
    create.set_defaults(run=run_create)

    execute = sub.add_parser(
        "exec",
        help="run a command; its exit status is ours (125: the daemon's error, 126, 127 as docker, 124 timed out)",
    )
    execute.add_argument("id", metavar="ID")
    execute.add_argument("--workdir", type=output.parse_absolute, metavar="D")
    execute.add_argument("--env", type=output.parse_variable, action="append", default=[], metavar="K=V")
    execute.add_argument("--user", metavar="USER[:GROUP]")
    execute.add_argument(
        "--timeout", type=output.parse_seconds, metavar="S", help="after this the command and all that it started are killed"
    )
    execute.add_argument("-t", "--tty", action="store_true", help="on a terminal of its own")
    add_socket(execute)
    execute.add_argument("argv", nargs="*", metavar="-- CMD...")
    execute.set_defaults(run=run_exec, status_of_refusal=DAEMON_ERROR)

    ls = sub.add_parser("ls", help="list environments")
    ls.add_argument("--all", action="store_true", help="also those that have gone")
    output.add_format(ls)
    add_socket(ls)
    ls.set_defaults(run=run_ls)

    inspect = sub.add_parser("inspect", help="one environment, as JSON")
    inspect.add_argument("id", metavar="ID")
    output.add_format(inspect)
    add_socket(inspect)
    inspect.set_defaults(run=run_inspect)

    diff = sub.add_parser("diff", help="what the environment changed, as an OCI layer tar")
    diff.add_argument("id", metavar="ID")
    diff.add_argument("-o", "--output", type=Path, metavar="FILE", help="(default: stdout)")
    add_socket(diff)
    diff.set_defaults(run=run_diff)

    rm = sub.add_parser("rm", help="remove environments")
    rm.add_argument("ids", nargs="+", metavar="ID")
    add_socket(rm)
    rm.set_defaults(run=run_rm)


def _client(arguments: argparse.Namespace) -> Any:
    from envlet.client import Client

    return Client(settings.socket_path(arguments.socket))


def run_create(arguments: argparse.Namespace) -> int:
    from envlet.client import as_json

    apply_fd = os.open(arguments.apply, os.O_RDONLY) if arguments.apply else None
    try:
        with _client(arguments) as client:
            made = client.create(
                [absolute_reference(reference) for reference in arguments.group],
                role=arguments.role,
                init=arguments.init,
                apply_fd=apply_fd,
                cpu=arguments.cpu,
                memory_bytes=arguments.memory,
                ttl_s=arguments.ttl,
                network=arguments.network,
                env=dict(arguments.env),
                workdir=arguments.workdir,
            )
    finally:
        if apply_fd is not None:
            os.close(apply_fd)
    if arguments.format == "json":
        output.print_json(as_json(made))
    else:
        print(made.id)
    return exits.OK


def absolute_reference(reference: str) -> str:
    """The daemon has another working directory: a layout's relative path is made absolute here, where it was typed."""
    scheme, separator, rest = reference.partition(":")
    if scheme != "oci" or not separator or rest.startswith("/"):
        return reference
    return f"oci:{os.getcwd()}/{rest}"


def run_exec(arguments: argparse.Namespace) -> int:
    from envlet.errors import ConnectionLost, EnvletError
    from tools.terminal import run_on_terminal

    argv = arguments.argv
    if not argv:
        raise exits.CommandError("expected a command behind --", exits.USAGE)
    options: dict[str, Any] = {
        "workdir": arguments.workdir, "env": dict(arguments.env),
        "user": arguments.user, "timeout_s": arguments.timeout,
    }  # fmt: skip
    try:
        with _client(arguments) as client:
            if arguments.tty:
                result = run_on_terminal(
                    lambda on_terminal: client.exec(arguments.id, argv, on_terminal=on_terminal, **options)
                )
            else:
                sys.stdout.flush()
                result = client.exec(arguments.id, argv, stdio=(0, 1, 2), **options)
    except (EnvletError, ConnectionLost) as error:
        return exits.report(error, DAEMON_ERROR)
    if result.timed_out:
        output.say(f"weenv: killed after {arguments.timeout:g} s, with all that it started")
        return TIMED_OUT
    if result.failure:
        output.say(f"weenv: {result.failure}")
    return int(result.exit_code)


def run_ls(arguments: argparse.Namespace) -> int:
    from envlet.client import as_json

    with _client(arguments) as client:
        environments = client.list(arguments.all)
    if arguments.format == "json":
        output.print_json([as_json(environment) for environment in environments])
        return exits.OK
    rows = []
    for env in environments:
        age = output.duration(time.time() - env.created_unix_s) if env.created_unix_s else ""
        top = env.groups[-1].split("@")[0] if env.groups else ""
        rows.append(
            (
                env.id,
                env.state,
                env.role,
                age,
                output.duration(env.timings.total_s),
                len(env.groups),
                top,
                output.clip(env.cause or "", _CAUSE_CHARACTERS),
            )
        )
    output.print_table(("ID", "STATE", "ROLE", "AGE", "INIT", "GROUPS", "TOP", "CAUSE"), rows)
    return exits.OK


def run_inspect(arguments: argparse.Namespace) -> int:
    from envlet.client import as_json

    with _client(arguments) as client:
        output.print_json(as_json(client.get(arguments.id)))
    return exits.OK


def run_diff(arguments: argparse.Namespace) -> int:
    if arguments.output is None and sys.stdout.isatty():
        raise exits.CommandError("a tar does not go to a terminal; use -o FILE or a pipe", exits.USAGE)
    with _client(arguments) as client:
        if arguments.output is None:
            _warn_of_devices(client.diff(arguments.id, sys.stdout.fileno()))
            return exits.OK
        unfinished = arguments.output.with_name(arguments.output.name + ".unfinished")
        try:
            with unfinished.open("wb") as file:
                result = client.diff(arguments.id, file.fileno())
            unfinished.replace(arguments.output)
        finally:
            unfinished.unlink(missing_ok=True)
    _warn_of_devices(result)
    output.say(
        f"{result.entries} entries, {result.whiteouts} of them removals, {output.size(result.content_bytes)} of files"
    )
    return exits.OK


def _warn_of_devices(result: Any) -> None:
    devices = list(getattr(result, "devices", ()))
    if devices:
        named = ", ".join(output.clip(device, 100) for device in devices)  # the daemon names the first ones
        output.say(f"weenv: the diff holds devices, which `weenv env create --apply` refuses, among them {named}")


def run_rm(arguments: argparse.Namespace) -> int:
    from envlet.errors import EnvletError

    status = exits.OK
    with _client(arguments) as client:
        for environment_id in arguments.ids:
            try:
                print(client.delete(environment_id).id)
            except EnvletError as error:
                status = exits.report(error, exits.status_for(error) or exits.ERROR)
    return status

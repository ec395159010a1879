"""`weenv node …`: serve (also `envlet`), restart, info, metrics."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from tools import exits, node_report, output, settings

if TYPE_CHECKING:
    from envlet.daemon import HandOver


def register(commands: Any) -> None:
    parser = commands.add_parser("node", help="the node daemon")
    sub = parser.add_subparsers(dest="node_command", required=True, metavar="COMMAND")

    serve = sub.add_parser("serve", help="run the daemon in the foreground; `envlet` is the same")
    serve.add_argument("--config", type=Path, metavar="FILE", help="TOML; its keys: docs/node.md")
    serve.add_argument("--successor", type=int, metavar="FD", help=argparse.SUPPRESS)
    serve.add_argument("--view", choices=settings.VIEWS, help="how roots are shown (docs/views.md; default: the file's, or auto)")
    serve.add_argument("--cache-size", type=output.parse_size, metavar="SIZE", help="the most that the cache takes (default: the file's)")
    serve.add_argument("--fill", choices=settings.FILLS, help="what is fetched when nobody waits (default: the file's, or idle)")
    serve.set_defaults(run=run_serve)

    restart = sub.add_parser(
        "restart", help="start daemon and data plane anew, from what is installed now; environments and their commands go on"
    )
    add_socket(restart)
    restart.add_argument(
        "--drain", type=float, default=30.0, metavar="S", help="how long to wait for requests that run; new ones are refused meanwhile"
    )
    restart.add_argument("--force", action="store_true", help="cut short what still runs then: commands of exec are killed")
    output.add_format(restart)
    restart.set_defaults(run=run_restart)

    doctor = sub.add_parser("doctor", help="what is wrong, found by doing what the node does; status 1 if anything is")
    add_socket(doctor)
    output.add_format(doctor)
    doctor.set_defaults(run=run_doctor)

    info = sub.add_parser("info", help="the running daemon in numbers")
    add_socket(info)
    output.add_format(info)
    info.set_defaults(run=run_info)


    metrics = sub.add_parser("metrics", help="the same for Prometheus, once; docs/metrics.md says what each is")
    add_socket(metrics)
    metrics.set_defaults(run=run_metrics)


def add_socket(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--socket", type=Path, metavar="PATH", help="of the daemon (default: $WEENV_SOCKET, /run/weenv/envlet.sock)"
    )


def run_serve(arguments: argparse.Namespace) -> int:
    import trio

    from envlet import keeper, mounts
    from envlet.config import NodeConfig
    from envlet.dataplane import DataPlaneConfig

    chosen = settings.load_node_settings(arguments.config)
    if os.geteuid() != 0:
        raise exits.CommandError("the daemon mounts and makes cgroups: expected root")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    if arguments.view is not None:
        chosen = attrs.evolve(chosen, view=arguments.view)
    if arguments.cache_size is not None:
        chosen = attrs.evolve(chosen, cache_size=arguments.cache_size)
    if arguments.fill is not None:
        chosen = attrs.evolve(chosen, fill=arguments.fill)
    config = NodeConfig(
        state_dir=chosen.state_dir.absolute(),
        run_dir=chosen.run_dir.absolute(),
        socket_path=chosen.socket_path.absolute(),
        runtime=chosen.runtime,
        cgroup_parent=chosen.cgroup_parent,
        cpu=chosen.cpu,
        memory_bytes=chosen.memory,
        pids=chosen.pids,
        view=chosen.view,
        host_network=chosen.host_network,
        metrics_listen=chosen.metrics_address,
        environments_max=chosen.environments_max,
    )
    if chosen.starting_max is not None:
        config = attrs.evolve(config, starting_max=chosen.starting_max)
    data_plane = DataPlaneConfig(
        mount_path=config.run_dir / "layers",
        cache_path=chosen.cache_path.absolute(),
        run_dir=config.run_dir,
        cache_size_bytes=chosen.cache_size,
        cache_free_min_bytes=chosen.cache_free_min,
        threads=chosen.fuse_threads,
        chunk_deadline_s=chosen.chunk_deadline_s,
        auth_files=settings.auth_files(),
        peers=chosen.peers_config,
        fill=chosen.fill,
        fill_rate_bytes=chosen.fill_rate,
        profiles=chosen.profiles,
    )
    keeper.claim(config.run_dir)
    running = keeper.find_running(data_plane.socket_path)
    if running is None:
        mounts.enter_private_namespace()
    else:
        mounts.join_namespace(running.welcome.pid)
    listener = None if arguments.successor is None else socket.socket(fileno=arguments.successor)
    handed_over = trio.run(_serve, config, data_plane, running, listener)
    if handed_over is not None:
        _become_successor(handed_over)
    return exits.OK


async def _serve(config: Any, data_plane_config: Any, running: Any, listener: socket.socket | None) -> HandOver | None:
    """What is handed to the daemon that is to start next, if any."""
    from envlet.daemon import serve
    from envlet.dataplane import DataPlaneLost, open_data_plane
    from envlet.resolver import RegistryResolver

    async with open_data_plane(data_plane_config, running, renew=listener is not None) as plane:
        handed_over = await serve(config, RegistryResolver(settings.credentials()), plane, listener=listener)
        lost = plane.lost.is_set()
    if lost:
        raise DataPlaneLost
    return handed_over


def _become_successor(handed_over: HandOver) -> None:
    """Starts the program that is installed now in this process: pid, descriptors of the log and children stay. Does not return."""
    command = list(sys.orig_argv)
    if "--successor" in command:
        at = command.index("--successor")
        del command[at : at + 2]
    handed_over.listener.set_inheritable(True)
    handed_over.signals.hand_on()
    os.execv(sys.executable, [sys.executable, *command[1:], "--successor", str(handed_over.listener.fileno())])


def run_restart(arguments: argparse.Namespace) -> int:
    from envlet.client import Client, as_json

    path = settings.socket_path(arguments.socket)
    with Client(path) as client:
        before = client.info()
        begin_s = time.monotonic()
        result = client.restart(arguments.drain, arguments.force)
        away_s = time.monotonic()
    with Client(path) as client:  # waits in the socket's queue until the new daemon takes it
        after = client.info()
    end_s = time.monotonic()
    if after.instance == before.instance:
        raise exits.CommandError("the daemon that answers is the one from before: it did not restart; its log says why")
    if arguments.format == "json":
        output.print_json(as_json(result) | {"drain_s": away_s - begin_s, "away_s": end_s - away_s, "info": as_json(after)})
        return exits.OK
    adopted = after.statistics["adopted"]
    cut = f", {result.cut_short} requests cut short" if result.cut_short else ""
    print(f"restarted: version {after.version}, {adopted} environments taken over, away for {end_s - away_s:.2f} s{cut}")
    return exits.OK


def run_metrics(arguments: argparse.Namespace) -> int:
    from envlet.client import Client
    from envlet.metrics import exposition

    with Client(settings.socket_path(arguments.socket)) as client:
        sys.stdout.write(exposition(client.info()).decode())
    return exits.OK


def run_doctor(arguments: argparse.Namespace) -> int:
    from envlet.client import Client, as_json

    with Client(settings.socket_path(arguments.socket)) as client:
        result = client.doctor()
    if arguments.format == "json":
        output.print_json(as_json(result))
    else:
        output.print_table(
            ("", "CHECK", "TOOK", "WHAT"),
            [
                ("ok" if one.ok else "WRONG", one.name, output.duration(one.took_s) if one.took_s else "", one.detail)
                for one in result.checks
            ],
        )
    return exits.OK if all(one.ok for one in result.checks) else exits.ERROR


def run_info(arguments: argparse.Namespace) -> int:
    from envlet.client import Client, as_json

    with Client(settings.socket_path(arguments.socket)) as client:
        info = as_json(client.info())
    if arguments.format == "json":
        output.print_json(info)
        return exits.OK
    for line in node_report.lines(info):
        print(line)
    if rows := node_report.operations(info):
        print()
        output.print_table(node_report.HEADERS, rows)
    return exits.OK

"""`weenv node …`: serve (also `envlet`), info."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import Any

import attrs

from tools import exits, output, settings


def register(commands: Any) -> None:
    parser = commands.add_parser("node", help="the node daemon")
    sub = parser.add_subparsers(dest="node_command", required=True, metavar="COMMAND")

    serve = sub.add_parser("serve", help="run the daemon in the foreground; `envlet` is the same")
    serve.add_argument("--config", type=Path, metavar="FILE", help="TOML; its keys: docs/node.md")
    serve.set_defaults(run=run_serve)

    info = sub.add_parser("info", help="the running daemon in numbers")
    add_socket(info)
    output.add_format(info)
    info.set_defaults(run=run_info)


def add_socket(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--socket", type=Path, metavar="PATH", help="of the daemon (default: $WEENV_SOCKET, /run/weenv/envlet.sock)"
    )


def run_serve(arguments: argparse.Namespace) -> int:
    import trio

    from envlet import mounts
    from envlet.config import NodeConfig
    from envlet.dataplane import DataPlaneConfig

    chosen = settings.load_node_settings(arguments.config)
    if os.geteuid() != 0:
        raise exits.CommandError("the daemon mounts and makes cgroups: expected root")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    config = NodeConfig(
        state_dir=chosen.state_dir.absolute(),
        run_dir=chosen.run_dir.absolute(),
        socket_path=chosen.socket_path.absolute(),
        runtime=chosen.runtime,
        cgroup_parent=chosen.cgroup_parent,
        cpu=chosen.cpu,
        memory_bytes=chosen.memory,
        pids=chosen.pids,
        host_network=chosen.host_network,
        environments_max=chosen.environments_max,
    )
    if chosen.starting_max is not None:
        config = attrs.evolve(config, starting_max=chosen.starting_max)
    data_plane = DataPlaneConfig(
        mount_path=config.run_dir / "layers",
        cache_path=chosen.cache_path.absolute(),
        threads=chosen.fuse_threads,
        chunk_deadline_s=chosen.chunk_deadline_s,
        auth_files=settings.auth_files(),
    )
    mounts.enter_private_namespace()
    trio.run(_serve, config, data_plane)
    return exits.OK


async def _serve(config: Any, data_plane_config: Any) -> None:

    from envlet.daemon import serve
    from envlet.dataplane import DataPlaneLost, open_data_plane
    from envlet.resolver import RegistryResolver

    async with open_data_plane(data_plane_config) as plane:
        await serve(config, RegistryResolver(settings.credentials()), plane)
        lost = plane.lost.is_set()
    if lost:
        raise DataPlaneLost


def run_info(arguments: argparse.Namespace) -> int:
    from envlet.client import Client, as_json

    with Client(settings.socket_path(arguments.socket)) as client:
        info = as_json(client.info())
    if arguments.format == "json":
        output.print_json(info)
        return exits.OK
    plane = info["statistics"]["data_plane"]
    layers = plane["layers"].values()
    states = ", ".join(f"{number} {state}" for state, number in info["environments"].items()) or "none"
    fetched, stored = sum(layer["bytes"] for layer in layers), sum(layer["stored_bytes"] for layer in layers)
    print(f"version       {info['version']}")
    print(f"runtime       {info['runtime']}, cgroups {info['cgroups']}")
    print(f"environments  {states} (at most {info['environments_max']})")
    print(f"plans         {plane['plans']}, layers {len(layers)}")
    print(f"fetched       {output.size(fetched)} of {output.size(stored)} ({output.share(fetched, stored)})")
    requests = {
        name.removeprefix("requests_"): n for name, n in plane["fuse"].items() if name.startswith("requests_") and n
    }
    print(
        f"fuse          {sum(requests.values())} requests: {', '.join(f'{name} {n}' for name, n in requests.items())}"
    )
    return exits.OK

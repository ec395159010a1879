"""The network of an environment: loopback alone, or the node's own where the node lends it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from envlet_harness import Node, make_root, with_node

from envlet.client import Client
from envlet.errors import NETWORK_REFUSED, EnvletError
from envlet.types import ExecResult


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("lower") / "root")


@contextmanager
def greeter() -> Iterator[int]:
    """A service on the machine's loopback that says hello; its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"hello from outside\n")

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def greet(client: Client, environment: str, port: int) -> ExecResult:
    return client.exec(environment, ["sh", "-c", f"nc 127.0.0.1 {port} < /dev/null"], timeout_s=10)


def test_only_who_asks_has_the_machines_network(root: Path, tmp_path: Path) -> None:
    (tmp_path / "resolv.conf").write_text("nameserver 192.0.2.1\n")

    async def test(node: Node) -> None:
        def ask(client: Client) -> None:
            alone = client.create(["base"]).id
            lent = client.create(["base"], network="host").id
            with greeter() as port:
                assert greet(client, alone, port).exit_code != 0
                assert greet(client, lent, port).stdout == b"hello from outside\n"
            assert client.exec(lent, ["cat", "/etc/resolv.conf"]).stdout == b"nameserver 192.0.2.1\n"
            assert client.exec(lent, ["sh", "-c", "echo x > /etc/resolv.conf"]).exit_code != 0
            with open(tmp_path / "diff.tar", "wb") as file:
                client.diff(lent, file.fileno())
            assert b"resolv.conf" not in (tmp_path / "diff.tar").read_bytes()

        await node.call(ask)

    with_node(root, test, host_network=True, resolv_conf=tmp_path / "resolv.conf")


def test_a_node_lends_its_network_only_when_it_is_told_to(root: Path) -> None:
    async def test(node: Node) -> None:
        with pytest.raises(EnvletError, match="host_network = true") as raised:
            await node.call(lambda client: client.create(["base"], network="host"))
        assert raised.value.code is NETWORK_REFUSED
        assert node.daemon._live == {}

    with_node(root, test)

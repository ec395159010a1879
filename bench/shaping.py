"""`python -m bench.shaping HOST:PORT`: a registry that is as far away as it is in a cluster, on the loopback.

A TCP proxy that delays every byte by half a round trip in each direction, a new connection by one more, and lets no more than so many
bytes a second pass towards the client, over all connections. In a process of its own (`shaped`, `shaping`), so that it does not share an
interpreter with what is measured. It answers each line on its stdin with how many bytes have passed towards clients, and ends with it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

import attrs

PIECE_BYTES = 128 << 10
ON_THE_WAY_BYTES = 16 << 20
"""Of one connection and direction: more than a round trip's worth at 1 Gb/s and 100 ms."""


@attrs.define
class Line:
    """What all connections share in one direction."""

    delay_s: float
    bytes_per_s: float | None
    passed_bytes: int = 0
    _busy_until_s: float = 0.0

    def arrival_s(self, size: int, now_s: float) -> float:
        """When the last of so many bytes that are sent now arrives."""
        self.passed_bytes += size
        if self.bytes_per_s is not None:
            self._busy_until_s = max(now_s, self._busy_until_s) + size / self.bytes_per_s
            return self._busy_until_s + self.delay_s
        return now_s + self.delay_s


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: Line, since_s: float) -> None:
    """One direction of a connection, which begins at `since_s`, to its end."""
    loop = asyncio.get_running_loop()
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(ON_THE_WAY_BYTES // PIECE_BYTES)

    async def deliver() -> None:
        while True:
            arrival_s, data = await under_way.get()
            await asyncio.sleep(max(0.0, arrival_s - loop.time()))
            if not data:
                break
            writer.write(data)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(deliver())
        while True:
            data = await reader.read(PIECE_BYTES)
            await under_way.put((line.arrival_s(len(data), max(loop.time(), since_s)), data))
            if not data:
                return


async def _answer(down: Line) -> None:
    """Each line on stdin with how many bytes have passed, until its end. Its thread is not waited for when the proxy is interrupted."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def answer() -> None:
        while data := os.read(0, 4096):
            for _ in range(data.count(b"\n")):
                print(down.passed_bytes, flush=True)
        loop.call_soon_threadsafe(over.set)

    threading.Thread(target=answer, daemon=True).start()
    await over.wait()


async def serve(target: str, round_trip_s: float, bytes_per_s: float | None, listen: str = "127.0.0.1:0") -> None:
    """Says its HOST:PORT on stdout, and proxies until its stdin ends."""
    host, _, port = target.rpartition(":")
    up, down = Line(round_trip_s / 2, None), Line(round_trip_s / 2, bytes_per_s)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begins_s = asyncio.get_running_loop().time() + round_trip_s
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port), limit=2 * PIECE_BYTES)
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(_carry(reader, far_writer, up, begins_s))
                    tasks.create_task(_carry(far_reader, writer, down, begins_s))
            finally:
                far_writer.close()
        except* OSError:
            pass  # an end that went away
        finally:
            writer.close()

    at, _, port_at = listen.rpartition(":")
    async with await asyncio.start_server(handle, at, int(port_at), limit=2 * PIECE_BYTES) as server:
        print(f"{at}:{server.sockets[0].getsockname()[1]}", flush=True)
        await _answer(down)


@attrs.frozen
class Shaping:
    """A running proxy; `address`: its HOST:PORT."""

    address: str
    process: subprocess.Popen[str]

    def passed_bytes(self) -> int:
        """Towards clients, so far."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@contextlib.contextmanager
def shaping(
    target: str, round_trip_s: float, bytes_per_s: float | None, *, listen: str = "127.0.0.1:0", enter: Sequence[str] = ()
) -> Iterator[Shaping]:
    """A proxy to the target's HOST:PORT. `enter`: begins the command, to run it on another host (hosts.py)."""
    command = [*enter, sys.executable, "-m", "bench.shaping", target, "--round-trip", str(round_trip_s), "--listen", listen]
    if bytes_per_s is not None:
        command += ["--rate", str(bytes_per_s)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        if not address:
            raise SystemExit(f"the proxy to {target} did not start at {listen}")
        yield Shaping(address, process)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@contextlib.contextmanager
def shaped(target: str, round_trip_s: float = 0.02, bytes_per_s: float | None = 125e6) -> Iterator[str]:
    """The target's HOST:PORT as seen from afar. The defaults: 20 ms and 1 Gb/s."""
    with shaping(target, round_trip_s, bytes_per_s) as proxy:
        yield proxy.address


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", metavar="HOST:PORT")
    parser.add_argument("--round-trip", type=float, default=0.02, metavar="S")
    parser.add_argument("--rate", type=float, metavar="BYTES", help="a second; default: no bound")
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT")
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(arguments.target, arguments.round_trip, arguments.rate, arguments.listen))


if __name__ == "__main__":
    main()

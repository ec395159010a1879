"""`python -m bench.shaping HOST:PORT`: a registry that is as far away as it is in a cluster, on the loopback.

A TCP proxy that delays every byte by half a round trip in each direction, a new connection by one more, and lets no more than so many
bytes a second pass towards the client, over all connections. In a process of its own (`shaped`), so that it does not share an
interpreter with what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator

import attrs

PIECE_BYTES = 128 << 10
ON_THE_WAY_BYTES = 16 << 20
"""Of one connection and direction: more than a round trip's worth at 1 Gb/s and 100 ms."""


@attrs.define
class Line:
    """What all connections share in one direction."""

    delay_s: float
    bytes_per_s: float | None
    _busy_until_s: float = 0.0

    def arrival_s(self, size: int, now_s: float) -> float:
        """When the last of so many bytes that are sent now arrives."""
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


async def serve(target: str, round_trip_s: float, bytes_per_s: float | None) -> None:
    """Says its HOST:PORT on stdout, and proxies until it is killed."""
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

    server = await asyncio.start_server(handle, "127.0.0.1", 0, limit=2 * PIECE_BYTES)
    print(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


@contextlib.contextmanager
def shaped(target: str, round_trip_s: float = 0.02, bytes_per_s: float | None = 125e6) -> Iterator[str]:
    """The target's HOST:PORT as seen from afar. The defaults: 20 ms and 1 Gb/s."""
    command = [sys.executable, "-m", "bench.shaping", target, "--round-trip", str(round_trip_s)]
    if bytes_per_s is not None:
        command += ["--rate", str(bytes_per_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", metavar="HOST:PORT")
    parser.add_argument("--round-trip", type=float, default=0.02, metavar="S")
    parser.add_argument("--rate", type=float, metavar="BYTES", help="a second; default: no bound")
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(arguments.target, arguments.round_trip, arguments.rate))


if __name__ == "__main__":
    main()

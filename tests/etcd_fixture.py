"""An etcd for tests: Debian's, as a process."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import attrs
from registry_fixture import free_port


@attrs.frozen
class Etcd:
    """A running etcd."""

    url: str

    async def call(self, method: str, **request: object) -> dict[str, object]:
        async with aiohttp.ClientSession() as session, session.post(f"{self.url}/v3/{method}", json=request) as response:
            answer: dict[str, object] = await response.json()
            return answer


@contextlib.contextmanager
def run_etcd(directory: Path, port: int) -> Iterator[Etcd]:
    """Debian's, with its data in `directory`; it is ready."""
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [
            "etcd", "--data-dir", directory, "--listen-client-urls", url, "--advertise-client-urls", url,
            "--listen-peer-urls", f"http://127.0.0.1:{free_port()}", "--logger", "zap", "--log-outputs", "stderr", "--unsafe-no-fsync",
        ],
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if b"serving" in line and b"client" in line:
                break
        assert process.poll() is None
        with open("/dev/null", "wb") as nowhere:
            drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=nowhere)
        yield Etcd(url)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    drain.wait()

"""`python -m weefs`: the data-plane process, started by the node daemon with a socket pair's end and descriptors of
/dev/fuse.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

from registry import load_credentials
from weefs.errors import WeefsError
from weefs.fetch import FetchPolicy
from weefs.service import serve


def main() -> None:
    parser = argparse.ArgumentParser(prog="weefs", description="The data plane of a node; started by envlet.")
    parser.add_argument("--control", type=int, required=True, metavar="FD", help="our end of the socket pair")
    parser.add_argument(
        "--fuse", type=int, required=True, action="append", metavar="FD", help="descriptor of /dev/fuse; repeatable"
    )
    parser.add_argument("--cache", type=Path, required=True, metavar="DIR", help="the node cache")
    parser.add_argument(
        "--auth-file", type=Path, action="append", default=[], metavar="FILE", help="credentials of registries"
    )
    parser.add_argument(
        "--deadline",
        type=float,
        default=FetchPolicy().deadline_s,
        metavar="S",
        help="seconds until a chunk is given up",
    )
    arguments = parser.parse_args()
    # ^C on a terminal and a service manager's SIGTERM reach the daemon too: it ends its environments first, then us, by
    # closing its end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=arguments.control)
    credentials = load_credentials(arguments.auth_file) if arguments.auth_file else None
    try:
        asyncio.run(
            serve(
                control,
                arguments.fuse,
                arguments.cache,
                policy=FetchPolicy(deadline_s=arguments.deadline),
                credentials=credentials,
            )
        )
    except WeefsError as error:
        sys.exit(f"weefs: {error}")
    # The FUSE threads end with the mount, which is the daemon's: they are not waited for.
    os._exit(0)


if __name__ == "__main__":
    main()

"""`python -m weefs`: the data-plane process, started by the node daemon with the descriptors that both keep: a listening socket, the
memory of requests in flight, and those of /dev/fuse.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import signal
from pathlib import Path

import msgspec

from registry import RegistryError, load_credentials
from weefs.errors import WeefsError
from weefs.failures import first_cause
from weefs.fetch import FetchPolicy
from weefs.fill import MODES, FillPolicy
from weefs.log import say, say_traceback
from weefs.peerconfig import PeersConfig
from weefs.room import CacheBound
from weefs.service import serve


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="weefs", description="The data plane of a node; started by envlet.")
    parser.add_argument("--listen", type=int, required=True, metavar="FD", help="a listening Unix socket")
    parser.add_argument("--session", type=int, required=True, metavar="FD", help="memory of core.create_session()")
    in_order = "descriptor of /dev/fuse; repeatable, always in the same order"
    parser.add_argument("--fuse", type=int, required=True, action="append", metavar="FD", help=in_order)
    begun_anew = "what a successor must know; begun anew for a new session"
    parser.add_argument("--journal", type=Path, required=True, metavar="FILE", help=begun_anew)
    parser.add_argument("--cache", type=Path, required=True, metavar="DIR", help="the node cache")
    parser.add_argument("--cache-size", type=int, metavar="BYTES", help="what it may take; default: what its filesystem has room for")
    free_min = "what its filesystem keeps for others"
    parser.add_argument("--cache-free-min", type=int, default=CacheBound().free_min_bytes, metavar="BYTES", help=free_min)
    parser.add_argument("--auth-file", type=Path, action="append", default=[], metavar="FILE", help="credentials of registries")
    parser.add_argument(
        "--deadline", type=float, default=FetchPolicy().deadline_s, metavar="S", help="seconds until a chunk is given up"
    )
    parser.add_argument("--peers", metavar="JSON", help="weefs.peerconfig.PeersConfig; default: there are none")
    parser.add_argument("--fill", choices=MODES, default="idle", help="what is fetched when nobody waits (docs/fill.md)")
    parser.add_argument("--fill-rate", type=int, metavar="BYTES", help="a second; default: no bound")
    parser.add_argument("--no-profiles", action="store_true", help="neither record what is read nor fetch it ahead the next time")
    parser.add_argument("--no-resend", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    arguments = _parser().parse_args()
    # Three for each open layer: the usual soft limit of 1,024 is for programs that use select(2).
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # ^C on a terminal and a service manager's SIGTERM reach the daemon too: it ends its environments first, then us.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Not asyncio.run(): it would cancel what is unfinished in the end, and thereby fail readers that a successor can answer.
    loop = asyncio.new_event_loop()
    try:
        credentials = load_credentials(arguments.auth_file) if arguments.auth_file else None
        loop.run_until_complete(
            serve(
                arguments.listen,
                arguments.session,
                arguments.fuse,
                arguments.cache,
                arguments.journal,
                bound=CacheBound(arguments.cache_size, arguments.cache_free_min),
                policy=FetchPolicy(deadline_s=arguments.deadline),
                credentials=credentials,
                fill=FillPolicy(arguments.fill, arguments.fill_rate),
                profiles=not arguments.no_profiles,
                resend=not arguments.no_resend,
                peers=msgspec.json.decode(arguments.peers, type=PeersConfig) if arguments.peers is not None else None,
            )
        )
    except BaseException as error:
        cause = first_cause(error)
        if isinstance(cause, (WeefsError, RegistryError, OSError)):
            say(str(cause))
        else:
            say_traceback()
        os._exit(1)
    # The FUSE threads may still run: they are not waited for.
    os._exit(0)


if __name__ == "__main__":
    main()

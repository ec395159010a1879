"""`weenv cache prefetch REF…`: has the daemon bring groups into its node's cache before any environment wants them.

The daemon does it and nobody else: it remembers the references, its settings say how large the cache may be and who the peers are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tools import exits, output, settings
from tools.node_commands import add_socket

if TYPE_CHECKING:
    from envlet.types import PrefetchWhat

SHOWN_DIGEST = 19


def register(commands: Any) -> None:
    command = commands.add_parser("prefetch", help="bring groups into it before any environment wants them")
    command.add_argument("references", nargs="+", metavar="REF", help="a group's reference")
    what = command.add_mutually_exclusive_group()
    what.add_argument("--all", dest="what", action="store_const", const="all", help="all of each layer, also if a profile names a part")
    only = "only what profiles name: nothing of the contents of a layer that has none"
    what.add_argument("--profile", dest="what", action="store_const", const="profile", help=only)
    add_socket(command)
    output.add_format(command)
    command.set_defaults(run=run, what="auto")


def run(arguments: argparse.Namespace) -> int:
    """Progress on stderr: a bar if that is a terminal, JSON lines with `--format json`. ^C ends it, and what came stays."""
    from envlet.client import Client, as_json

    what: PrefetchWhat = arguments.what
    with Client(settings.socket_path(arguments.socket)) as client, _progress(arguments.format) as on_progress:
        result = client.prefetch(arguments.references, what=what, on_progress=on_progress)
    if arguments.format == "json":
        output.print_json(as_json(result))
        return exits.OK
    rows = [(one.digest[:SHOWN_DIGEST], one.by, output.size(one.done_bytes), one.source) for one in result.layers]
    output.print_table(("LAYER", "BY", "PRESENT", "SOURCE"), rows)
    return exits.OK


@contextlib.contextmanager
def _progress(form: str) -> Iterator[Callable[[int, int], None] | None]:
    """Bytes wanted, bytes there."""
    if form == "json":
        yield lambda wanted, done: output.say(json.dumps({"wanted_bytes": wanted, "done_bytes": done}))
        return
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeElapsedColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("prefetch", total=None)
        yield lambda wanted, done: bar.update(task, completed=done, total=wanted or None)

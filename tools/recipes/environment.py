"""The environment that a recipe's steps run in: made on this node, and gone when the block is left, however it is left."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from attrs import frozen

from envlet.client import Client
from envlet.errors import APPLY_REFUSED, INVALID_PARAMS, NETWORK_REFUSED, NOT_FOUND, ConnectionLost, EnvletError
from tools import exits, output
from tools.recipes.recipe import Recipe, Step
from tools.recipes.templates import RecipeError

_SHELL = ("/bin/sh", "-e", "-c")
_SHOWN_CHARACTERS = 80
_STDERR = 2
_SPARE_S = 3600.0
"""How much longer than all steps together an environment may last whose builder was killed."""


@frozen
class Place:
    """Where to build: the daemon's socket, and the quota; None: the node's default."""

    socket: Path
    cpu: float | None = None
    memory_bytes: int | None = None


def run_steps(recipe: Recipe, base: Sequence[str], files: BinaryIO | None, place: Place, diff: BinaryIO) -> list[float]:
    """Makes an environment of the groups `base` and the tar `files`, runs the steps in it, and writes what is different
    then, as a tar, to `diff`; returns how long each step took, seconds. RecipeError for what the node refuses in the recipe,
    CommandError for a step that fails; EnvletError, ConnectionLost.
    """
    with _environment(recipe, base, files, place) as (client, environment):
        wall_s = []
        for number, step in enumerate(recipe.steps, 1):
            name = f"step {number} of {len(recipe.steps)}"
            output.say(f"{name}: {output.clip(step.run.strip(), _SHOWN_CHARACTERS)}")
            wall_s.append(_run_step(client, environment, step, name))
            output.say(f"{name}: done in {output.duration(wall_s[-1])}")
        client.diff(environment, diff.fileno())
        return wall_s


@contextlib.contextmanager
def _environment(recipe: Recipe, base: Sequence[str], files: BinaryIO | None, place: Place) -> Iterator[tuple[Client, str]]:
    environment = f"build-{secrets.token_hex(6)}"
    client = Client(place.socket)
    try:
        with client:
            client.create(
                list(base),
                role="evaluation" if recipe.role == "evaluator" else "execution",
                apply_fd=files.fileno() if files is not None else None,
                cpu=place.cpu,
                memory_bytes=place.memory_bytes,
                ttl_s=sum(step.timeout_s for step in recipe.steps) + _SPARE_S,
                env=_variables(recipe),
                workdir=recipe.config.workdir,
                network="host" if recipe.network == "host" else "none",
                id=environment,
                labels={"weenv.build": recipe.name},
            )
            yield client, environment
    except BaseException as raised:
        try:
            _remove(place.socket, environment)
        except (EnvletError, ConnectionLost) as error:
            output.say(f"weenv: the environment {environment} may be left: {error}")
        if isinstance(raised, EnvletError) and raised.code in (APPLY_REFUSED, INVALID_PARAMS, NETWORK_REFUSED):
            raise RecipeError(exits.describe(raised)) from raised
        raise
    _remove(place.socket, environment)


def _remove(socket: Path, environment: str) -> None:
    """On a connection of its own: what was asked for on the other is withdrawn with that."""
    with Client(socket) as client:
        try:
            client.delete(environment)
        except EnvletError as error:
            if error.code != NOT_FOUND:
                raise


def _variables(recipe: Recipe) -> dict[str, str]:
    """Those of the group, over what makes programs leave the time and the host's name, which is the environment's id, out
    of what they write.
    """
    return {
        "SOURCE_DATE_EPOCH": str(recipe.epoch),
        "PYTHONDONTWRITEBYTECODE": "1",
        "GIT_AUTHOR_DATE": f"@{recipe.epoch} +0000",
        "GIT_COMMITTER_DATE": f"@{recipe.epoch} +0000",
        "EMAIL": "root@localhost",
        **recipe.config.env,
    }


def _run_step(client: Client, environment: str, step: Step, name: str) -> float:
    """Its output goes to our stderr as it comes; its stdin is empty."""
    with open(os.devnull, "rb") as null:
        try:
            result = client.exec(
                environment,
                [*_SHELL, step.run],
                workdir=step.workdir,
                env=step.env,
                user=step.user,
                timeout_s=step.timeout_s,
                stdio=(null.fileno(), _STDERR, _STDERR),
            )
        except EnvletError as error:
            told, status = f"{name}: {exits.describe(error)}", exits.status_for(error)
            if status == exits.USAGE:
                raise RecipeError(told) from error
            raise exits.CommandError(told, exits.ERROR if status is None else status) from error
    if result.timed_out:
        raise exits.CommandError(f"{name}: expected an end within {step.timeout_s:g} s (timeout_s); killed, with all that it started")
    if result.exit_code:
        why = f": {result.failure}" if result.failure else ""
        raise exits.CommandError(f"{name}: expected exit status 0, received {result.exit_code}{why}; nothing is published")
    return result.wall_s

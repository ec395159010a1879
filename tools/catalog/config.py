"""CATALOG.toml: how the repositories of a data set become groups, and which harnesses and evaluators there are. docs/catalog.md
is its manual.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from attrs import frozen
from msgspec import Meta

from envlet.catalog import OBJECT_ID, WITHOUT_NUL, Argv, Form, in_our_words
from tools import exits
from tools.recipes.recipe import CacheSpec, GitSpec, Recipe, load_recipe
from tools.recipes.templates import RecipeError, Renderer

Text = Annotated[str, Meta(min_length=1)]
INSIDE = Form(
    re.compile(r"(?=.{1,1000}\Z)(?:/(?!\.{1,2}(?:/|\Z))[^/\x00-\x1f]+)+"),
    "an absolute path of at most 1,000 characters, without '.', '..' and a slash at the end",
)
_SLUG_CHARACTERS = 80
_HASH_CHARACTERS = 8


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class RepositorySpec(_Section, frozen=True, kw_only=True):
    """`[repositories.NAME]`: what is not as for the others."""

    url: Text | None = None
    path: str | None = None
    commit: str | None = None
    recipe: Text | None = None
    seal: bool | None = None
    variables: dict[str, str] = {}

    def __post_init__(self) -> None:
        INSIDE.check("path", self.path)
        OBJECT_ID.check("commit", self.commit)


class EvaluatorSpec(_Section, frozen=True, kw_only=True):
    """`[evaluators.NAME]`: a group, and the command that judges unless a task has one of its own."""

    group: Text | None = None
    command: Argv | None = None

    def __post_init__(self) -> None:
        WITHOUT_NUL.check("command", *(self.command or ()))


class CatalogConfig(_Section, frozen=True, kw_only=True):
    """The whole file."""

    repositories: Annotated[dict[Text, RepositorySpec], Meta(min_length=1)]
    recipe: Text | None = None
    url: Text | None = None
    path: str = "/src"
    seal: bool = True
    harnesses: dict[Text, Text] = {}
    evaluators: dict[Text, EvaluatorSpec] = {}

    def __post_init__(self) -> None:
        INSIDE.check("path", self.path)


@frozen
class Repository:
    """A repository as it is to be packaged.

    tag     what its group is called: its name in letters that any registry takes, and a digest, so that no two are alike
    path    where it is in environments
    commit  of tasks that name none
    seal    whether init drops what a task's answer could be read from
    """

    name: str
    tag: str
    url: str
    path: str
    commit: str | None
    seal: bool
    recipe: Recipe
    recipe_path: Path


def load_config(path: Path) -> CatalogConfig:
    """CommandError names the key that is wrong; OSError."""
    try:
        return msgspec.convert(tomllib.loads(path.read_text("utf-8")), CatalogConfig)
    except msgspec.ValidationError as error:
        raise exits.CommandError(f"{path}: {in_our_words(error)}", exits.USAGE) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise exits.CommandError(f"{path}: expected TOML: {error}", exits.USAGE) from error


def open_repository(config: CatalogConfig, name: str, path: Path, epoch_s: int | None) -> Repository:
    """One of the repositories of the file `path`, with its recipe rendered. CommandError, OSError."""
    where = f"{path}: repositories.{name}"
    spec = config.repositories[name]
    url, recipe_name = spec.url or config.url, spec.recipe or config.recipe
    for key, value in (("url", url), ("recipe", recipe_name)):
        if value is None:
            raise exits.CommandError(f"{where}.{key}: expected one, here or for all, received none", exits.USAGE)
    assert url is not None
    assert recipe_name is not None
    inside, recipe_path = spec.path or config.path, path.parent / recipe_name
    url = Renderer({**spec.variables, "repository": name}).render(url, f"{where}.url")
    try:
        recipe = _load_recipe(recipe_path, spec.variables, {"repository": name, "path": inside}, where, epoch_s)
    except RecipeError as error:
        raise exits.CommandError(f"{where}: {error}", exits.USAGE) from error
    return Repository(
        name=name,
        tag=tag_of(name),
        url=str((path.parent / url).absolute()) if url.startswith(("./", "../")) else url,
        path=inside,
        commit=spec.commit,
        seal=config.seal if spec.seal is None else spec.seal,
        recipe=_for_task(recipe, inside, f"{where}: {recipe_path}"),
        recipe_path=recipe_path,
    )


def _load_recipe(path: Path, variables: Mapping[str, str], ours: Mapping[str, str], where: str, epoch_s: int | None) -> Recipe:
    """`ours`: variables that are set when the recipe has them."""
    declared = _declared(path)
    for name in variables:
        if name in ours:
            raise exits.CommandError(
                f"{where}.variables.{name}: expected another name, for this one is set from the configuration", exits.USAGE
            )
        if declared is not None and name not in declared:
            known = ", ".join(declared) or "none"
            raise exits.CommandError(f"{where}.variables.{name}: expected one of [variables] of {path}: {known}", exits.USAGE)
    return load_recipe(path, {**variables, **{name: value for name, value in ours.items() if name in (declared or ())}}, epoch_s)


def _declared(path: Path) -> Mapping[str, Any] | None:
    """The recipe's variables; None when it is wrong, which loading it will say."""
    try:
        variables = tomllib.loads(path.read_text("utf-8")).get("variables", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        return None
    return variables if isinstance(variables, dict) else None


def _for_task(recipe: Recipe, path: str, where: str) -> Recipe:
    """The recipe as one of a repository: of role task, in whose directory commands start, and with indexes that fit."""
    if recipe.role not in (None, "task"):
        raise exits.CommandError(f"{where}: role: expected 'task' or none, received '{recipe.role}'", exits.USAGE)
    if recipe.version is None and recipe.cache == CacheSpec():
        message = "expected a 'version', or 'locks' in [cache], by which a group that exists is known again, received neither"
        raise exits.CommandError(f"{where}: {message}", exits.USAGE)
    config = recipe.config if recipe.config.workdir is not None else msgspec.structs.replace(recipe.config, workdir=path)
    return msgspec.structs.replace(recipe, role="task", config=config, git=GitSpec(fix=True))


def tag_of(name: str) -> str:
    """A name that a tag and a repository of a registry may have."""
    readable = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:_SLUG_CHARACTERS].strip("-")
    digest = hashlib.sha256(name.encode()).hexdigest()[:_HASH_CHARACTERS]
    return f"{readable}-{digest}" if readable else digest

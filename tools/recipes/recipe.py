"""A recipe: what its file may say, and what it says once its templates are carried out. docs/recipes.md is its manual.

Keys are checked as they stand in the file, values when their templates are carried out: `to = "{{ prefix }}/x"` is a path
only then.
"""

from __future__ import annotations

import contextlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from attrs import frozen
from msgspec import Meta

from envlet.errors import EnvletError
from envlet.users import split_user
from registry.manifest import ROLES
from tools.recipes.paths import matcher
from tools.recipes.templates import RecipeError, Renderer

DEFAULT_EPOCH_S = 315_532_800
"""1980-01-01, the first time that a zip archive, and so a Python wheel, can say."""
_MAX_EPOCH_S = (1 << 33) - 1
_LITERAL_KEYS = ("name", "role", "variables")
"""What has no templates: the variables, and what tells groups apart."""

Text = Annotated[str, Meta(min_length=1)]
Variables = dict[str, str]


@frozen
class _Form:
    """What a string must look like, for a machine and in words."""

    pattern: re.Pattern[str]
    words: str


_ABSOLUTE = _Form(re.compile(r"(?!.*/\.\.(?:/|\Z))/.{0,4094}", re.DOTALL), "an absolute path without '..'")
_MODE = _Form(re.compile(r"0?[0-7]{3,4}"), "an octal mode such as 0644")
_OWNER = _Form(re.compile(r"[0-9]{1,9}(:[0-9]{1,9})?"), "UID or UID:GID, numbers of at most nine digits")
_ROLE = _Form(re.compile("|".join(ROLES)), f"one of {', '.join(ROLES)}")
_NETWORK = _Form(re.compile("none|host"), "none or host")
_NAME = _Form(re.compile(r"[A-Za-z_][A-Za-z0-9_]*"), "a name of letters, digits and _")
_VARIABLE = _Form(re.compile(r"[^=\0]+"), "the name of a variable, without =")

T = TypeVar("T")


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class FileSpec(_Section, frozen=True, kw_only=True):
    """`[[files]]`: what is put in before the steps. One of `source` (`from`) and `contents` is set."""

    to: str
    source: Text | None = msgspec.field(name="from", default=None)
    contents: str | None = None
    mode: str | None = None
    owner: str = "0:0"

    @property
    def ids(self) -> tuple[int, int]:
        """User and group; the group is the user's number when none is given."""
        user, _, group = self.owner.partition(":")
        return int(user), int(group or user)


class Step(_Section, frozen=True, kw_only=True):
    """`[[steps]]`: a shell script."""

    run: Text
    user: Text = "0:0"
    workdir: str | None = None
    env: Variables = {}
    timeout_s: Annotated[float, Meta(gt=0, le=7 * 86400)] = 3600.0


class ProcessSpec(_Section, frozen=True, kw_only=True):
    """`[config]`: what the group says about processes, as an image configuration does."""

    env: Variables = {}
    workdir: str | None = None
    user: Text | None = None
    entrypoint: tuple[str, ...] | None = None
    cmd: tuple[str, ...] | None = None


class CacheSpec(_Section, frozen=True, kw_only=True):
    """`[cache]`: files beside the recipe whose bytes decide whether an earlier result is good."""

    locks: tuple[Text, ...] = ()


class GitSpec(_Section, frozen=True, kw_only=True):
    """`[git]`: whether the indexes of work trees are made to fit the packed files."""

    fix: bool = False


class Recipe(_Section, frozen=True, kw_only=True):
    """A whole recipe."""

    name: Text
    base: Annotated[tuple[Text, ...], Meta(min_length=1, max_length=64)]
    role: str | None = None
    version: Text | None = None
    network: str = "none"
    epoch: Annotated[int, Meta(ge=0, le=_MAX_EPOCH_S)] = DEFAULT_EPOCH_S
    variables: Variables = {}
    files: tuple[FileSpec, ...] = ()
    steps: tuple[Step, ...] = ()
    config: ProcessSpec = ProcessSpec()
    cache: CacheSpec = CacheSpec()
    git: GitSpec = GitSpec()
    exclude: tuple[Text, ...] = ()


_SECTIONS: dict[str, type[_Section]] = {
    "files": FileSpec, "steps": Step, "config": ProcessSpec, "cache": CacheSpec, "git": GitSpec,
}  # fmt: skip


def load_recipe(path: Path, overrides: Mapping[str, str], epoch_s: int | None = None) -> Recipe:
    """Reads and renders a recipe; `overrides` replace the defaults of its variables, `epoch_s` its epoch. RecipeError,
    OSError.
    """
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: expected TOML: {error}") from error
    _check_keys(data, path)
    defaults = _convert(data.get("variables", {}), Variables, path, "variables")
    variables = {**defaults, **_known(overrides, defaults, path)}
    renderer = Renderer(variables)
    templates = {key: value for key, value in data.items() if key not in _LITERAL_KEYS}
    texts = [text for key, value in templates.items() for text in _texts(value, f"{path}: {key}")]
    rendered = data | _replaced(templates, iter(renderer.render_all(texts)))
    recipe = _convert({**rendered, "variables": variables}, Recipe, path)
    with named(path):
        matcher(recipe.exclude)
    if epoch_s is not None:
        recipe = msgspec.structs.replace(recipe, epoch=epoch_s)
    _check_values(recipe, path)
    return recipe


def _convert(data: object, kind: type[T], path: Path, at: str = "") -> T:
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at ")
        key = (at + where.strip("`").removeprefix("$")).removeprefix(".")
        raise RecipeError(f"{path}: {key + ': ' if key else ''}{what[:1].lower()}{what[1:].replace(', got ', ', received ')}") from error


def _check_keys(data: dict[str, Any], path: Path) -> None:
    """Every key is known, and what must be there is there; names of variables are names, and their values text."""
    _check_section(data, Recipe, f"{path}: ")
    _check_variables(data.get("variables"), _NAME, f"{path}: variables")
    for name, section in _SECTIONS.items():
        value = data.get(name, [])
        for number, part in enumerate(value if isinstance(value, list) else [value]):
            where = f"{path}: {name}[{number}]" if isinstance(value, list) else f"{path}: {name}"
            if isinstance(part, dict):
                _check_section(part, section, f"{where}.")
                _check_variables(part.get("env"), _VARIABLE, f"{where}.env")


def _check_section(data: dict[str, Any], section: type[_Section], where: str) -> None:
    fields = msgspec.structs.fields(section)
    known = [field.encode_name for field in fields]
    for key in data:
        if key not in known:
            raise RecipeError(f"{where}{key}: expected one of the keys {', '.join(known)}")
    for field in fields:
        if field.required and field.encode_name not in data:
            raise RecipeError(f"{where}{field.encode_name}: expected, but it is not there")


def _check_variables(table: object, name: _Form, where: str) -> None:
    for key, value in table.items() if isinstance(table, dict) else ():
        if not name.pattern.fullmatch(key):
            raise RecipeError(f"{where}: expected {name.words}, received {key!r}")
        if not isinstance(value, str):
            raise RecipeError(f"{where}.{key}: expected a string, received {value!r}")


def _check_values(recipe: Recipe, path: Path) -> None:
    for where, value, form in _forms(recipe):
        if value is not None and not form.pattern.fullmatch(value):
            raise RecipeError(f"{path}: {where}: expected {form.words}, received {value[:200]!r}")
    if recipe.config.user is not None:
        try:
            split_user(recipe.config.user)
        except EnvletError as error:
            raise RecipeError(f"{path}: config.user: {error.message}") from error
    for number, spec in enumerate(recipe.files):
        if (spec.source is None) == (spec.contents is None):
            received = "neither" if spec.source is None else "both"
            raise RecipeError(f"{path}: files[{number}]: expected one of 'from' and 'contents', received {received}")


def _forms(recipe: Recipe) -> Iterator[tuple[str, str | None, _Form]]:
    yield "role", recipe.role, _ROLE
    yield "network", recipe.network, _NETWORK
    yield "config.workdir", recipe.config.workdir, _ABSOLUTE
    for number, step in enumerate(recipe.steps):
        yield f"steps[{number}].workdir", step.workdir, _ABSOLUTE
    for number, spec in enumerate(recipe.files):
        yield f"files[{number}].to", spec.to, _ABSOLUTE
        yield f"files[{number}].mode", spec.mode, _MODE
        yield f"files[{number}].owner", spec.owner, _OWNER


def _known(overrides: Mapping[str, str], variables: Mapping[str, str], path: Path) -> Mapping[str, str]:
    for name in overrides:
        if name not in variables:
            raise RecipeError(f"--set {name}: expected one of [variables] of {path}: {', '.join(variables) or 'none'}")
    return overrides


def _texts(value: object, where: str) -> Iterator[tuple[str, str]]:
    """Where each string of a value stands, and the string; keys are none."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from _texts(part, f"{where}[{number}]")
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _texts(part, f"{where}.{key}")


def _replaced(value: Any, texts: Iterator[str]) -> Any:
    """A value with other strings, in the order of `_texts`."""
    if isinstance(value, str):
        return next(texts)
    if isinstance(value, list):
        return [_replaced(part, texts) for part in value]
    if isinstance(value, dict):
        return {key: _replaced(part, texts) for key, part in value.items()}
    return value


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """What is wrong with the recipe of the file `path` is said with its name."""
    try:
        yield
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from error


def beside(directory: Path, name: str, where: str) -> Path:
    """What a recipe in `directory` calls `name`: below that directory, also when symlinks are followed, for a recipe may be
    a stranger's, and not everything that its builder can read is to be published. The path has no symlinks. RecipeError.
    """
    relative = Path(name)
    if relative.is_absolute() or ".." in relative.parts:
        raise RecipeError(f"{where}: expected a path below the recipe's directory, without '..', received '{name}'")
    path = directory / relative
    if not path.exists():
        raise RecipeError(f"{where}: expected a file or directory beside the recipe, received '{name}', which is not there")
    resolved, allowed = path.resolve(strict=True), directory.resolve(strict=True)
    if not resolved.is_relative_to(allowed):
        raise RecipeError(
            f"{where}: expected a path that stays below the recipe's directory, received '{name}', which leads to '{resolved}'"
        )
    return resolved

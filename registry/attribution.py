"""Which group of a split image a configuration value belongs to, by the image's history. Pure.

An image has one configuration, and its history says in words how it came about: `ENV`, `WORKDIR`, `USER`, `ENTRYPOINT`
and `CMD` stand between the entries that made layers, in the spelling of the builder (the classic one's and buildah's
`/bin/sh -c #(nop)  ENV A=b`, BuildKit's `ENV A=b`). The words are not a format: values are unquoted or quoted as the
Dockerfile had them, variables may be expanded or not. So history decides only *where* a value was set; *what* the
image's own value is comes from its configuration. A value that the last instruction about it cannot mean is put into
the top group, and a message says so.

An instruction between the last layer of one group and the first of the next belongs to the lower one when it, or one
behind it, is a CMD or ENTRYPOINT (with which images end), or was made nearer to the time of the lower layer than to that
of the upper (groups are often images that were built days apart); else to the upper, since an instruction prepares what
follows it.

Guarantee: merging the groups' configurations as a node does (`merge_configs`) gives exactly the image's.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import attrs

from registry.manifest import GroupConfig

_NOP = re.compile(r"^/bin/sh -c #\(nop\)\s+")
_INSTRUCTION = re.compile(r"(ENV|WORKDIR|USER|ENTRYPOINT|CMD)(?:\s+(.*))?", re.DOTALL)
_ASSIGNMENT = re.compile(r"(?:^|(?<=\s))([A-Za-z_][A-Za-z0-9_.-]*)=")
_OLD_ENV = re.compile(r"([^\s=]+)\s+(.+)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
SHELL = ("/bin/sh", "-c")
FIELDS = ("workdir", "user", "entrypoint", "cmd")

Setting = tuple[str, str]
"""A field of the configuration, and of `env` a variable's name."""
Value = str | tuple[str, ...]


@attrs.frozen
class HistoryEntry:
    """One entry of an image's history (OCI image specification, config.md)."""

    created_by: str = ""
    created: str | None = None
    is_empty: bool = False


@attrs.frozen
class Attribution:
    """A configuration for each group, base first, and what is worth telling about it."""

    configs: tuple[GroupConfig, ...]
    messages: tuple[str, ...]


@attrs.frozen
class Instruction:
    """A configuring instruction: ENV, WORKDIR, USER, ENTRYPOINT or CMD, and what stands behind it."""

    name: str
    text: str


def merge_configs(configs: Sequence[GroupConfig]) -> GroupConfig:
    """What a node makes of groups, base first: variables of the upper over the lower in their places, everything else of
    the topmost group that says it."""
    env: dict[str, str] = {}
    for config in configs:
        env.update(_variables(config.env))
    top_first = configs[::-1]
    entrypoint = next((config.entrypoint for config in top_first if config.entrypoint is not None), None)
    cmd = next((config.cmd for config in top_first if config.cmd is not None), None)
    return GroupConfig(
        env=_joined(env),
        workdir=next((config.workdir for config in top_first if config.workdir), None),
        user=next((config.user for config in top_first if config.user), None),
        entrypoint=entrypoint or None,
        cmd=cmd or None,
    )


def attribute(final: GroupConfig, history: Sequence[HistoryEntry], groups: Sequence[range]) -> Attribution:
    """Splits an image's configuration.

    final    of the image; no part of it is lost
    history  oldest first; one whose layers do not add up explains nothing
    groups   the layers of each group, base first, back to back from 0
    """
    messages: list[str] = []
    count = groups[-1].stop
    made = sum(not entry.is_empty for entry in history)
    if history and made != count:
        messages.append(f"the history speaks of {made} layers and the image has {count}: it explains nothing")
        history = ()
    placed = _place(history, groups)
    split = _Split(final, len(groups))
    for group, instruction in placed:
        split.apply(group, instruction)
    messages += split.settle()
    return Attribution(split.configs(), tuple(messages))


# ---- where ----


def _place(history: Sequence[HistoryEntry], groups: Sequence[range]) -> list[tuple[int, Instruction]]:
    """The configuring instructions in order, each with the number of its group."""
    owner = [number for number, layers in enumerate(groups) for _ in layers]
    placed: list[tuple[int, Instruction]] = []
    waiting: list[tuple[HistoryEntry, Instruction]] = []
    below: HistoryEntry | None = None
    layer = -1
    for entry in history:
        instruction = parse_instruction(entry.created_by)
        if not entry.is_empty:
            layer += 1
            lower = owner[max(0, layer - 1)]
            kept = _ending(waiting, below, entry) if owner[layer] != lower else 0
            placed += [(lower if number < kept else owner[layer], one) for number, (_, one) in enumerate(waiting)]
            waiting, below = [], entry
            if instruction is not None:  # a WORKDIR that made its directory
                placed.append((owner[layer], instruction))
        elif instruction is not None:
            waiting.append((entry, instruction))
    return placed + [(len(groups) - 1, one) for _, one in waiting]


def _ending(
    waiting: Sequence[tuple[HistoryEntry, Instruction]], below: HistoryEntry | None, above: HistoryEntry
) -> int:
    """How many of the instructions between two groups end the lower one."""
    ends = [number + 1 for number, (_, one) in enumerate(waiting) if one.name in ("CMD", "ENTRYPOINT")]
    ends += [number + 1 for number, (entry, _) in enumerate(waiting) if below and _is_nearer(entry, below, above)]
    return max(ends, default=0)


def _is_nearer(entry: HistoryEntry, below: HistoryEntry, above: HistoryEntry) -> bool:
    """Whether the times are known, and that of an entry is nearer to the layer's below it than to the one's above."""
    at, lower, upper = (_time(one.created) for one in (entry, below, above))
    return at is not None and lower is not None and upper is not None and abs(at - lower) < abs(upper - at)


def _time(text: str | None) -> datetime | None:
    """RFC 3339; None for what is not, and for one without a zone, which cannot be compared."""
    try:
        parsed = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return parsed if parsed.tzinfo is not None else None


def parse_instruction(created_by: str) -> Instruction | None:
    """The instruction that a history entry tells of, when it is one of the five."""
    match = _INSTRUCTION.fullmatch(_NOP.sub("", created_by, count=1).strip())
    if match is None:
        return None
    return Instruction(match[1], (match[2] or "").removesuffix("# buildkit").strip())


# ---- what ----


def env_readings(text: str, env: Mapping[str, str]) -> dict[str, list[str]]:
    """What `ENV text` may set: by name the values that it can mean, the likeliest first. `env`: before it."""
    if old := _OLD_ENV.fullmatch(text):
        return {old[1]: list(dict.fromkeys((_expand(old[2], env), old[2])))}
    readings: dict[str, list[str]] = {}
    plain, quoted = _unquoted_assignments(text), _quoted_assignments(text, env)
    for name in dict.fromkeys([*plain, *quoted]):
        order = (quoted, plain) if re.search(r"[\"'\\$]", text) else (plain, quoted)
        readings[name] = list(dict.fromkeys(reading[name] for reading in order if name in reading))
    return readings


def _unquoted_assignments(text: str) -> dict[str, str]:
    """`A=b c D=e` → A: `b c`, D: `e`: builders write values as they are, with their blanks."""
    matches = list(_ASSIGNMENT.finditer(text))
    ends = [match.start() - 1 for match in matches[1:]] + [len(text)] * bool(matches)
    return {match[1]: text[match.end() : end] for match, end in zip(matches, ends, strict=True)}


def _quoted_assignments(text: str, env: Mapping[str, str]) -> dict[str, str]:
    """`A="b c" D=$E` as a Dockerfile means it; nothing when it is not of that kind."""
    try:
        words = shlex.split(text)
    except ValueError:
        return {}
    pairs = [word.partition("=") for word in words]
    if not all(separator for _, separator, _ in pairs):
        return {}
    return {name: _expand(value, env) for name, _, value in pairs}


def _expand(value: str, env: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda match: env.get(match[1] or match[2], ""), value)


def argument_readings(text: str) -> list[tuple[str, ...]]:
    """What `CMD text` or `ENTRYPOINT text` may mean: a list as JSON or as Go prints it, or a line for the shell."""
    if not text:
        return [()]
    if text.startswith("[") and text.endswith("]"):
        try:
            words = json.loads(text)
            if isinstance(words, list) and all(isinstance(word, str) for word in words):
                return [tuple(words)]
        except ValueError:
            pass
        if not _QUOTED.sub("", text[1:-1]).strip(" ,"):
            try:
                return [tuple(str(ast.literal_eval(word.replace("\n", "\\n"))) for word in _QUOTED.findall(text))]
            except (ValueError, SyntaxError):
                pass
    return [(*SHELL, text)]


def _workdir_readings(text: str, before: str) -> list[str]:
    absolute = posixpath.normpath(posixpath.join(before, text.strip("\"'")))
    return list(dict.fromkeys((absolute, text)))


# ---- putting together ----


class _Split:
    """What the groups say while instructions are applied, and of each setting who said it last and what that may mean."""

    def __init__(self, final: GroupConfig, groups: int) -> None:
        self._wanted: dict[Setting, Value] = {("env", name): value for name, value in _variables(final.env).items()}
        for field in FIELDS:
            if value := getattr(final, field):
                self._wanted[field, ""] = value
        self._groups: list[dict[Setting, Value]] = [{} for _ in range(groups)]
        self._last: dict[Setting, tuple[int, Sequence[Value]]] = {}

    def apply(self, group: int, instruction: Instruction) -> None:
        """One instruction, in the order of the history."""
        field, text = instruction.name.lower(), instruction.text
        if field == "env":
            before = {name: str(self._said(("env", name))[-1]) for kind, name in self._last if kind == "env"}
            for name, values in env_readings(text, before).items():
                self._set(group, ("env", name), values)
        elif field == "workdir":
            said = self._said(("workdir", ""))
            self._set(group, ("workdir", ""), _workdir_readings(text, str(said[-1]) if said else "/"))
        else:
            self._set(group, (field, ""), [text] if field == "user" else argument_readings(text))

    def _set(self, group: int, setting: Setting, readings: Sequence[Value]) -> None:
        self._groups[group][setting] = readings[0]
        self._last.pop(setting, None)  # to the end: the order says which came last
        self._last[setting] = (group, readings)

    def _said(self, setting: Setting) -> list[Value]:
        return [group[setting] for group in self._groups if setting in group]

    def settle(self) -> list[str]:
        """Makes what the groups say together the image's; returns what the history does not explain."""
        self._reset_cmd()
        unexplained = [
            name or field for field, name in dict.fromkeys([*self._last, *self._wanted]) if not self._agree((field, name))
        ]
        if not unexplained:
            return []
        return [f"not explained by the image's history, so said by the top group or left out: {', '.join(unexplained)}"]

    def _reset_cmd(self) -> None:
        """An ENTRYPOINT takes back the CMD of the image that it builds on."""
        order = [field for field, _ in self._last if field in ("entrypoint", "cmd")]
        if ("cmd", "") not in self._wanted and order == ["cmd", "entrypoint"]:
            group, _readings = self._last["entrypoint", ""]
            self._groups[group]["cmd", ""] = ()

    def _agree(self, setting: Setting) -> bool:
        """Makes one setting the image's; whether the history had explained it."""
        wanted = self._wanted.get(setting)
        if wanted is not None:
            group, readings = self._last.get(setting, (0, ()))
            explained = wanted in readings
            self._groups[group if explained else -1][setting] = wanted
            return explained
        said = self._said(setting)
        if setting[0] in ("entrypoint", "cmd"):
            if not said or not said[-1]:
                return True
            self._groups[-1][setting] = ()
            return False
        for group_says in self._groups:  # an upper group cannot take these back
            group_says.pop(setting, None)
        return not any(said)

    def configs(self) -> tuple[GroupConfig, ...]:
        """Base first."""
        return tuple(map(_config, self._groups))


def _config(says: Mapping[Setting, Value]) -> GroupConfig:
    env = {name: str(value) for (field, name), value in says.items() if field == "env"}
    fields: dict[str, Any] = {field: value for (field, _), value in says.items() if field != "env"}
    return GroupConfig(env=_joined(env), **fields)


def _variables(env: Sequence[str]) -> dict[str, str]:
    return {name: value for name, _, value in (item.partition("=") for item in env)}


def _joined(env: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(f"{name}={value}" for name, value in env.items())

"""`weenv image split`: which layers go where, which configuration goes with them, and every place that an image can be
in.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from merge_corners import converted, directory, file, whiteout
from oci_image import INDEX, ImageLayout, ImageSpec, digest
from registry_fixture import PASSWORD, USER, Proxy, RegistryServer, auth_file, run_proxy, run_registry
from strategies import make_content, write_pax
from weefs_harness import open_layers
from weenv_cli import AUTHENTICATION, CAPACITY, ERROR, INTEGRITY, NOT_FOUND, OK, USAGE, Weenv

from envlet.plans import Plan
from envlet.ports import ResolvedGroup
from layerformat import Layer
from registry import Group, GroupConfig, load_credentials, parse_reference, pull_blob, resolve_group
from registry.attribution import HistoryEntry, attribute, merge_configs
from registry.images import docker_hub
from registry.splitting import GroupSpec, SplitError, parse_spec, split_layers

TARS = [
    write_pax([directory(b"etc"), file(b"etc/os", b"base" * 2000), file(b"gone")]),
    write_pax([file(b"etc/conf", b"conf"), whiteout(b"gone")]),
    write_pax([directory(b"src"), file(b"src/main.py", b"print()\n" * 500)]),
    write_pax([file(b"opt/harness", b"harness" * 3000)]),
]
HISTORY = [
    {"created_by": "/bin/sh -c #(nop) ADD file:0 in / ", "created": "2024-01-01T00:00:00Z"},
    {"created_by": "RUN /bin/sh -c conf # buildkit", "created": "2024-01-01T00:00:00Z"},
    {"created_by": 'CMD ["bash"]', "created": "2024-01-01T00:00:00Z", "empty_layer": True},
    {"created_by": "ENV LANG=C.UTF-8 NOTE=two words", "created": "2024-02-01T00:00:00Z", "empty_layer": True},
    {"created_by": "WORKDIR /src", "created": "2024-02-01T00:00:00Z"},
    {"created_by": "COPY harness /opt # buildkit", "created": "2024-02-02T00:00:00Z"},
    {"created_by": 'ENTRYPOINT ["/opt/harness" "-x"]', "created": "2024-02-02T00:00:00Z", "empty_layer": True},
]
CONFIG = {
    "Env": ["LANG=C.UTF-8", "NOTE=two words"],
    "WorkingDir": "/src",
    "Entrypoint": ["/opt/harness", "-x"],
}
IMAGE = ImageSpec(TARS, kinds=["+gzip", "+zstd", "", "+gzip"], config=CONFIG, history=HISTORY)
GROUPS = ["--group", "base=0-1", "--group", "task=2", "--group", "harness=3-"]
NAMES = ["base", "task", "harness"]


@pytest.fixture
def layout(tmp_path: Path) -> ImageLayout:
    """One image, `image:v1`."""
    layout = ImageLayout(tmp_path / "image")
    layout.tag("v1", layout.add_image(IMAGE))
    return layout


def files_of(group: Group, scratch: Path) -> list[dict[bytes, bytes]]:
    """The regular files of each layer of a group, pulled."""
    found = []
    for number, layer in enumerate(group.layers):
        path = scratch / f"{group.digest[7:19]}-{number}"
        pull_blob(group.source, layer.digest, layer.size_bytes, path)
        with Layer.open(path) as opened:
            assert opened.verify(layer.digest) == []
            found.append(read_files(opened))
    return found


def read_files(layer: Layer) -> dict[bytes, bytes]:
    return {
        path: b"".join(layer.read_file(number))
        for path, number in layer.walk()
        if number is not None and layer.inode(number).is_regular
    }


EXPECTED_FILES = [read_files(layer) for layer in open_layers([converted(tar) for tar in TARS])]


def check_groups(references: Sequence[str], scratch: Path) -> None:
    """That three references are the groups of IMAGE, whole."""
    groups = [resolve_group(reference) for reference in references]
    assert [group.role for group in groups] == NAMES
    found = [files for group in groups for files in files_of(group, scratch)]
    assert found == EXPECTED_FILES
    assert [one.origin.diff_id for group in groups for one in group.conversions] == [digest(tar) for tar in TARS]
    assert [group.config for group in groups] == [
        GroupConfig(cmd=("bash",)),
        GroupConfig(env=("LANG=C.UTF-8", "NOTE=two words"), workdir="/src"),
        GroupConfig(entrypoint=("/opt/harness", "-x"), cmd=()),
    ]


# ---- which layers ----


@st.composite
def splits(draw: st.DrawFn) -> tuple[list[str], list[range]]:
    """A good split as it may be written, and what it means."""
    count = draw(st.integers(1, 12))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, count - 1)), max_size=4))) if count > 1 else []
    edges = [0, *cuts, count]
    ranges = [range(first, last) for first, last in itertools.pairwise(edges)]
    texts = []
    for number, layers in enumerate(ranges):
        ways = [",".join(map(str, layers)), f"{layers[0]}-{layers[-1]}", f"{layers[0]},{layers[0] + 1}-{layers[-1]}"]
        if len(layers) == 1:
            ways = [str(layers[0]), f"{layers[0]}-{layers[0]}"]
        if layers.stop == count:
            ways.append(f"{layers[0]}-")
        if len(ranges) == 1:
            ways.append("all")
        texts.append(f"g{number}={draw(st.sampled_from(ways))}")
    return texts, ranges


@given(splits())
def test_a_split_means_what_it_says(split: tuple[list[str], list[range]]) -> None:
    texts, ranges = split
    assert split_layers([parse_spec(text) for text in texts], ranges[-1].stop) == ranges


@given(
    st.integers(1, 6),
    st.lists(st.lists(st.tuples(st.integers(0, 6), st.none() | st.integers(0, 6)), min_size=1, max_size=3), min_size=1, max_size=3),
)  # fmt: skip
def test_a_split_is_refused_unless_it_holds_every_layer_once_in_order(
    count: int, parts: list[list[tuple[int, int | None]]]
) -> None:
    specs = [
        GroupSpec(f"g{number}", tuple((a, b if b is None else max(a, b)) for a, b in group))
        for number, group in enumerate(parts)
    ]
    held = [
        [layer for first, last in spec.parts for layer in range(first, (max(count, first + 1) if last is None else last + 1))]
        for spec in specs
    ]
    flat = [layer for layers in held for layer in layers]
    if flat == list(range(count)):
        assert [list(layers) for layers in split_layers(specs, count)] == held
        return
    with pytest.raises(SplitError) as refused:
        split_layers(specs, count)
    if set(flat) <= set(range(count)) and len(flat) == len(set(flat)) and (missing := set(range(count)) - set(flat)):
        assert f"layers in no group: {', '.join(map(str, sorted(missing)))};" in str(refused.value)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (["base=0-1", "task=3"], "layers in no group: 2; expected each of the image's 4 (0-3) in one"),
        (["base=0-2", "task=2-"], "layer 2 is in task and in base"),
        (["base=0,0,1", "task=2-"], "layer 0 is in base twice"),
        (["task=2-3", "base=0-1"], "task: expected neighbouring layers in their order, groups from the base up, here 0-1"),
        (["base=0,2", "task=1,3"], "base: expected neighbouring layers in their order"),
        (["base=0-4"], "base: the image has 4 layers (0-3); received layer 4"),
        (["base=0-1", "base=2-"], "expected one --group for each name, received more for base"),
        (["base=1-0"], "expected the lower number first, received '1-0'"),
        (["base=x"], "expected layers as 0-3, 4,5, 6- or all, received 'x'"),
        (["Base=all"], "expected NAME=LAYERS"),
    ],
)
def test_a_wrong_split_is_refused_by_its_layer(weenv: Weenv, layout: ImageLayout, groups: list[str], message: str) -> None:
    options = [word for group in groups for word in ("--group", group)]
    ran = weenv("image", "split", f"oci:{layout.directory}", *options, "--to", f"oci:{layout.directory.parent}/out")
    assert (ran.status, ran.out) == (USAGE, "")
    assert message in ran.err
    assert not (layout.directory.parent / "out").exists()


# ---- which configuration ----


@attrs.frozen
class Case:
    """Entries of a history: (created_by, is it empty?, when); three layers; the image's configuration; the groups'
    configurations; what the message must name."""

    name: str
    history: list[tuple[str, bool] | tuple[str, bool, str]]
    final: GroupConfig
    groups: tuple[GroupConfig, GroupConfig, GroupConfig]
    told: str = ""


LAYER = ("RUN /bin/sh -c x # buildkit", False)
DAY = "2024-05-"
NOP = "/bin/sh -c #(nop) "
CASES = [
    Case(
        "classic builder, two blanks",
        [LAYER, (f"{NOP} ENV A=one two B=3", True), LAYER, (f"{NOP}WORKDIR /w", True), (f"{NOP} USER app", True), LAYER],
        GroupConfig(env=("A=one two", "B=3"), workdir="/w", user="app"),
        (GroupConfig(), GroupConfig(env=("A=one two", "B=3")), GroupConfig(workdir="/w", user="app")),
    ),
    Case(
        "buildah as the Dockerfile has it: quotes and variables",
        [LAYER, (f"{NOP}ENV PATH=/bin", True), LAYER, (f'{NOP}ENV PATH="/opt:$PATH" B="x y"', True), LAYER],
        GroupConfig(env=("PATH=/opt:/bin", "B=x y")),
        (GroupConfig(), GroupConfig(env=("PATH=/bin",)), GroupConfig(env=("PATH=/opt:/bin", "B=x y"))),
    ),
    Case(
        "the old form of ENV",
        [LAYER, LAYER, ("ENV NAME some value", True), LAYER],
        GroupConfig(env=("NAME=some value",)),
        (GroupConfig(), GroupConfig(), GroupConfig(env=("NAME=some value",))),
    ),
    Case(
        "a CMD ends an image, with what stands before it",
        [LAYER, ("ENV A=1", True), ('CMD ["bash"]', True), ("ENV B=2", True), LAYER, LAYER],
        GroupConfig(env=("A=1", "B=2"), cmd=("bash",)),
        (GroupConfig(env=("A=1",), cmd=("bash",)), GroupConfig(env=("B=2",)), GroupConfig()),
    ),
    Case(
        "the nearer time",
        [
            ("RUN a", False, f"{DAY}01T10:00:00Z"), ("ENV A=1", True, f"{DAY}01T10:00:00Z"),
            ("USER u", True, f"{DAY}01T10:05:00.123456789Z"),
            ("ENV B=2", True, f"{DAY}09T10:00:00+02:00"), ("RUN b", False, f"{DAY}09T09:00:00Z"),
            ("ENV C=3", True, f"{DAY}09T09:00:00Z"), ("RUN c", False, f"{DAY}09T09:00:00Z"),
        ],
        GroupConfig(env=("A=1", "B=2", "C=3"), user="u"),
        (GroupConfig(env=("A=1",), user="u"), GroupConfig(env=("B=2",)), GroupConfig(env=("C=3",))),
    ),
    Case(
        "times that are none",
        [("RUN a", False, "yesterday"), ("ENV A=1", True, "2024-01-01T00:00:00"), ("RUN b", False, "0001-01-01T00:00:00Z"), LAYER],
        GroupConfig(env=("A=1",)),
        (GroupConfig(), GroupConfig(env=("A=1",)), GroupConfig()),
    ),
    Case(
        "an entrypoint takes the command of below back",
        [LAYER, ('CMD ["bash"]', True), LAYER, LAYER, ('ENTRYPOINT ["/run" "a b"]', True)],
        GroupConfig(entrypoint=("/run", "a b")),
        (GroupConfig(cmd=("bash",)), GroupConfig(), GroupConfig(entrypoint=("/run", "a b"), cmd=())),
    ),
    Case(
        "the shell form",
        [LAYER, LAYER, LAYER, ("CMD exec run", True)],
        GroupConfig(cmd=("/bin/sh", "-c", "exec run")),
        (GroupConfig(), GroupConfig(), GroupConfig(cmd=("/bin/sh", "-c", "exec run"))),
    ),
    Case(
        "a relative working directory, one that made a layer, one with commas",
        [LAYER, ("WORKDIR /a", False), ("WORKDIR b", True), ('CMD ["a","b"]', True), LAYER],
        GroupConfig(workdir="/a/b", cmd=("a", "b")),
        (GroupConfig(), GroupConfig(workdir="/a/b", cmd=("a", "b")), GroupConfig()),
    ),
    Case(
        "what was changed without a word",
        [LAYER, ("ENV A=1", True), LAYER, LAYER],
        GroupConfig(env=("A=2", "Z=9"), user="u"),
        (GroupConfig(), GroupConfig(env=("A=1",)), GroupConfig(env=("A=2", "Z=9"), user="u")),
        "A, Z, user",
    ),
    Case(
        "what was taken back without a word cannot be by an upper group",
        [LAYER, ("ENV A=1 B=2", True), ("USER app", True), LAYER, ('CMD ["x"]', True), LAYER],
        GroupConfig(env=("B=2",)),
        (GroupConfig(), GroupConfig(env=("B=2",), cmd=("x",)), GroupConfig(cmd=())),
        "A, user, cmd",
    ),
    Case(
        "no history",
        [],
        GroupConfig(env=("A=1",), cmd=("c",)),
        (GroupConfig(), GroupConfig(), GroupConfig(env=("A=1",), cmd=("c",))),
        "A, cmd",
    ),
    Case(
        "a history of another image",
        [LAYER, ("ENV A=1", True)],
        GroupConfig(env=("A=1",)),
        (GroupConfig(), GroupConfig(), GroupConfig(env=("A=1",))),
        "speaks of 1 layers and the image has 3",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_configuration_goes_where_the_history_says(case: Case) -> None:
    history = [HistoryEntry(entry[0], entry[2] if len(entry) == 3 else None, entry[1]) for entry in case.history]
    result = attribute(case.final, history, [range(1), range(1, 2), range(2, 3)])
    assert result.configs == case.groups
    assert bool(result.messages) == bool(case.told)
    assert case.told in "; ".join(result.messages)
    assert merge_configs(result.configs) == case.final


INSTRUCTIONS = st.one_of(
    st.sampled_from(["RUN x", "", "ENV", "USER", "WORKDIR", "CMD", "ENV A", "CMD [", 'CMD ["a" b]']),
    st.sampled_from([ "ENV A=' B=1", "CMD []", "ENTRYPOINT []"]),
    st.builds("ENV {}={} {}={}".format, *[st.sampled_from(["A", "B", "PATH"]), st.sampled_from(["1", "x y", '"q r"', "$A:z", ""])] * 2),
    st.builds("{} {}".format, st.sampled_from(["USER", "WORKDIR"]), st.sampled_from(["a", "/b", "c/d", "/"])),
    st.builds("{} {}".format, st.sampled_from(["CMD", "ENTRYPOINT"]), st.sampled_from(['["a"]', '["b" "c"]', "d e"])),
)  # fmt: skip
WORDS = st.none() | st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=2).map(tuple)
FINALS = st.builds(
    GroupConfig,
    env=st.dictionaries(st.sampled_from(["A", "B", "PATH"]), st.sampled_from(["1", "x y", "q r", ""])).map(
        lambda env: tuple(f"{name}={value}" for name, value in env.items())
    ),
    workdir=st.none() | st.sampled_from(["/b", "/", "a"]),
    user=st.none() | st.sampled_from(["a", "/b"]),
    entrypoint=WORDS,
    cmd=WORDS,
)


TIMES = st.sampled_from([None, "t", f"{DAY}01T00:00:00Z", f"{DAY}02T00:00:00Z"])


@given(FINALS, st.lists(st.tuples(INSTRUCTIONS, st.booleans(), TIMES), max_size=8))
def test_the_groups_together_say_what_the_image_says(
    final: GroupConfig, entries: list[tuple[str, bool, str | None]]
) -> None:
    history = [HistoryEntry(text, created, empty) for text, empty, created in entries]
    count = max(1, sum(not entry.is_empty for entry in history))
    cut = (count + 1) // 2
    ranges = [range(cut), range(cut, count)] if cut < count else [range(count)]
    configs = attribute(final, history, ranges).configs
    merged = merge_configs(configs)
    assert sorted(merged.env) == sorted(final.env)
    assert attrs.evolve(merged, env=()) == attrs.evolve(final, env=())
    plan = Plan(tuple(ResolvedGroup("r", "d", None, (), one.env, one.workdir, one.user) for one in configs))
    assert plan.workdir == (final.workdir or "/")
    assert plan.user == final.user
    path = {item for item in plan.env if item.startswith("PATH=")} if not any("PATH=" in item for item in final.env) else set()
    assert set(plan.env) - path == set(final.env)


# ---- every place that an image can be in ----


def test_a_layout_becomes_three_groups(weenv: Weenv, layout: ImageLayout, tmp_path: Path) -> None:
    ran = weenv("image", "split", f"oci:{layout.directory}:v1", *GROUPS, "--to", f"oci:{tmp_path}/out", "-j", 1)
    assert ran.status == OK, ran.err
    references = ran.out.split()
    assert [reference.partition("@")[0] for reference in references] == [f"oci:{tmp_path}/out:{name}" for name in NAMES]
    check_groups(references, tmp_path)
    lines = ran.err.splitlines()
    assert len(lines) == len(TARS)
    assert all(f"layer {number} of oci:{layout.directory}:v1: " in line for number, line in enumerate(lines))


def test_json_says_what_was_done(weenv: Weenv, layout: ImageLayout, tmp_path: Path) -> None:
    split = ["image", "split", f"oci:{layout.directory}", *GROUPS, "--to", f"oci:{tmp_path}/out", "--tag", "t", "--format", "json"]
    told = json.loads(weenv(*split).out)
    assert told["image"]["platform"] == "linux/amd64"
    assert [group["reference"].partition("@")[0] for group in told["groups"]] == [f"oci:{tmp_path}/out:{name}-t" for name in NAMES]
    assert [layer["done"] for group in told["groups"] for layer in group["layers"]] == ["converted"] * 4
    again = json.loads(weenv(*split).out)
    assert [layer["done"] for group in again["groups"] for layer in group["layers"]] == ["already there"] * 4
    assert [group["reference"] for group in again["groups"]] == [group["reference"] for group in told["groups"]]


def test_what_is_not_kept_of_a_configuration_is_said(weenv: Weenv, tmp_path: Path) -> None:
    layout = ImageLayout(tmp_path / "image")
    config = CONFIG | {"Labels": {"a": "b"}, "ExposedPorts": {"80/tcp": {}}, "Volumes": None, "User": ""}
    layout.tag("x", layout.add_image(attrs.evolve(IMAGE, config=config)))
    ran = weenv("image", "split", f"oci:{layout.directory}", *GROUPS, "--to", f"oci:{tmp_path}/out")
    assert ran.status == OK
    assert "do not keep this of its configuration: ExposedPorts, Labels\n" in ran.err


def test_what_environments_cannot_be_started_with_is_said(weenv: Weenv, tmp_path: Path) -> None:
    layout = ImageLayout(tmp_path / "image")
    layout.tag("v1", layout.add_image(attrs.evolve(IMAGE, config={"WorkingDir": "src", "User": "a:b:c"})))
    ran = weenv("image", "split", f"oci:{layout.directory}", *GROUPS, "--to", f"oci:{tmp_path}/out")
    assert ran.status == OK
    assert "the working directory 'src', which is no absolute path" in ran.err
    assert "the user: expected USER[:GROUP], received 'a:b:c'" in ran.err


def test_one_name_for_all(weenv: Weenv, layout: ImageLayout, tmp_path: Path) -> None:
    ran = weenv("image", "split", f"oci:{layout.directory}", "--group", "whole=all", "--to", f"oci:{tmp_path}/out")
    group = resolve_group(ran.out.strip())
    assert (group.role, len(group.layers)) == (None, 4)
    assert group.config == GroupConfig(env=tuple(CONFIG["Env"]), workdir="/src", entrypoint=("/opt/harness", "-x"), cmd=())


def gzipped_image(directory: Path) -> ImageLayout:
    """IMAGE as docker can have it: it knows no zstd."""
    layout = ImageLayout(directory)
    layout.tag("v1", layout.add_image(attrs.evolve(IMAGE, kinds=["+gzip", "+gzip", "", "+gzip"])))
    return layout


def skopeo(*words: object) -> None:
    subprocess.run(["skopeo", "--insecure-policy", "copy", "--quiet", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("kind", ["docker-archive", "oci-archive"])
@pytest.mark.parametrize("zipped", [False, True])
def test_archives_of_skopeo(weenv: Weenv, tmp_path: Path, kind: str, zipped: bool) -> None:
    layout = gzipped_image(tmp_path / "image")
    archive = tmp_path / "image.tar"
    skopeo(f"oci:{layout.directory}:v1", f"{kind}:{archive}:example.org/image:v1")
    if zipped:
        archive = tmp_path / "image.tar.gz"
        archive.write_bytes(gzip.compress((tmp_path / "image.tar").read_bytes(), 1))
    ran = weenv("image", "split", archive, *GROUPS, "--to", f"oci:{tmp_path}/out")
    assert ran.status == OK, ran.err
    check_groups(ran.out.split(), tmp_path)


def saved(path: Path, members: Sequence[tuple[str, bytes | str]], layers: Sequence[str], config: dict[str, object]) -> Path:
    """What old versions of `docker save` write: a member is bytes, or the target of a symlink, or with = of a hard link."""
    named = [*members, ("config.json", json.dumps(config).encode()),
             ("manifest.json", json.dumps([{"Config": "config.json", "RepoTags": ["a:b"], "Layers": list(layers)}]).encode())]  # fmt: skip
    with tarfile.open(path, "w") as tar:
        for name, content in named:
            member = tarfile.TarInfo(name)
            if isinstance(content, str):
                member.type = tarfile.LNKTYPE if content.startswith("=") else tarfile.SYMTYPE
                member.linkname = content.lstrip("=")
                tar.addfile(member)
            else:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


def test_an_archive_whose_layers_are_links(weenv: Weenv, tmp_path: Path) -> None:
    config = {"rootfs": {"type": "layers", "diff_ids": [digest(TARS[number]) for number in (0, 2, 2, 2)]}, "os": "linux"}
    layers = ["a/layer.tar", "b/layer.tar", "c/layer.tar", "d/layer.tar"]
    members: list[tuple[str, bytes | str]] = [
        (layers[0], TARS[0]), (layers[1], TARS[2]), (layers[2], "../b/layer.tar"), (layers[3], "=b/layer.tar"),
    ]  # fmt: skip
    archive = saved(tmp_path / "saved.tar", members, layers, config)
    ran = weenv("image", "split", archive, "--group", "base=0", "--group", "task=1-", "--to", f"oci:{tmp_path}/out")
    assert ran.status == OK, ran.err
    base, task = (resolve_group(reference) for reference in ran.out.split())
    assert files_of(base, tmp_path) == [EXPECTED_FILES[0]]
    assert files_of(task, tmp_path) == [EXPECTED_FILES[2]] * 3
    assert len({layer.digest for layer in task.layers}) == 1

    loop = saved(tmp_path / "loop.tar", [("a/layer.tar", "../a/layer.tar")], ["a/layer.tar"], config)
    ran = weenv("image", "split", loop, "--group", "base=all", "--to", f"oci:{tmp_path}/none")
    assert (ran.status, "expected the file a/layer.tar in the archive" in ran.err) == (INTEGRITY, True)


@pytest.mark.parametrize("form", ["oci", "v2s2"])
def test_a_registry_is_asked_for_layers_once(
    weenv: Weenv, server: RegistryServer, tmp_path: Path, form: str
) -> None:
    source = gzipped_image(tmp_path / "image")
    destination = f"docker://{server.host}/images/{form}:v1"
    skopeo("--dest-tls-verify=false", "--format", form, f"oci:{source.directory}:v1", destination)
    with run_proxy(server.host) as proxy:
        split = ["image", "split", f"{proxy.host}/images/{form}:v1", *GROUPS, "--to", f"{server.host}/split/{form}", "--tag", "x"]
        ran = weenv(*split)
        assert ran.status == OK, ran.err
        references = ran.out.split()
        assert [one.partition("@")[0] for one in references] == [f"{server.host}/split/{form}/{name}:x" for name in NAMES]
        check_groups(references, tmp_path)
        assert len(proxy.blob_reads()) == 1 + len(TARS)  # configuration and layers

        proxy.seen.clear()
        again = weenv(*split)
        assert again.out == ran.out
        assert again.err.count("already there") == len(TARS)
        assert len(proxy.blob_reads()) == 1  # the configuration


def test_a_registry_with_a_password(weenv: Weenv, layout: ImageLayout, tmp_path: Path) -> None:
    with run_registry(tmp_path / "locked", password_file=True) as locked:
        auth = auth_file(tmp_path / "auth.json", locked.host)
        skopeo("--dest-tls-verify=false", "--dest-authfile", auth, f"oci:{layout.directory}:v1", f"docker://{locked.host}/image:v1")
        split = ["image", "split", f"{locked.host}/image:v1", *GROUPS, "--to", f"oci:{tmp_path}/out"]
        assert weenv(*split).status == AUTHENTICATION
        auth_file(tmp_path / "home/.docker/config.json", locked.host)
        assert weenv(*split).status == OK


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("docker.io/python:3.11", "registry-1.docker.io/library/python:3.11"),
        ("index.docker.io/user/image", "registry-1.docker.io/user/image:latest"),
        ("ghcr.io/user/image:x", "ghcr.io/user/image:x"),
    ],
)
def test_docker_hub_has_another_address_than_name(name: str, served: str) -> None:
    assert str(docker_hub(parse_reference(name))) == served


@pytest.mark.parametrize("key", ["https://index.docker.io/v1/", "docker.io"])
def test_docker_hub_is_logged_in_to_by_its_name(tmp_path: Path, key: str) -> None:
    credentials = load_credentials([auth_file(tmp_path / "auth.json", key)])
    assert credentials.find("registry-1.docker.io", "library/python") == (USER, PASSWORD)
    assert credentials.find("docker.example.org") is None


# ---- platforms ----


def test_an_index_is_asked_for_a_platform(weenv: Weenv, tmp_path: Path) -> None:
    layout = ImageLayout(tmp_path / "image")
    arms = [
        layout.add_image(ImageSpec([write_pax([file(b"arch", variant.encode())])], architecture="arm", variant=variant))
        for variant in ("v6", "v7")
    ]
    nested = layout.add_index(arms)
    attestation = layout.add_image(ImageSpec([write_pax([file(b"proof")])])) | {
        "platform": {"os": "unknown", "architecture": "unknown"}
    }
    others = [
        layout.add_image(ImageSpec([write_pax([file(b"arch", name.encode())])], architecture=name)) for name in ("s390x", "arm64")
    ]
    layout.tag("multi", layout.add_index([nested, attestation, *others]))
    out = f"oci:{tmp_path}/out"

    def split(*options: str) -> tuple[int, str, str]:
        ran = weenv("image", "split", f"oci:{layout.directory}:multi", "--group", "base=all", "--to", out, *options)
        return ran.status, ran.out, ran.err

    for platform, expected in (("linux/arm/v7", b"v7"), ("linux/s390x", b"s390x"), ("linux/arm64/v8", b"arm64")):
        status, pinned, said = split("--platform", platform)
        assert status == OK, said
        (tmp_path / expected.decode()).mkdir()
        assert files_of(resolve_group(pinned.strip()), tmp_path / expected.decode()) == [{b"arch": expected}]
    status, _, said = split("--platform", "linux/riscv64")
    assert status == NOT_FOUND
    assert "no image for linux/riscv64; there are: linux/arm/v6, linux/arm/v7, linux/arm64, linux/s390x; say which" in said
    assert split("--platform", "linux")[0] == USAGE


def test_a_single_image_is_taken_for_what_it_is_unless_another_is_asked_for(weenv: Weenv, tmp_path: Path) -> None:
    layout = ImageLayout(tmp_path / "image")
    layout.tag("one", layout.add_image(attrs.evolve(IMAGE, architecture="s390x")))
    split = ["image", "split", f"oci:{layout.directory}", *GROUPS, "--to", f"oci:{tmp_path}/out"]
    assert weenv(*split).status == OK
    config = json.loads((tmp_path / "out" / "blobs").joinpath("sha256", config_digest(tmp_path / "out", "task")).read_bytes())
    assert config["architecture"] == "s390x"
    ran = weenv(*split, "--platform", "linux/amd64")
    assert (ran.status, "linux/s390x" in ran.err) == (NOT_FOUND, True)


def config_digest(directory: Path, tag: str) -> str:
    """The hex digest of a published group's configuration."""
    manifest = resolve_group(f"oci:{directory}:{tag}").digest.removeprefix("sha256:")
    told = json.loads((directory / "blobs/sha256" / manifest).read_bytes())
    return str(told["config"]["digest"]).removeprefix("sha256:")


def test_an_index_that_names_itself_ends(weenv: Weenv, tmp_path: Path) -> None:
    layout = ImageLayout(tmp_path / "image")
    entry = layout.add_index([])
    for _ in range(10):
        entry = layout.add_index([entry])
    layout.tag("deep", entry)
    ran = weenv("image", "split", f"oci:{layout.directory}", "--group", "a=all", "--to", f"oci:{tmp_path}/out")
    assert (ran.status, "4 deep" in ran.err) == (INTEGRITY, True)
    assert entry["mediaType"] == INDEX


# ---- damage, and what cannot be converted ----


def test_a_broken_diff_id_publishes_nothing(weenv: Weenv, tmp_path: Path) -> None:
    layout = ImageLayout(tmp_path / "image")
    broken = [*(digest(tar) for tar in TARS[:-1]), digest(b"another tar")]
    layout.tag("bad", layout.add_image(attrs.evolve(IMAGE, diff_ids=broken)))
    out = f"oci:{tmp_path}/out"
    for _ in range(2):  # also when the conversions are known
        ran = weenv("image", "split", f"oci:{layout.directory}", *GROUPS, "--to", out)
        assert (ran.status, ran.out) == (INTEGRITY, "")
        assert f"layer 3 of oci:{layout.directory}: expected a tar with the diff id {broken[3]}, received {digest(TARS[3])}" in ran.err
        for name in NAMES:
            assert weenv("group", "resolve", f"{out}:{name}").status == NOT_FOUND
    layout.tag("good", layout.add_image(IMAGE))
    assert weenv("image", "split", f"oci:{layout.directory}:good", *GROUPS, "--to", out).status == OK
    ran = weenv("image", "split", f"oci:{layout.directory}:bad", *GROUPS, "--to", out)
    assert (ran.status, "layer 3" in ran.err) == (INTEGRITY, True)


def test_a_size_that_a_layer_does_not_have_is_found_though_it_is_not_read(weenv: Weenv, proxy: Proxy, tmp_path: Path) -> None:
    """In a layout, in an archive of one, and in a registry."""
    good, bad = gzipped_image(tmp_path / "good"), ImageLayout(tmp_path / "bad")
    out = f"oci:{tmp_path}/out"
    assert weenv("image", "split", f"oci:{good.directory}", *GROUPS, "--to", out).status == OK
    manifest = json.loads(good.blob_file(json.loads((good.directory / "index.json").read_bytes())["manifests"][0]["digest"]).read_bytes())
    layer = manifest["layers"][1]  # which skopeo does not compress
    size = layer["size"]
    layer["size"] += 1
    shutil.copytree(good.blobs, bad.blobs, dirs_exist_ok=True)
    bad.tag("v1", bad.put(manifest["mediaType"], json.dumps(manifest).encode()))
    with tarfile.open(tmp_path / "bad.tar", "w") as tar:
        tar.add(bad.directory, ".")
    data = json.dumps(manifest).encode()
    skopeo("--dest-tls-verify=false", f"oci:{good.directory}:v1", f"docker://{proxy.host}/sizes/image:v1")

    async def answer(request: web.Request) -> web.Response | None:
        is_manifest = request.path.endswith(f"/sizes/image/manifests/{digest(data)}")
        return web.Response(body=data, content_type=manifest["mediaType"]) if is_manifest else None

    proxy.fault = answer
    for source in (f"oci:{bad.directory}", tmp_path / "bad.tar", f"{proxy.host}/sizes/image@{digest(data)}"):
        ran = weenv("image", "split", source, *GROUPS, "--to", out)
        assert (ran.status, ran.out) == (INTEGRITY, ""), (source, ran)
        assert f"expected {size + 1} bytes with {layer['digest']}, received {size} bytes" in ran.err
        assert "layer 1 of " in ran.err


def test_contents_that_are_refused_are_named_with_their_layer(weenv: Weenv, tmp_path: Path) -> None:
    layout = ImageLayout(tmp_path / "image")
    tars = [*TARS[:3], write_pax([file(b"a/../../up")])]
    layout.tag("v1", layout.add_image(ImageSpec(tars, kinds=[""] * 4)))
    ran = weenv("image", "split", f"oci:{layout.directory}", *GROUPS, "--to", f"oci:{tmp_path}/out")
    assert (ran.status, ran.out) == (ERROR, "")
    assert f"weenv: layer 3 of oci:{layout.directory}: a/../../up: " in ran.err


@pytest.mark.parametrize(
    ("prefix", "status"),
    [("oci:{}/gm:tag", USAGE), ("oci:{}/gm@sha256:00", USAGE), ("127.0.0.1:1/a/b:tag", USAGE), ("127.0.0.1:1/a:tag", USAGE),
     ("oci:{}/gm:tag/", OK), ("oci:{}/g:m/out", OK)],
)  # fmt: skip
def test_a_prefix_has_no_tag(weenv: Weenv, layout: ImageLayout, tmp_path: Path, prefix: str, status: int) -> None:
    before = sorted(tmp_path.iterdir())
    ran = weenv("image", "split", f"oci:{layout.directory}", *GROUPS, "--to", prefix.format(tmp_path))
    assert ran.status == status, ran.err
    if status == USAGE:
        assert "expected a PREFIX without a tag" in ran.err
        assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("what", ["archive", "download"])
def test_a_full_disk_while_an_image_is_fetched_is_said(
    weenv: Weenv, server: RegistryServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    image = ImageLayout(tmp_path / "image")
    image.tag("v1", image.add_image(ImageSpec([write_pax([file(b"f", make_content(1 << 20, 1, False))])], kinds=["+gzip"])))
    source = f"{server.host}/full/image:v1"
    if what == "archive":
        source = str(tmp_path / "image.tar.gz")
        with tarfile.open(source, "w:gz") as tar:
            tar.add(image.directory, ".")
    else:
        skopeo("--dest-tls-verify=false", f"oci:{image.directory}:v1", f"docker://{source}")
    full = tmp_path / "full"
    full.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", full], check=True)
    try:
        monkeypatch.setenv("XDG_CACHE_HOME", str(full))
        ran = weenv("image", "split", source, "--group", "base=all", "--to", f"oci:{tmp_path}/out")
        assert (ran.status, ran.out) == (CAPACITY, "")
        assert f"weenv: {full}/weenv/convert: No space left on device; make room there, or set $XDG_CACHE_HOME to " in ran.err
    finally:
        subprocess.run(["umount", full], check=True)


@pytest.mark.parametrize("where", [0, -1])
def test_a_damaged_layer_is_found_and_named(weenv: Weenv, layout: ImageLayout, tmp_path: Path, where: int) -> None:
    name = digest(gzip.compress(TARS[3], mtime=0))
    data = bytearray(layout.blob_file(name).read_bytes())
    data[where] ^= 1
    layout.blob_file(name).write_bytes(data)
    ran = weenv("image", "split", f"oci:{layout.directory}", *GROUPS, "--to", f"oci:{tmp_path}/out")
    assert (ran.status, ran.out) == (INTEGRITY, "")
    assert f"layer 3 of oci:{layout.directory}: expected {len(data)} bytes with {name}" in ran.err
    assert not list((tmp_path / "home/.cache/weenv/convert").glob(".work-*"))


@pytest.mark.parametrize(
    ("media_type", "word"),
    [
        ("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", "foreign layer"),
        ("application/vnd.oci.image.layer.nondistributable.v1.tar+gzip", "foreign layer"),
        ("application/vnd.oci.image.layer.v1.tar+gzip+encrypted", "encrypted"),
        ("application/x-erofs", "expected one of application/vnd.oci.image.layer.v1.tar"),
    ],
)
def test_layers_that_are_no_tars_are_refused_by_their_type(weenv: Weenv, tmp_path: Path, media_type: str, word: str) -> None:
    layout = ImageLayout(tmp_path / "image")
    layout.tag("x", layout.add_image(attrs.evolve(IMAGE, media_types={2: media_type})))
    ran = weenv("image", "split", f"oci:{layout.directory}", *GROUPS, "--to", f"oci:{tmp_path}/out")
    assert (ran.status, ran.out) == (ERROR, "")
    assert f"layer 2 of type '{media_type}'" in ran.err
    assert word in ran.err


def test_what_is_no_image_is_said(weenv: Weenv, layout: ImageLayout, tmp_path: Path) -> None:
    def split(source: object, *options: str) -> tuple[int, str]:
        ran = weenv("image", "split", source, "--group", "base=all", "--to", f"oci:{tmp_path}/out", *options)
        return ran.status, ran.err

    assert split(f"oci:{layout.directory}")[0] == OK
    status, said = split(f"oci:{tmp_path}/out:base")
    assert (status, "received a layer group" in said) == (ERROR, True)
    assert split(tmp_path / "absent.tar")[0] == NOT_FOUND
    status, said = split(layout.directory)
    assert (status, f"expected oci:{layout.directory}" in said) == (USAGE, True)
    (tmp_path / "text").write_text("no tar " * 1000)
    assert split(tmp_path / "text")[0] == INTEGRITY
    with tarfile.open(tmp_path / "other.tar", "w") as tar:
        tar.add(tmp_path / "text", "file")
    status, said = split(tmp_path / "other.tar")
    assert (status, "it has neither" in said) == (INTEGRITY, True)
    layout.tag("v2", layout.add_image(attrs.evolve(IMAGE, architecture="arm64")))
    status, said = split(f"oci:{layout.directory}")
    assert (status, "there are v1, v2" in said) == (USAGE, True)
    status, said = split(f"oci:{layout.directory}:v3")
    assert (status, "there are v1, v2" in said) == (NOT_FOUND, True)
    assert split(f"oci:{layout.directory}:v1", "-j", "0")[0] == USAGE
    assert split(f"oci:{layout.directory}:v1", "--to", "host/UPPER")[0] == USAGE

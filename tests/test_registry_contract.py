"""What a local layout and a real registry have in common: one suite for publishing, resolving, pulling and ranges."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import msgspec
import pytest
from registry_fixture import (
    PYTHON,
    RegistryServer,
    auth_file,
    free_port,
    make_layer,
    run_proxy,
    run_registry,
)
from strategies import make_content

from registry import (
    AuthenticationFailed,
    Credentials,
    Group,
    GroupConfig,
    IntegrityError,
    InvalidReference,
    NotFound,
    RegistryError,
    Unreachable,
    describe_layer,
    load_credentials,
    open_ranges,
    parse_reference,
    pull_blob,
    push_group,
    remote,
    resolve_group,
)
from registry.layout import Layout
from registry.manifest import this_platform

UNKNOWN = "sha256:" + "0" * 64


@attrs.frozen
class Place:
    """Where groups can be published: `name` + `:TAG` is a reference, `blob` the file that holds a blob there."""

    name: str
    credentials: Credentials | None
    blob: Callable[[str], Path]

    def push(self, tag: str, layers: list[Path], role: str | None = None, config: GroupConfig | None = None) -> str:
        return push_group(f"{self.name}:{tag}", layers, role=role, config=config, credentials=self.credentials)

    def resolve(self, suffix: str) -> Group:
        return resolve_group(f"{self.name}{suffix}", credentials=self.credentials)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RegistryServer]]:
    directory = tmp_path_factory.mktemp("registries")
    with run_registry(directory / "open") as one, run_registry(directory / "basic", password_file=True) as two:
        yield {"registry": one, "basic": two}


@pytest.fixture(params=["layout", "registry", "basic"])
def place(request: pytest.FixtureRequest, servers: dict[str, RegistryServer], tmp_path: Path) -> Place:
    """A layout, a registry, a registry that wants a password; each with nothing in it."""
    if request.param == "layout":
        return Place(f"oci:{tmp_path / 'layout'}", None, Layout(tmp_path / "layout").blob_path)
    server = servers[request.param]
    wanted = hashlib.sha256(str(tmp_path).encode()).hexdigest()[:16]
    files = [auth_file(tmp_path / "auth.json", server.host)] if request.param == "basic" else []
    return Place(f"{server.host}/test/{wanted}", load_credentials(files), server.blob_file)


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("layers")
    files = {"a": make_content(200_000, 1, False), "b/c": b"small"}
    return [make_layer(directory, "one", files), make_layer(directory, "two", {"x": b"two"})]


# publishing and resolving


def test_what_is_published_is_what_is_resolved(place: Place, layers: list[Path]) -> None:
    config = GroupConfig(env=("PATH=/bin", "A=b=c"), workdir="/work", user="1000:1000")
    pinned = place.push("v1", layers, "task", config)
    digest = pinned.rpartition("@")[2]
    group = place.resolve(":v1")
    assert group == Group(
        reference=f"{place.name}:v1@{digest}",
        digest=digest,
        role="task",
        config=config,
        layers=tuple(describe_layer(layer) for layer in layers),
        source=parse_reference(pinned).source,
        runs_on=this_platform(),
    )
    assert pinned == group.reference
    assert attrs.evolve(place.resolve(f"@{digest}"), reference=pinned) == group
    assert place.resolve(f":v1@{digest}") == group


def test_a_group_without_role_and_configuration_says_neither(place: Place, layers: list[Path]) -> None:
    place.push("bare", layers)
    group = place.resolve(":bare")
    assert (group.role, group.config) == (None, GroupConfig())


def test_the_same_layers_are_the_same_digest_under_every_tag(place: Place, layers: list[Path]) -> None:
    pushed = {place.push(tag, layers).rpartition("@")[2] for tag in ("a", "b", "a")}
    assert len(pushed) == 1
    assert place.push("c", layers[::-1]).rpartition("@")[2] not in pushed


def test_a_tag_moves_and_a_digest_stays(place: Place, layers: list[Path]) -> None:
    old = place.push("moving", layers[:1]).rpartition("@")[2]
    new = place.push("moving", layers).rpartition("@")[2]
    assert place.resolve(":moving").digest == new != old
    assert len(place.resolve(f"@{old}").layers) == 1
    assert place.resolve(f":moving@{old}").digest == old  # the digest decides


def test_what_is_not_there_is_not_found(place: Place, layers: list[Path]) -> None:
    with pytest.raises(NotFound):
        place.resolve(":anything")  # there is no repository yet
    place.push("there", layers)
    with pytest.raises(NotFound, match="elsewhere"):
        place.resolve(":elsewhere")
    with pytest.raises(NotFound, match=UNKNOWN):
        place.resolve(f"@{UNKNOWN}")


def test_a_damaged_manifest_is_refused_and_named(place: Place, layers: list[Path]) -> None:
    digest = place.push("damaged", layers, "base").rpartition("@")[2]
    path = place.blob(digest)
    path.write_bytes(path.read_bytes().replace(b'"base"', b'"task"'))
    for suffix in (f"@{digest}", ":damaged"):
        with pytest.raises(RegistryError) as caught:
            place.resolve(suffix)
        # docker-registry notices by itself, when it is asked by digest, and says no more than 404 or 500
        assert isinstance(caught.value, (IntegrityError, NotFound, Unreachable))
        assert digest in str(caught.value) or "damaged" in str(caught.value)


def test_a_damaged_configuration_is_refused_and_named(place: Place, layers: list[Path]) -> None:
    digest = place.push("config", layers, config=GroupConfig(workdir="/here")).rpartition("@")[2]
    config = msgspec.json.decode(place.blob(digest).read_bytes())["config"]["digest"]
    path = place.blob(config)
    path.write_bytes(path.read_bytes().replace(b"/here", b"/evil"))
    with pytest.raises(IntegrityError, match=f"expected {config}, received"):
        place.resolve(":config")


def test_a_reference_with_a_digest_cannot_be_pushed_to(place: Place, layers: list[Path]) -> None:
    with pytest.raises(InvalidReference, match="expected a tag to push to, received a digest"):
        push_group(f"{place.name}:t@{UNKNOWN}", layers)


def test_what_is_no_layer_is_not_published(place: Place, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no such file"):
        place.push("t", [tmp_path / "missing"])
    (tmp_path / "text").write_bytes(b"not a layer" * 100)
    with pytest.raises(IntegrityError, match="expected a layer as `weenv layer convert` makes it"):
        place.push("t", [tmp_path / "text"])
    with pytest.raises(RegistryError, match="expected at least one layer, received none"):
        place.push("t", [])
    with pytest.raises(RegistryError, match="role: expected one of base, task, harness, evaluator, received 'top'"):
        place.push("t", [tmp_path / "text"], "top")
    with pytest.raises(NotFound):
        place.resolve(":t")


def skopeo_copy(source: str, place: Place, tag: str, tmp_path: Path, *options: str) -> None:
    target = f"{place.name}:{tag}" if place.name.startswith("oci:") else f"docker://{place.name}:{tag}"
    command = ["skopeo", "--insecure-policy", "copy", "--dest-tls-verify=false", *options]
    if place.credentials and place.credentials.files:
        command += ["--dest-authfile", str(place.credentials.files[0])]
    subprocess.run([*command, source, target], check=True, stdout=subprocess.DEVNULL)


def ordinary_image(tmp_path: Path) -> str:
    """An image with one tar layer, made by umoci."""
    layout = tmp_path / "ordinary"
    commands = ["init", "--layout", str(layout)], ["new", "--image", f"{layout}:i"]
    for command in commands:
        subprocess.run(["umoci", *command], check=True, stdout=subprocess.DEVNULL)
    (tmp_path / "payload").write_bytes(b"payload")
    insert = ["insert", "--rootless", "--image", f"{layout}:i", str(tmp_path / "payload"), "/payload"]
    subprocess.run(["umoci", *insert], check=True, stdout=subprocess.DEVNULL)
    return f"oci:{layout}:i"


def test_an_ordinary_image_is_refused_by_name(place: Place, tmp_path: Path) -> None:
    skopeo_copy(ordinary_image(tmp_path), place, "image", tmp_path)
    with pytest.raises(RegistryError, match=r"expected a layer group .* received an ordinary image") as caught:
        place.resolve(":image")
    assert type(caught.value) is RegistryError
    assert "weenv group push" in str(caught.value)


def test_a_docker_image_is_refused_by_name(servers: dict[str, RegistryServer], tmp_path: Path) -> None:
    place = Place(f"{servers['registry'].host}/docker", None, servers["registry"].blob_file)
    skopeo_copy(ordinary_image(tmp_path), place, "image", tmp_path, "--format", "v2s2")
    with pytest.raises(RegistryError, match=r"received an ordinary image .*docker.distribution.manifest.v2"):
        place.resolve(":image")


def test_other_tools_read_what_is_published_beside_what_they_wrote(
    place: Place, layers: list[Path], tmp_path: Path
) -> None:
    skopeo_copy(ordinary_image(tmp_path), place, "theirs", tmp_path)
    digest = place.push("ours", layers).rpartition("@")[2]
    where = place.name if place.name.startswith("oci:") else f"docker://{place.name}"
    command = ["skopeo", "inspect", "--raw", "--tls-verify=false"]
    if place.credentials and place.credentials.files:
        command += ["--authfile", str(place.credentials.files[0])]
    raw = subprocess.run([*command, f"{where}:ours"], check=True, stdout=subprocess.PIPE).stdout
    assert f"sha256:{hashlib.sha256(raw).hexdigest()}" == digest
    subprocess.run([*command, f"{where}:theirs"], check=True, stdout=subprocess.DEVNULL)


# pulling


def test_a_pulled_layer_is_the_pushed_one(place: Place, layers: list[Path], tmp_path: Path) -> None:
    place.push("pull", layers)
    group = place.resolve(":pull")
    for layer, path in zip(group.layers, layers, strict=True):
        copy = tmp_path / layer.digest
        pull_blob(group.source, layer.digest, layer.size_bytes, copy, credentials=place.credentials)
        assert copy.read_bytes() == path.read_bytes()
    with pytest.raises(FileExistsError):
        pull_blob(group.source, layer.digest, layer.size_bytes, copy, credentials=place.credentials)
    with pytest.raises(NotFound):
        pull_blob(group.source, UNKNOWN, 10, tmp_path / "unknown", credentials=place.credentials)
    assert not (tmp_path / "unknown").exists()


@pytest.mark.parametrize("damage", ["flipped", "cut", "longer"])
def test_a_damaged_layer_is_not_pulled(place: Place, layers: list[Path], tmp_path: Path, damage: str) -> None:
    place.push("pull", layers)
    group = place.resolve(":pull")
    layer = group.layers[0]
    path = place.blob(layer.digest)
    original = path.read_bytes()
    changed = {"flipped": bytes([original[0] ^ 1]) + original[1:], "cut": original[:-1], "longer": original + b"x"}
    path.write_bytes(changed[damage])
    try:
        with pytest.raises((IntegrityError, Unreachable)):
            pull_blob(group.source, layer.digest, layer.size_bytes, tmp_path / "copy", credentials=place.credentials)
        assert not (tmp_path / "copy").exists()
    finally:
        path.write_bytes(original)


# ranges


def test_ranges_are_exact(place: Place, layers: list[Path]) -> None:
    place.push("ranges", layers)
    group = place.resolve(":ranges")
    data = layers[0].read_bytes()
    digest = group.layers[0].digest
    wanted = [
        (0, 1),
        (0, len(data)),
        (len(data) - 1, 1),
        (65_000, 70_000),
        (5, 0),
        *((i * 1000, 999) for i in range(40)),
    ]

    async def read() -> list[bytes]:
        reader = await open_ranges(group.source, credentials=place.credentials)
        try:
            assert await reader.size(digest) == len(data)
            return await asyncio.gather(*(reader.read(digest, offset, size) for offset, size in wanted))
        finally:
            await reader.close()

    assert asyncio.run(read()) == [data[offset : offset + size] for offset, size in wanted]


def test_ranges_beyond_the_blob_and_of_unknown_blobs_fail(place: Place, layers: list[Path]) -> None:
    place.push("ranges", layers)
    group = place.resolve(":ranges")
    layer = group.layers[0]

    async def read() -> None:
        reader = await open_ranges(group.source, credentials=place.credentials)
        try:
            with pytest.raises((IntegrityError, Unreachable)):
                await reader.read(layer.digest, layer.size_bytes - 10, 11)
            with pytest.raises(IntegrityError):
                await reader.read(layer.digest, layer.size_bytes + 1000, 10)
            with pytest.raises(NotFound):
                await reader.read(UNKNOWN, 0, 10)
            with pytest.raises(NotFound):
                await reader.size(UNKNOWN)
            assert await reader.read(layer.digest, 0, 10) == layers[0].read_bytes()[:10]  # none of that broke it
        finally:
            await reader.close()

    asyncio.run(read())


# registries only


def refusals(credentials: Credentials | None, host: str, layers: list[Path]) -> list[str]:
    """What pushing, resolving, pulling and a range say to credentials that will not do."""

    async def read() -> None:
        reader = await open_ranges(f"http://{host}/a", credentials=credentials)
        try:
            await reader.read(UNKNOWN, 0, 10)
        finally:
            await reader.close()

    sentences = []
    for call in (
        lambda: push_group(f"{host}/a:t", layers, credentials=credentials),
        lambda: resolve_group(f"{host}/a:t", credentials=credentials),
        lambda: pull_blob(f"http://{host}/a", UNKNOWN, 10, layers[0].with_name("pulled"), credentials=credentials),
        lambda: asyncio.run(read()),
    ):
        with pytest.raises(AuthenticationFailed) as caught:
            call()
        sentences.append(str(caught.value))
    return sentences


def test_without_a_password_a_registry_that_wants_one_fails(
    servers: dict[str, RegistryServer], layers: list[Path]
) -> None:
    for sentence in refusals(None, servers["basic"].host, layers):
        assert sentence.endswith("the registry asks for user and password; log in with docker or podman")


def test_a_wrong_password_fails(servers: dict[str, RegistryServer], layers: list[Path], tmp_path: Path) -> None:
    host = servers["basic"].host
    wrong = load_credentials([auth_file(tmp_path / "c", host, password="wrong")])
    for sentence in refusals(wrong, host, layers):
        assert host in sentence
        assert "log in" in sentence


def test_nobody_listening_is_unreachable_with_the_address(layers: list[Path], tmp_path: Path) -> None:
    host = f"127.0.0.1:{free_port()}"

    async def read() -> None:
        reader = await open_ranges(f"http://{host}/a")
        try:
            await reader.read(UNKNOWN, 0, 10)
        finally:
            await reader.close()

    for call in (
        lambda: push_group(f"{host}/a:t", layers),
        lambda: resolve_group(f"{host}/a:t"),
        lambda: pull_blob(f"http://{host}/a", UNKNOWN, 10, tmp_path / "copy"),
        lambda: asyncio.run(read()),
    ):
        with pytest.raises(Unreachable, match=f"http://{host}/v2/a/.*is the registry running"):
            call()


def test_what_is_there_is_not_sent_again(servers: dict[str, RegistryServer], layers: list[Path]) -> None:
    with run_proxy(servers["registry"].host) as proxy:
        first = push_group(f"{proxy.host}/once:a", layers)
        sent = sum(one.sent_bytes for one in proxy.uploads())
        assert sent >= sum(layer.stat().st_size for layer in layers)
        proxy.seen.clear()
        again = push_group(f"{proxy.host}/once:b", layers)
        assert proxy.uploads() == []
        assert first.rpartition("@")[2] == again.rpartition("@")[2]
        assert [one.method for one in proxy.seen] == ["HEAD"] * 3 + ["PUT"]
        assert not any(one.authorization for one in proxy.seen)


PUSH_MEASURED = """
import re, sys
from pathlib import Path
from registry import load_credentials, push_group

def push(layer):
    push_group(sys.argv[1], [Path(layer)], credentials=load_credentials([Path(sys.argv[2])]))

def peak_kb():
    return int(re.search(r"VmHWM:\\s+([0-9]+)", Path("/proc/self/status").read_text())[1])

push(sys.argv[3])
before_kb = peak_kb()
push(sys.argv[4])
print(peak_kb() - before_kb)
"""


def test_a_large_layer_goes_in_pieces_with_bounded_memory(servers: dict[str, RegistryServer], tmp_path: Path) -> None:
    """96 MB to the registry that wants a password, from a process of its own whose memory is measured."""
    layer = make_layer(tmp_path, "large", {"f": make_content(96 << 20, 3, False)})
    small = make_layer(tmp_path, "small", {"f": b"f"})
    host = servers["basic"].host
    auth = auth_file(tmp_path / "c", host)
    command = [PYTHON, "-c", PUSH_MEASURED, f"{host}/large:t", str(auth), str(small), str(layer)]
    grown_kb = int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    assert grown_kb < 3 * (remote.UPLOAD_PIECE_BYTES >> 10)  # oras holds two pieces while it reads the next one
    credentials = load_credentials([auth])
    group = resolve_group(f"{host}/large:t", credentials=credentials)
    assert group.layers == (describe_layer(layer),)
    digest, size = group.layers[0].digest, group.layers[0].size_bytes
    pull_blob(group.source, digest, size, tmp_path / "pulled", credentials=credentials)


def test_the_pieces_of_a_large_layer_follow_each_other(servers: dict[str, RegistryServer], tmp_path: Path) -> None:
    layer = make_layer(tmp_path, "large", {"f": make_content(40 << 20, 4, False)})
    with run_proxy(servers["registry"].host) as proxy:
        push_group(f"{proxy.host}/pieces:t", [layer])
        patches = [one for one in proxy.seen if one.method == "PATCH"]
        assert [one.sent_bytes for one in patches[:2]] == [16 << 20, 16 << 20]
        assert sum(one.sent_bytes for one in patches) == layer.stat().st_size

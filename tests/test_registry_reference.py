"""References: what they print they parse to, and each wrong one says what was expected and what was received."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry import InvalidReference, LayoutReference, RegistryReference, parse_reference
from registry.reference import is_loopback, parse_source

DIGEST = "sha256:" + "0123456789abcdef" * 4

digests = st.text("0123456789abcdef", min_size=64, max_size=64).map(lambda text: f"sha256:{text}")
tags = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", fullmatch=True)
hosts = st.one_of(
    st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,20}[A-Za-z0-9])?(:[1-9][0-9]{0,4})?", fullmatch=True),
    st.sampled_from(["[::1]", "[::1]:5000", "[2001:db8::1]:443", "localhost", "127.0.0.1:5000", "ubuntu"]),
).filter(lambda host: host != "oci" and not host.startswith("oci:"))
repositories = st.from_regex(r"[a-z0-9]+([._-][a-z0-9]+)?(/[a-z0-9]+(__[a-z0-9]+)?){0,3}", fullmatch=True)
names = st.text(st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1, max_size=12)


@st.composite
def registry_references(draw: st.DrawFn) -> RegistryReference:
    tag, digest = draw(st.one_of(st.none(), tags)), draw(st.one_of(st.none(), digests))
    return RegistryReference(draw(hosts), draw(repositories), tag or (None if digest else "latest"), digest)


@st.composite
def layout_references(draw: st.DrawFn) -> LayoutReference:
    """With a tag, so that colons in the last component are no riddle; and none that ends like a digest."""
    parts = draw(st.lists(names, min_size=1, max_size=4))
    if parts[-1].rpartition("@")[2].startswith("sha256:") or "@" in parts[-1]:
        parts[-1] = parts[-1].replace("@", "at")
    directory = draw(st.sampled_from(["", "/", "../"])) + "/".join(parts)
    return LayoutReference(Path(directory), draw(tags), draw(st.one_of(st.none(), digests)))


@given(st.one_of(registry_references(), layout_references()))
def test_what_is_printed_parses_to_the_same(reference: RegistryReference | LayoutReference) -> None:
    assert parse_reference(str(reference)) == reference


@given(st.one_of(st.text(max_size=60), st.text("oci:/@a.sha256-_[]A0", max_size=90)))
def test_any_text_is_refused_or_stays_what_it_is(text: str) -> None:
    refusal, reference = "", None
    try:
        reference = parse_reference(text)
    except InvalidReference as error:
        refusal = str(error)
    if reference is None:
        assert refusal.startswith(f"'{text}': expected")
    else:
        assert parse_reference(str(reference)) == reference


GOOD = {
    "oci:dir:tag": LayoutReference(Path("dir"), "tag", None),
    "oci:./dir:v1.0": LayoutReference(Path("dir"), "v1.0", None),
    "oci:../a/b:tag": LayoutReference(Path("../a/b"), "tag", None),
    "oci:/abs/dir:tag": LayoutReference(Path("/abs/dir"), "tag", None),
    "oci:.:tag": LayoutReference(Path("."), "tag", None),
    "oci:/a:b/c:tag": LayoutReference(Path("/a:b/c"), "tag", None),
    "oci:/a/b:c:tag": LayoutReference(Path("/a/b:c"), "tag", None),
    "oci:/user@host/dir:tag": LayoutReference(Path("/user@host/dir"), "tag", None),
    "oci:a@b:tag": LayoutReference(Path("a@b"), "tag", None),
    f"oci:dir@{DIGEST}": LayoutReference(Path("dir"), None, DIGEST),
    f"oci:a@b@{DIGEST}": LayoutReference(Path("a@b"), None, DIGEST),
    f"oci:dir:tag@{DIGEST}": LayoutReference(Path("dir"), "tag", DIGEST),
    f"oci:/a:b/c@{DIGEST}": LayoutReference(Path("/a:b/c"), None, DIGEST),
    "localhost:5000/task": RegistryReference("localhost:5000", "task", "latest", None),
    "r.example.com/a/b-c/d:1.2": RegistryReference("r.example.com", "a/b-c/d", "1.2", None),
    f"r.example.com/a@{DIGEST}": RegistryReference("r.example.com", "a", None, DIGEST),
    f"[::1]:5000/a:t@{DIGEST}": RegistryReference("[::1]:5000", "a", "t", DIGEST),
}


@pytest.mark.parametrize("text", GOOD)
def test_good_ones(text: str) -> None:
    assert parse_reference(text) == GOOD[text]


BAD = {
    "": "expected oci:DIR:TAG or HOST[:PORT]/REPO[:TAG][@DIGEST]",
    "task": "expected oci:DIR:TAG or HOST[:PORT]/REPO[:TAG][@DIGEST]",
    "host/": "expected oci:DIR:TAG or HOST[:PORT]/REPO[:TAG][@DIGEST]",
    "host:0/a": "expected a host (HOST[:PORT]), received 'host:0'",
    "host:port/a": "expected a host (HOST[:PORT]), received 'host:port'",
    "-host/a": "expected a host (HOST[:PORT]), received '-host'",
    "https://host/a": "expected a host (HOST[:PORT]), received 'https:'",
    "host/Task": "expected a repository (lower case, digits, and '.', '_', '-', '/' between), received 'Task'",
    "host/a//b": "expected a repository (lower case, digits, and '.', '_', '-', '/' between), received 'a//b'",
    "host/a:": "expected a tag (letters, digits, '_', '.', '-', at most 128), received ''",
    "host/a:b:c": "expected a tag (letters, digits, '_', '.', '-', at most 128), received 'b:c'",
    f"host/a:{'t' * 129}": f"expected a tag (letters, digits, '_', '.', '-', at most 128), received '{'t' * 129}'",
    "host/a@latest": "expected sha256: and 64 hexadecimal digits behind @, received 'latest'",
    "host/a@sha256:12": "expected sha256: and 64 hexadecimal digits behind @, received 'sha256:12'",
    f"host/a@{DIGEST.upper()}": f"expected sha256: and 64 hexadecimal digits behind @, received '{DIGEST.upper()}'",
    "oci:": "expected oci:DIR:TAG, the directory is missing",
    "oci::tag": "expected oci:DIR:TAG, the directory is missing",
    "oci:dir": "expected oci:DIR:TAG or oci:DIR@sha256:…, received neither tag nor digest",
    "oci:dir:": "expected oci:DIR:TAG or oci:DIR@sha256:…, received neither tag nor digest",
    "oci:/a:b/c": "expected oci:DIR:TAG or oci:DIR@sha256:…, received neither tag nor digest",
    "oci:dir:a tag": "expected a tag (letters, digits, '_', '.', '-', at most 128), received 'a tag'",
    "oci:dir@sha256:12": "expected sha256: and 64 hexadecimal digits behind @, received 'sha256:12'",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_ones_say_what_was_expected(text: str) -> None:
    with pytest.raises(InvalidReference) as caught:
        parse_reference(text)
    assert str(caught.value) == f"'{text}': {BAD[text]}"


def test_a_layouts_source_is_absolute_and_parses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reference = parse_reference("oci:build/registry:tag")
    assert reference.source == f"oci:{tmp_path}/build/registry"
    assert parse_source(reference.source) == (tmp_path / "build/registry", "", "")


@given(registry_references())
def test_a_registrys_source_parses(reference: RegistryReference) -> None:
    assert parse_source(reference.source) == (None, reference.host, reference.repository)


@pytest.mark.parametrize("source", ["", "oci:", "ftp://host/a", "http://host", "http://host/", "http:///a", "host/a"])
def test_other_sources_are_refused(source: str) -> None:
    with pytest.raises(InvalidReference, match=r"expected oci:DIR or http\(s\)://HOST"):
        parse_source(source)


@pytest.mark.parametrize("host", ["localhost", "localhost:5000", "127.0.0.1", "127.9.9.9:80", "[::1]", "[::1]:5000"])
def test_this_machine_is_spoken_to_in_http(host: str) -> None:
    assert is_loopback(host)
    assert RegistryReference(host, "a", "t", None).source == f"http://{host}/a"


@pytest.mark.parametrize(
    "host", ["localhost.example.com", "127.example.com", "10.0.0.1:5000", "[2001:db8::1]", "127.1"]
)
def test_others_are_spoken_to_in_https(host: str) -> None:
    assert not is_loopback(host)
    assert RegistryReference(host, "a", "t", None).source == f"https://{host}/a"

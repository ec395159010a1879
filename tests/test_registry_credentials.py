"""Credentials: the variants of docker's and containers' auth files, and the helpers that they name."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from registry import AuthenticationFailed, Credentials, RegistryError, load_credentials
from registry.credentials import MAX_HELPER_ANSWER_BYTES, ask_helper


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def write(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.fixture
def helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in $PATH for `docker-credential-NAME`."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
    return directory


def make_helper(directory: Path, name: str, script: str) -> None:
    path = directory / f"docker-credential-{name}"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    "key",
    [
        "r.example.com:5000",
        "https://r.example.com:5000",
        "https://r.example.com:5000/v1/",
        "http://r.example.com:5000/v2",
    ],
)
def test_a_host_is_found_however_its_tool_wrote_it(tmp_path: Path, key: str) -> None:
    loaded = load_credentials([write(tmp_path / "c", {"auths": {key: {"auth": encoded("user:pass:word")}}})])
    assert loaded.find("r.example.com:5000") == ("user", "pass:word")
    assert loaded.find("r.example.com") is None
    assert loaded.basic("r.example.com:5000", "a/b") == encoded("user:pass:word")


def test_user_and_password_may_stand_by_themselves(tmp_path: Path) -> None:
    entry = {"username": "user", "password": "pw", "email": "unknown fields do not matter"}
    assert load_credentials([write(tmp_path / "c", {"auths": {"h": entry}, "other": 1})]).find("h") == ("user", "pw")


@pytest.mark.parametrize("content", [{}, {"auths": None}, {"auths": {}}, {"auths": {"h": {}}}, {"auths": {"h": None}}])
def test_a_file_may_hold_nothing(tmp_path: Path, content: object) -> None:
    loaded = load_credentials([write(tmp_path / "c", content)])
    assert loaded.find("h") is None
    assert loaded.basic("h") is None


def test_the_longest_namespace_counts_and_another_namespace_does_not(tmp_path: Path) -> None:
    auths = {name: {"auth": encoded(f"{name}:x")} for name in ("q.io", "q.io/org", "q.io/org/team")}
    loaded = load_credentials([write(tmp_path / "c", {"auths": auths})])
    found = {name: loaded.find("q.io", name) for name in ("", "org", "org/team/x", "org/team2", "organ/x")}
    assert {name: pair[0] for name, pair in found.items() if pair} == {
        "": "q.io",
        "org": "q.io/org",
        "org/team/x": "q.io/org/team",
        "org/team2": "q.io/org",
        "organ/x": "q.io",
    }


def test_the_first_file_that_names_a_host_wins(tmp_path: Path) -> None:
    one = write(tmp_path / "1", {"auths": {"a": {"auth": encoded("one:1")}}})
    two = write(tmp_path / "2", {"auths": {"a": {"auth": encoded("two:2")}, "b": {"auth": encoded("two:2")}}})
    loaded = load_credentials([one, two])
    assert loaded.files == (one, two)
    assert (loaded.find("a"), loaded.find("b")) == (("one", "1"), ("two", "2"))


def test_passwords_are_not_printed(tmp_path: Path) -> None:
    loaded = load_credentials([write(tmp_path / "c", {"auths": {"h": {"auth": encoded("user:secret")}}})])
    assert "secret" not in repr(loaded)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "expected docker's auth file (JSON)"),
        ("{", "expected docker's auth file (JSON)"),
        ("[]", "expected docker's auth file (JSON)"),
        ({"auths": []}, "expected docker's auth file (JSON)"),
        ({"auths": {"h": {"auth": 5}}}, "expected docker's auth file (JSON)"),
        ({"credHelpers": {"h": 5}}, "expected docker's auth file (JSON)"),
        ({"auths": {"h": {"auth": "%%%"}}}, "the entry of h: expected base64 of user:password"),
        ({"auths": {"h": {"auth": encoded("no colon")}}}, "the entry of h: expected base64 of user:password"),
        ({"auths": {"h": {"auth": "/w=="}}}, "the entry of h: expected base64 of user:password"),
        ({"auths": {"h": {"identitytoken": "t"}}}, "the entry of h is an identity token; expected user and password"),
        ({"credHelpers": {"h": "../../bin/sh"}}, "expected a credential helper's name, received '../../bin/sh'"),
        ({"credsStore": "a b"}, "expected a credential helper's name, received 'a b'"),
    ],
)
def test_a_malformed_file_is_named_with_what_was_expected(tmp_path: Path, content: object, sentence: str) -> None:
    path = write(tmp_path / "config.json", content)
    with pytest.raises(RegistryError) as caught:
        load_credentials([path])
    assert str(caught.value).startswith(f"{path}: {sentence}")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="cannot be read: Is a directory"):
        load_credentials([tmp_path])


def test_a_helper_is_asked_for_its_host_each_time(tmp_path: Path, helpers: Path) -> None:
    script = """test "$1" = get && read -r host || true
echo "$host" >> "$(dirname "$0")/asked"; echo '{"ServerURL":"x","Username":"u","Secret":"s","More":1}'"""
    make_helper(helpers, "test", script)
    content = {"credHelpers": {"h:5000": "test"}, "auths": {"h:5000": {}, "other": {"auth": encoded("a:b")}}}
    loaded = load_credentials([write(tmp_path / "c", content)])
    assert not (helpers / "asked").exists()
    assert loaded.find("h:5000", "repo") == ("u", "s")
    assert loaded.find("h:5000") == ("u", "s")
    assert (loaded.find("other"), loaded.find("unknown")) == (("a", "b"), None)
    assert (helpers / "asked").read_text() == "h:5000\nh:5000\n"


def test_the_store_is_asked_for_what_no_entry_names(tmp_path: Path, helpers: Path) -> None:
    make_helper(helpers, "vault", """printf '{"Username":"%s","Secret":"s"}' "$(cat)" """)
    content = {"credsStore": "vault", "auths": {"inline": {"auth": encoded("a:b")}, "kept": {}}}
    loaded = load_credentials([write(tmp_path / "c", content)])
    assert [loaded.find(host) for host in ("inline", "kept", "new")] == [("a", "b"), ("kept", "s"), ("new", "s")]


def test_a_helper_that_does_not_know_the_host_is_no_failure(tmp_path: Path, helpers: Path) -> None:
    make_helper(helpers, "test", "echo 'credentials not found in native keychain'; exit 1")
    assert Credentials(store="test").find("h") is None


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("echo 'the vault is sealed'; exit 3", "docker-credential-test failed with status 3: the vault is sealed"),
        ("exit 1", "docker-credential-test failed with status 1: it says nothing"),
        ("echo not-json-but-secret", "docker-credential-test: expected JSON with Username and Secret"),
        ("""echo '{"Username":"u"}'""", "docker-credential-test: expected JSON with Username and Secret"),
        ("""echo '{"Username":"<token>","Secret":"s"}'""", "docker-credential-test keeps an identity token"),
        (f"head -c {MAX_HELPER_ANSWER_BYTES + 1} /dev/zero", f"expected at most {MAX_HELPER_ANSWER_BYTES} bytes"),
    ],
)
def test_a_helper_that_fails_is_named(helpers: Path, script: str, sentence: str) -> None:
    make_helper(helpers, "test", script)
    with pytest.raises(AuthenticationFailed) as caught:
        Credentials(helpers={"h": "test"}).find("h")
    assert sentence in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_helper_that_is_missing_or_no_program_is_named(helpers: Path) -> None:
    with pytest.raises(AuthenticationFailed, match=r"docker-credential-gone, which is not in \$PATH"):
        Credentials(store="gone").find("h")
    (helpers / "docker-credential-data").write_bytes(b"\x7fELFno")
    (helpers / "docker-credential-data").chmod(0o755)
    with pytest.raises(AuthenticationFailed, match="docker-credential-data cannot be run"):
        Credentials(store="data").find("h")


def test_a_helper_that_hangs_is_given_up(helpers: Path) -> None:
    make_helper(helpers, "slow", "exec sleep 1000")
    with pytest.raises(AuthenticationFailed, match=r"did not answer within 0\.2 s"):
        ask_helper("slow", "h", timeout_s=0.2)

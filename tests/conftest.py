"""Hypothesis profiles (the default is quick enough for every run, `--hypothesis-profile=long` looks further), and what many tests
stand on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from node_process import Groups, make_groups
from registry_fixture import Proxy, RegistryServer, run_proxy, run_registry
from weenv_cli import Weenv, isolated_weenv

_COMMON = {
    "deadline": None,
    "phases": [Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}

settings.register_profile("default", max_examples=40, derandomize=True, **_COMMON)
settings.register_profile("long", max_examples=2000, derandomize=False, **_COMMON)
settings.load_profile("default")


@pytest.fixture
def weenv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Weenv:
    """The command line in this process."""
    return isolated_weenv(tmp_path / "home", monkeypatch, capsys)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    """A registry."""
    with run_registry(tmp_path_factory.mktemp("registry")) as server:
        yield server


@pytest.fixture(scope="module")
def registry(server: RegistryServer) -> str:
    """Its HOST:PORT."""
    return server.host


@pytest.fixture(scope="module")
def groups(registry: str, tmp_path_factory: pytest.TempPathFactory) -> Groups:
    """Groups in it that environments are made of."""
    return make_groups(tmp_path_factory.mktemp("groups"), f"{registry}/demo/")


@pytest.fixture
def proxy(server: RegistryServer) -> Iterator[Proxy]:
    """What is between a test and the registry, and sees every request."""
    with run_proxy(server.host) as proxy:
        yield proxy

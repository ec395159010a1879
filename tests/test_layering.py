"""One import direction: tools → envlet → weefs → registry → layerformat → standard library; and the C core through one
file only.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ORDER = ("layerformat", "registry", "weefs", "envlet", "tools")
"""Each may import itself and those before it."""

LIBRARIES = {
    "layerformat": {"attr", "attrs", "isal", "zstandard"},
    "registry": {"attr", "attrs", "msgspec", "oras", "requests", "aiohttp"},
    "weefs": {"attr", "attrs", "msgspec", "cffi", "zstandard", "pyfuse3", "trio", "aiohttp", "dns"},
    "envlet": {"attr", "attrs", "h11", "msgspec", "prometheus_client", "trio", "psutil"},
    "tools": {"attr", "attrs", "jinja2", "msgspec", "rich", "trio", "zstandard"},
}
ONLY_IN = {
    "weefs._core": {"weefs/core.py"},
    "pyfuse3": {"weefs/reference.py"},
    "cffi": {"weefs/core_build.py"},
    "oras": {"registry/remote.py"},
    "requests": {"registry/remote.py"},
    "aiohttp": {"registry/http_ranges.py", "weefs/peerserver.py", "weefs/etcd.py"},
    "dns": {"weefs/members.py"},
    "h11": {"envlet/metrics_server.py"},
    "prometheus_client": {"envlet/metrics.py"},
    "jinja2": {"tools/recipes/templates.py"},
    "argparse": {path.relative_to(ROOT).as_posix() for path in (ROOT / "tools").rglob("*.py")} | {"weefs/__main__.py"},
}
"""Seams: what touches a foreign thing, in one place."""


def sources(package: str) -> list[Path]:
    data = {ROOT / "tools/demo/harness", ROOT / "tools/demo/evaluator"}  # programs that run inside environments
    return [path for path in sorted((ROOT / package).rglob("*.py")) if path.parent not in data]


def imports(path: Path) -> set[str]:
    """Full names of what a file imports, absolutely."""
    package = path.relative_to(ROOT).parent.parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("package", ORDER)
def test_imports_go_one_way(package: str) -> None:
    allowed = (
        set(ORDER[: ORDER.index(package) + 1])
        | LIBRARIES[package]
        | sys.stdlib_module_names
        | {"__future__", "_typeshed"}
    )
    for path in sources(package):
        tops = {name.split(".")[0] for name in imports(path)}
        assert tops <= allowed, f"{path.relative_to(ROOT)} imports {sorted(tops - allowed)}"


@pytest.mark.parametrize("module", sorted(ONLY_IN))
def test_seams_are_where_they_are_said_to_be(module: str) -> None:
    for package in ORDER:
        for path in sources(package):
            name = path.relative_to(ROOT).as_posix()
            if any(imported == module or imported.startswith(module + ".") for imported in imports(path)):
                assert name in ONLY_IN[module], f"{name} imports {module}"


def test_the_environment_is_read_in_tools_only() -> None:
    for package in ORDER[:-1]:
        for path in sources(package):
            for node in ast.walk(ast.parse(path.read_text())):
                name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
                assert name not in ("os.environ", "os.getenv", "sys.argv"), f"{path.relative_to(ROOT)} reads {name}"


@pytest.mark.parametrize("package", ORDER)
def test_each_file_says_what_it_is_for(package: str) -> None:
    for path in sources(package):
        if path.read_text().strip():
            assert ast.get_docstring(ast.parse(path.read_text())), f"{path.relative_to(ROOT)} has no first line"
    if package == "weefs":
        for path in sorted((ROOT / "csrc").glob("*.[ch]")):
            assert path.read_text().startswith("/*"), f"csrc/{path.name} has no first line"

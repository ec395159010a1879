"""Hidden tests of the demo's tasks: what each filter promises, beyond the examples of the project's own suite."""

import pytest
from jinja2 import Environment
from jinja2.utils import Cycler, LRUCache

env = Environment()


def render(template, **values):
    return env.from_string(template).render(**values)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (999, "999 Bytes"),
        (1000, "1.0 kB"),
        (1500, "1.5 kB"),
        (999_949, "999.9 kB"),
        (1_000_000, "1.0 MB"),
        (3 * 10**12, "3.0 TB"),
    ],
)
def test_filesizeformat(value, text):
    assert render("{{ v|filesizeformat }}", v=value) == text


@pytest.mark.parametrize("count", range(1, 12))
@pytest.mark.parametrize("width", range(1, 5))
def test_batch(count, width):
    rows = list(env.filters["batch"](range(count), width, "x"))
    assert all(len(row) == width for row in rows)
    assert [item for row in rows for item in row if item != "x"] == list(range(count))


@pytest.mark.parametrize("count", range(12))
@pytest.mark.parametrize("slices", range(1, 5))
def test_slice(count, slices):
    parts = env.call_filter("slice", range(count), [slices])
    parts = list(parts)
    assert len(parts) == slices
    assert [item for part in parts for item in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("length", range(5, 30))
def test_truncate(length):
    text = "the quick brown fox jumps"
    result = render("{{ t|truncate(n, true, '...', 0) }}", t=text, n=length)
    assert result == (text if len(text) <= length else text[: length - 3] + "...")


def test_indent():
    assert render("{{ t|indent(2) }}", t="a\nb\n\nc") == "a\n  b\n\n  c"
    assert render("{{ t|indent(2, first=true, blank=true) }}", t="a\n\nb") == "  a\n  \n  b"


def test_cycler():
    cycler = Cycler(1, 2, 3)
    assert [cycler.next() for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1]
    cycler.reset()
    assert cycler.current == 1


def test_cache_forgets_the_oldest():
    cache = LRUCache(3)
    for key in "abc":
        cache[key] = key
    cache["a"]
    cache["d"] = "d"
    assert "b" not in cache
    assert sorted(cache.keys()) == ["a", "c", "d"]
    assert len(cache) == 3

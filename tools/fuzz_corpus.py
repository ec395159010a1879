"""`python -m tools.fuzz_corpus DIR`: seeds for the fuzzer: raw TOCs of small layers that together use every table and
flag of the format.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path

from layerformat import Entry, Kind, decode_footer, encode, restore_toc

NS = 1_000_000_000


def _regular(path: bytes, data: bytes, **fields: object) -> tuple[Entry, io.BytesIO]:
    entry = Entry(path=path, kind=Kind.REGULAR, mode=0o644, size=len(data), **fields)  # type: ignore[arg-type]
    return entry, io.BytesIO(data)


def _other(kind: Kind, path: bytes, **fields: object) -> tuple[Entry, io.BytesIO]:
    return Entry(path=path, kind=kind, **fields), io.BytesIO()  # type: ignore[arg-type]


def seeds() -> Iterator[list[tuple[Entry, io.BytesIO]]]:
    """Lists of entries, each a layer."""
    yield []
    yield [
        _regular(b"a", b"x" * 10),
        _other(Kind.HARD_LINK, b"b", target=b"a"),
        _other(Kind.SYMLINK, b"s", target=b"a"),
    ]
    yield [
        _other(Kind.HARD_LINK, b"b", target=b"lower/file"),
        _regular(b".wh.gone", b""),
        _regular(b"d/.wh..wh..opq", b""),
    ]
    yield [
        _regular(b"d/large", bytes(range(256)) * 200),
        _regular(b"d/small", b"1"),
        _other(Kind.DIRECTORY, b"e", mode=0o700),
    ]
    yield [
        _other(Kind.CHARACTER, b"c", rdev=0x105),
        _other(Kind.BLOCK, b"k", rdev=0x801),
        _other(Kind.FIFO, b"f", mtime_ns=-1),
    ]
    yield [
        _regular(
            b"x", b"x", xattrs={b"user.a": b"1", b"user.b": b"", b"security.capability": bytes(20)}, mtime_ns=5 * NS + 7
        )
    ]
    sparse = Entry(path=b"sparse", kind=Kind.REGULAR, mode=0o600, size=1 << 30, sparse=((4096, 100), (1 << 20, 5)))
    yield [(sparse, io.BytesIO(b"y" * 105))]
    yield [_regular(b"/".join([b"deep"] * 40), b"z")]
    yield [_regular(b"n%d" % i, b"%d" % i) for i in range(50)]


def raw_toc(entries: list[tuple[Entry, io.BytesIO]]) -> bytes:
    file = io.BytesIO()
    encode(entries, file, jobs=1, level=3, chunk_size=8192)
    blob = file.getvalue()
    footer = decode_footer(blob[-80:], blob_size=len(blob))
    stored = blob[footer.toc_offset : footer.toc_offset + footer.toc_stored_size]
    return restore_toc(stored, footer.toc_raw_size)


def main() -> None:
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for number, entries in enumerate(seeds()):
        (directory / f"seed-{number}").write_bytes(raw_toc(entries))


if __name__ == "__main__":
    main()

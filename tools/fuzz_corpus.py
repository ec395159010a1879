"""`python -m tools.fuzz_corpus DIR`: what the fuzzers begin with. `DIR/toc`: raw TOCs of small layers that together use every table and
flag of the format; `DIR/fuse`: programs; `DIR/layers.h`: layers that are built into the fuzzer of the request loop.
"""

from __future__ import annotations

import hashlib
import io
import random
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


def lower() -> list[tuple[Entry, io.BytesIO]]:
    """What the layer of whiteouts among the seeds lies on."""
    return [
        _other(Kind.DIRECTORY, b"d", mode=0o755, xattrs={b"trusted.overlay.opaque": b"y"}),
        _regular(b"d/old", b"1"),
        _regular(b"gone", b"2"),
        _regular(b"lower/file", b"3" * 10000),
    ]


def encoded(entries: list[tuple[Entry, io.BytesIO]]) -> bytes:
    file = io.BytesIO()
    encode(entries, file, jobs=1, level=3, chunk_size=8192)
    return file.getvalue()


def raw_toc(blob: bytes) -> bytes:
    footer = decode_footer(blob[-80:], blob_size=len(blob))
    stored = blob[footer.toc_offset : footer.toc_offset + footer.toc_stored_size]
    return restore_toc(stored, footer.toc_raw_size)


def _array(name: str, data: bytes) -> str:
    return f"static const uint8_t {name}[] = {{{','.join(map(str, data))}}};\n"


def layers_header() -> str:
    """C: `fuzz_layers`, of which csrc/fuzz_fuse.c makes its plans."""
    made = list(seeds())
    chosen = [lower(), *(made[number] for number in (2, 3, 4, 5, 6, 8))]
    text = "/* Made by tools/fuzz_corpus.py. */\n#include <stddef.h>\n#include <stdint.h>\n"
    rows = ""
    for number, entries in enumerate(chosen):
        blob = encoded(entries)
        toc = raw_toc(blob)
        text += _array(f"toc_{number}", toc) + _array(f"blob_{number}", blob)
        name = hashlib.sha256(toc).hexdigest()[:32]
        rows += f'\t{{toc_{number}, sizeof(toc_{number}), blob_{number}, sizeof(blob_{number}), "{name}"}},\n'
    text += "struct fuzz_layer {\n\tconst uint8_t *toc;\n\tsize_t toc_size;\n"
    text += "\tconst uint8_t *blob;\n\tsize_t blob_size;\n\tconst char *name;\n};\n"
    return f"{text}#define FUZZ_LAYERS {len(chosen)}u\nstatic const struct fuzz_layer fuzz_layers[FUZZ_LAYERS] = {{\n{rows}}};\n"


def main() -> None:
    directory = Path(sys.argv[1])
    for name in ("toc", "fuse"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    for number, entries in enumerate(seeds()):
        (directory / "toc" / f"seed-{number}").write_bytes(raw_toc(encoded(entries)))
    for number in range(16):
        (directory / "fuse" / f"seed-{number}").write_bytes(random.Random(number).randbytes(64 << number % 5))
    (directory / "layers.h").write_text(layers_header())


if __name__ == "__main__":
    main()

"""docs/format.md's example is a layer: what it shows is what the encoder writes and both readers accept."""

from __future__ import annotations

import io
import re
from pathlib import Path

from layerformat import Entry, Kind, Toc, decode_footer, encode, restore_toc
from weefs.core import check_toc

TEXT = (Path(__file__).parent.parent / "docs/format.md").read_text()
LINE = re.compile(r"^([0-9a-f]{4})  ((?:[0-9a-f]{2} ?){1,16})", re.MULTILINE)


def shown(block: str) -> dict[int, bytes]:
    return {int(offset, 16): bytes.fromhex(data) for offset, data in LINE.findall(block)}


def test_the_example_is_what_the_encoder_writes() -> None:
    blob_block, toc_block = re.findall(r"^```\n(0000  .*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    entries = [
        (Entry(path=b".", kind=Kind.DIRECTORY, mode=0o755), io.BytesIO()),
        (Entry(path=b"hi", kind=Kind.REGULAR, mode=0o644, size=6, mtime_ns=1_000_000_000), io.BytesIO(b"hello\n")),
    ]
    file = io.BytesIO()
    encode(entries, file, jobs=1, level=3, chunk_size=4096)
    blob = file.getvalue()
    footer = decode_footer(blob[-80:], blob_size=len(blob))
    stored = blob[footer.toc_offset : footer.toc_offset + footer.toc_stored_size]
    toc = restore_toc(stored, footer.toc_raw_size)
    assert b"".join(data for _, data in sorted(shown(toc_block).items())) == toc
    Toc.parse(toc)
    check_toc(toc)
    lines = shown(blob_block)
    assert lines[0] == blob[:6]
    # Another compressor may write another frame: what stands behind it is compared from the end.
    end = max(lines) + len(lines[max(lines)])
    for offset, data in lines.items():
        at = len(blob) - (end - offset)
        if offset >= 0x94 and offset not in (0x9C, 0xD4):
            assert blob[at : at + len(data)] == data, hex(offset)

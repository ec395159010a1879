"""Tar headers byte by byte: builders that share nothing with a reader or a writer, for archives that no writer would make."""

from __future__ import annotations

BLOCK = 512
END = bytes(2 * BLOCK)
TIME_S = 1_600_000_000
GNU = b"ustar  \0"
V7 = bytes(8)


def header(name: bytes, kind: bytes = b"0", *, size: int | bytes = 0, **fields: bytes) -> bytes:
    """A header, POSIX's but for the raw `fields` that replace some of its own."""
    values = {
        "name": name.ljust(100, b"\0"),
        "mode": b"0000755\0" if kind == b"5" else b"0000644\0",
        "uid": b"0000000\0",
        "gid": b"0000000\0",
        "size": size if isinstance(size, bytes) else b"%011o\0" % size,
        "mtime": b"%011o\0" % TIME_S,
        "checksum": b" " * 8,
        "kind": kind,
        "target": bytes(100),
        "magic": b"ustar\x0000",
        "owner": bytes(64),
        "device": bytes(16),
        "rest": bytes(167),
    } | fields
    block = b"".join(values.values())
    assert len(block) == BLOCK
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


def records(*pairs: tuple[bytes, bytes]) -> bytes:
    """The body of a PAX header."""
    body = b""
    for key, value in pairs:
        length = len(key) + len(value) + 3
        digits = next(count for count in range(1, 10) if len(str(length + count)) == count)
        body += b"%d %s=%s\n" % (length + digits, key, value)
    return body


def pax(*pairs: tuple[bytes, bytes], kind: bytes = b"x") -> bytes:
    """A PAX header, for the entry after it (`x`) or for all (`g`)."""
    body = records(*pairs)
    return header(b"pax", kind, size=len(body)) + padded(body)


def global_pax(*pairs: tuple[bytes, bytes]) -> bytes:
    return pax(*pairs, kind=b"g")


def file(name: bytes, data: bytes = b"data", kind: bytes = b"0", **fields: bytes) -> bytes:
    return header(name, kind, size=len(data), **fields) + padded(data)


def directory(name: bytes, **fields: bytes) -> bytes:
    return header(name, b"5", **fields)


def symlink(name: bytes, target: bytes, **fields: bytes) -> bytes:
    return header(name, b"2", target=target.ljust(100, b"\0"), mode=b"0000777\0", **fields)


def link(name: bytes, target: bytes, **fields: bytes) -> bytes:
    return header(name, b"1", target=target.ljust(100, b"\0"), **fields)


def device(name: bytes, kind: bytes, major: int, minor: int, **fields: bytes) -> bytes:
    return header(name, kind, device=b"%07o\0%07o\0" % (major, minor), **fields)


def fifo(name: bytes) -> bytes:
    return header(name, b"6")


def whiteout(path: bytes) -> bytes:
    """Hides `path`."""
    parent, slash, name = path.rpartition(b"/")
    return file(parent + slash + b".wh." + name, b"")


def opaque(path: bytes) -> bytes:
    """Makes the directory `path` opaque."""
    return file(path + b"/.wh..wh..opq", b"")


def long_name(text: bytes, kind: bytes = b"L") -> bytes:
    """GNU's header for a long name (`L`) or link (`K`), without the NUL at its end."""
    return header(b"././@LongLink", kind, size=len(text), magic=GNU) + padded(text)


def base256(value: int, width: int) -> bytes:
    """A number in two's complement with the first bit set."""
    mask = (1 << 8 * width - 1) - 1
    return ((value & mask) | (1 << 8 * width - 1)).to_bytes(width, "big")


def archive(*parts: bytes) -> bytes:
    return b"".join(parts) + END


def old_sparse(name: bytes, size: int, segments: list[tuple[int, int]], data: bytes, *, size_field: bytes | None = None) -> bytes:
    """GNU's oldest form: four segments in the header, the rest in blocks of 21."""

    def table(part: list[tuple[int, int]], room: int) -> bytes:
        return b"".join(b"%011o\0%011o\0" % segment for segment in part).ljust(24 * room, b"\0")

    more = [segments[at : at + 21] for at in range(4, len(segments), 21)]
    rest = bytes(41) + table(segments[:4], 4) + bytes([bool(more)]) + (size_field or b"%011o\0" % size) + bytes(17)
    blocks = b"".join(table(part, 21) + bytes([index + 1 < len(more)]) + bytes(7) for index, part in enumerate(more))
    return header(name, b"S", size=len(data), magic=GNU, rest=rest) + blocks + padded(data)


def sparse_0_0(name: bytes, size: int, segments: list[tuple[int, int]], data: bytes) -> bytes:
    pairs = [(b"GNU.sparse.size", b"%d" % size), (b"GNU.sparse.numblocks", b"%d" % len(segments))]
    for offset, length in segments:
        pairs += [(b"GNU.sparse.offset", b"%d" % offset), (b"GNU.sparse.numbytes", b"%d" % length)]
    return pax(*pairs) + file(name, data)


def sparse_0_1(name: bytes, size: int, segments: list[tuple[int, int]], data: bytes) -> bytes:
    pairs = [
        (b"GNU.sparse.size", b"%d" % size),
        (b"GNU.sparse.numblocks", b"%d" % len(segments)),
        (b"GNU.sparse.name", name),
        (b"GNU.sparse.map", b",".join(b"%d,%d" % segment for segment in segments)),
    ]
    return pax(*pairs) + file(b"GNUSparseFile.0/" + name, data)


def sparse_1_0(name: bytes, size: int, segments: list[tuple[int, int]], data: bytes) -> bytes:
    pairs = [
        (b"GNU.sparse.major", b"1"),
        (b"GNU.sparse.minor", b"0"),
        (b"GNU.sparse.name", name),
        (b"GNU.sparse.realsize", b"%d" % size),
    ]
    lines = b"%d\n" % len(segments) + b"".join(b"%d\n%d\n" % segment for segment in segments)
    return pax(*pairs) + file(b"GNUSparseFile.0/" + name, padded(lines) + data)

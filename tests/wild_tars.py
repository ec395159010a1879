"""Archives as they are found in the wild, byte by byte: a table of named stacks, and what each of them is.

A `Case` converts. Its judges are `umoci unpack` of an image of the stack, and the kernel's overlayfs over directories into which
GNU tar extracted the archives: a judge shows the same tree, or differs in what is named here and nothing else, or fails with a
message; where it does not show the same, `decision` names the paragraph that says who is right and why (docs/decisions/0002 and
0007). A `Refusal` is refused by name; `umoci` says whether umoci refuses it as well.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from attrs import field, frozen
from raw_tars import (
    BLOCK,
    END,
    GNU,
    TIME_S,
    V7,
    archive,
    base256,
    device,
    directory,
    fifo,
    file,
    global_pax,
    header,
    link,
    long_name,
    old_sparse,
    opaque,
    padded,
    pax,
    records,
    sparse_0_0,
    sparse_0_1,
    sparse_1_0,
    symlink,
    whiteout,
)

# The rows


@frozen
class Same:
    """The judge shows the same tree."""


@frozen
class Differs:
    """It differs in exactly these paths and attributes of `weefs_harness.Row`; "" is the path as a whole."""

    where: frozenset[tuple[bytes, str]]


@frozen
class Fails:
    """It cannot unpack the stack; `message` is in what it says."""

    message: str


@frozen
class NotAsked:
    """It could not tell: `why`."""

    why: str


@frozen
class Unpacks:
    """It makes something of what is refused here."""


Verdict = Same | Differs | Fails | NotAsked
SAME = Same()
UNPACKS = Unpacks()


def differs(*where: tuple[bytes, str]) -> Differs:
    return Differs(frozenset(where))


@frozen
class Case:
    """A stack that converts.

    shows     by path, attributes of `weefs_harness.Row` as the mount shows them, or None for no such path
    warns     in a warning of the conversion of the last archive
    decision  of what a judge does differently
    """

    kind: str
    name: str
    stack: tuple[bytes, ...]
    shows: dict[bytes, dict[str, object] | None] = field(factory=dict)
    umoci: Verdict = SAME
    kernel: Verdict = SAME
    warns: str = ""
    decision: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}"


@frozen
class Refusal:
    """A stack whose last archive does not convert, or (`in_plan`) converts and is refused when the layers are merged."""

    kind: str
    name: str
    stack: tuple[bytes, ...]
    message: str
    umoci: Fails | NotAsked | Unpacks = Fails("")
    in_plan: bool = False
    decision: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}"


class Rows:
    """The rows of one kind. `rest` is what else `Case` and `Refusal` have."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.rows: list[Case | Refusal] = []

    def stack(self, name: str, stack: tuple[bytes, ...], **rest: Any) -> None:
        self.rows.append(Case(self.kind, name, stack, **rest))

    def case(self, name: str, *parts: bytes, **rest: Any) -> None:
        """One archive."""
        self.stack(name, (archive(*parts),), **rest)

    def over(self, below: bytes, name: str, *parts: bytes, **rest: Any) -> None:
        """An archive over another."""
        self.stack(name, (below, archive(*parts)), **rest)

    def refused_stack(self, name: str, stack: tuple[bytes, ...], message: str, **rest: Any) -> None:
        self.rows.append(Refusal(self.kind, name, stack, message, **rest))

    def refusal(self, name: str, message: str, *parts: bytes, **rest: Any) -> None:
        self.refused_stack(name, (archive(*parts),), message, **rest)

    def refusal_over(self, below: bytes, name: str, message: str, *parts: bytes, **rest: Any) -> None:
        self.refused_stack(name, (below, archive(*parts)), message, **rest)


LOWER_LINK = NotAsked("a hard link into another layer cannot be extracted by itself")
_OUTSIDE = NotAsked("it deletes the directory that the root is in, and then fails")
_UNKNOWN_TYPE = Fails("unknown typeflag")

_CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")
_SEGMENTS = [(4096, 512), (20_480, 1024), (40_960, 512)]
_SPARSE_SIZE = 45_056
_SPARSE_DATA = b"A" * 512 + b"B" * 1024 + b"C" * 512
_SPARSE_CONTENT = (
    bytes(4096) + b"A" * 512 + bytes(20_480 - 4608) + b"B" * 1024 + bytes(40_960 - 21_504) + b"C" * 512 + bytes(_SPARSE_SIZE - 41_472)
)
_MANY = [(index * 8192, 512) for index in range(60)]
_MANY_DATA = b"".join(b"%03d." % index * 128 for index in range(60))
_LONG = b"/".join([b"d" * 90] * 4) + b"/name"
_DEEP = b"/".join([b"e" * 254] * 14)


def _extended_headers(add: Rows) -> None:
    add.case("path", pax((b"path", _LONG)) + file(b"short"), shows={_LONG: {"content": b"data"}, b"short": None})
    add.case("path that is not UTF-8", pax((b"hdrcharset", b"BINARY"), (b"path", b"\xff\xfe")) + file(b"x"), shows={b"\xff\xfe": {}})
    add.case("path with a newline", pax((b"path", b"a\nb=c\n")) + file(b"x"), shows={b"a\nb=c\n": {}})
    add.case(
        "path that ends in a slash",
        pax((b"path", b"d/")) + file(b"x", b""),
        shows={b"d": {"mode": 0o40644}},
        umoci=differs((b"d", "")),
        decision="0007: 5",
    )
    add.case("linkpath of a symlink", pax((b"linkpath", b"t" * 300)) + symlink(b"s", b"short"), shows={b"s": {"target": b"t" * 300}})
    add.case(
        "linkpath and path of a hard link",
        pax((b"path", _LONG)) + file(b"x"),
        pax((b"path", b"l" * 200), (b"linkpath", _LONG)) + link(b"x", b"y"),
        shows={b"l" * 200: {"nlink": 2}},
    )
    add.case("linkpath of a regular file", pax((b"linkpath", b"ignored")) + file(b"f"), shows={b"f": {"content": b"data", "nlink": 1}})
    add.case("size", pax((b"size", b"4")) + header(b"f", size=0) + padded(b"data"), shows={b"f": {"content": b"data"}})
    add.case("size of a directory", pax((b"size", b"4")) + directory(b"d") + file(b"f"), shows={b"f": {"content": b"data"}})
    add.case("size of a hard link", file(b"f"), pax((b"size", b"4")) + link(b"l", b"f") + file(b"g"), shows={b"l": {"nlink": 2}})
    add.case(
        "ids above 2^21", pax((b"uid", b"2097157"), (b"gid", b"4000000000")) + file(b"f"), shows={b"f": {"uid": 2097157, "gid": 4 * 10**9}}
    )
    add.case(
        "time with nanoseconds", pax((b"mtime", b"1600000000.123456789")) + file(b"f"), shows={b"f": {"mtime_ns": 1600000000123456789}}
    )
    add.case("time of a few digits", pax((b"mtime", b"1600000000.5")) + file(b"f"), shows={b"f": {"mtime_ns": 1600000000500000000}})
    add.case("time with more than nanoseconds", pax((b"mtime", b"16.1234567899")) + file(b"f"), shows={b"f": {"mtime_ns": 16123456789}})
    add.case("time before the epoch", pax((b"mtime", b"-315619200.25")) + file(b"f"), shows={b"f": {"mtime_ns": -315619200250000000}})
    add.case("time of a directory", pax((b"mtime", b"7.000000001")) + directory(b"d"), file(b"d/f"), shows={b"d": {"mtime_ns": 7000000001}})
    add.case("time of a symlink", pax((b"mtime", b"7.25")) + symlink(b"s", b"t"), shows={b"s": {"mtime_ns": 7250000000}})
    add.case(
        "time that ext4 does not hold",
        pax((b"mtime", b"99999999999")) + file(b"f"),
        shows={b"f": {"mtime_ns": 99999999999 * 10**9}},
        umoci=differs((b"f", "mtime_ns")),
        kernel=differs((b"f", "mtime_ns")),
        decision="0007: 14",
    )
    add.case(
        "keys that nobody knows",
        pax((b"comment", b"x"), (b"VENDOR.key", b"\0\n"), (b"atime", b"1"), (b"ctime", b"2"), (b"charset", b"ISO-IR 10646 2000 UTF-8"))
        + file(b"f"),
    )
    add.case("names of owners", pax((b"uname", b"nobody"), (b"gname", b"nogroup")) + file(b"f"), shows={b"f": {"uid": 0, "gid": 0}})
    add.case("the header ends with its entry", pax((b"uid", b"7")) + file(b"f") + file(b"g"), shows={b"f": {"uid": 7}, b"g": {"uid": 0}})
    add.case(
        "an empty value",
        pax((b"uid", b"7"), (b"uid", b"")) + file(b"f", uid=b"0000005\0"),
        shows={b"f": {"uid": 5}},
        kernel=Fails("Malformed extended header"),
        decision="0007: 2",
    )
    add.case("two of a key", pax((b"uid", b"7"), (b"uid", b"8")) + file(b"f"), shows={b"f": {"uid": 8}})
    add.case("two headers", pax((b"uid", b"7"), (b"gid", b"7")) + pax((b"uid", b"8")) + file(b"f"), shows={b"f": {"uid": 8, "gid": 0}})
    add.case(
        "three headers",
        pax((b"path", b"a")) + pax((b"path", b"b")) + pax((b"mtime", b"1")) + file(b"f"),
        shows={b"f": {"mtime_ns": 10**9}, b"b": None},
    )
    add.case(
        "of Solaris (X)", pax((b"uid", b"7"), kind=b"X") + file(b"f"), shows={b"f": {"uid": 7}}, umoci=_UNKNOWN_TYPE, decision="0007: 4"
    )
    add.case("empty", header(b"pax", b"x") + file(b"f"), shows={b"f": {}})
    add.case("before a GNU long name", pax((b"uid", b"7")) + long_name(b"long\0") + file(b"f"), shows={b"long": {"uid": 7}})
    add.refusal("a NUL in a path", "NUL", pax((b"path", b"a\0b")) + file(b"f"))
    add.refusal("a NUL in a link's target", "NUL", pax((b"linkpath", b"a\0b")) + symlink(b"f", b"t"))
    add.refusal("a negative id", "user id -1", pax((b"uid", b"-1")) + file(b"f"), umoci=UNPACKS, decision="0007: R")
    add.refusal("an id of 2^32", "group id 4294967296", pax((b"gid", b"4294967296")) + file(b"f"), umoci=UNPACKS, decision="0007: R")
    add.refusal("a time in words", "a PAX header", pax((b"mtime", b"1e5")) + file(b"f"))
    add.refusal("a size with a sign", "a PAX header", pax((b"size", b"+4")) + file(b"f"), umoci=UNPACKS, decision="0007: R")
    add.refusal("a size with spaces", "a PAX header", pax((b"size", b" 4")) + file(b"f"))
    add.refusal("a negative size", "a size of -4 bytes", pax((b"size", b"-4")) + file(b"f"))
    add.refusal("a record that is too long", "does not end where", header(b"pax", b"x", size=9) + padded(b"99 a=bcd\n") + file(b"f"))
    add.refusal("a record without its newline", "does not end where", header(b"pax", b"x", size=6) + padded(b"6 a=bc") + file(b"f"))
    add.refusal("a record without =", "no key and value", header(b"pax", b"x", size=6) + padded(b"6 abc\n") + file(b"f"))
    add.refusal("a record without length", "no record's length", header(b"pax", b"x", size=4) + padded(b"a=b\n") + file(b"f"))
    add.refusal("no entry after it", "truncated", file(b"f") + pax((b"uid", b"7")), umoci=UNPACKS, decision="0007: R")
    add.refusal("a header that ends early", "truncated", header(b"pax", b"x", size=99_999) + padded(b"6 a=b\n"))
    add.refusal(
        "17 MiB of header", "at most 16777216", header(b"pax", b"x", size=17 << 20) + padded(records((b"comment", bytes(17 << 20))))
    )


def _global_headers(add: Rows) -> None:
    of_all = "0007: 1"
    add.case("of git archive", global_pax((b"comment", b"0" * 40)), file(b"f"), shows={b"f": {}}, umoci=_UNKNOWN_TYPE, decision=of_all)
    add.case(
        "ids of all that follow",
        file(b"e") + global_pax((b"uid", b"7"), (b"gid", b"8")) + file(b"f") + file(b"g"),
        shows={b"e": {"uid": 0}, b"f": {"uid": 7, "gid": 8}, b"g": {"uid": 7}},
        umoci=_UNKNOWN_TYPE,
        decision=of_all,
    )
    add.case(
        "a time that an entry overrides",
        global_pax((b"mtime", b"1.5")) + pax((b"mtime", b"2.5")) + file(b"f") + file(b"g"),
        shows={b"f": {"mtime_ns": 2_500_000_000}, b"g": {"mtime_ns": 1_500_000_000}},
        umoci=_UNKNOWN_TYPE,
        decision=of_all,
    )
    add.case(
        "an entry's empty value takes it back",
        global_pax((b"uid", b"7")) + pax((b"uid", b"")) + file(b"f", uid=b"0000005\0") + file(b"g"),
        shows={b"f": {"uid": 5}, b"g": {"uid": 7}},
        umoci=_UNKNOWN_TYPE,
        kernel=Fails("Malformed extended header"),
        decision="0007: 2",
    )
    add.case(
        "replaced by the next",
        global_pax((b"uid", b"7")) + global_pax((b"uid", b"8")) + file(b"f"),
        shows={b"f": {"uid": 8}},
        umoci=_UNKNOWN_TYPE,
        decision=of_all,
    )
    add.case(
        "an attribute of all",
        global_pax((b"SCHILY.xattr.user.all", b"v")) + file(b"f") + directory(b"d"),
        shows={b"f": {"xattrs": ((b"user.all", b"v"),)}, b"d": {"xattrs": ((b"user.all", b"v"),)}},
        umoci=_UNKNOWN_TYPE,
        kernel=differs((b"f", "xattrs"), (b"d", "xattrs")),
        decision=of_all,
    )
    add.case(
        "with nothing after it", file(b"f") + global_pax((b"uid", b"7")), shows={b"f": {"uid": 0}}, umoci=_UNKNOWN_TYPE, decision=of_all
    )
    add.refusal("a broken record", "a PAX header", global_pax((b"uid", b"x")) + file(b"f"))


def _sparse(add: Rows) -> None:
    shown: dict[bytes, dict[str, object] | None] = {b"f": {"content": _SPARSE_CONTENT}, b"after": {"content": b"data"}}
    forms = {"old": old_sparse, "PAX 0.0": sparse_0_0, "PAX 0.1": sparse_0_1, "PAX 1.0": sparse_1_0}
    for form, make in forms.items():
        known: dict[str, object] = {"umoci": _UNKNOWN_TYPE, "decision": "0007: 4"} if form == "old" else {}
        ends = [*_SEGMENTS, (_SPARSE_SIZE, 0)]  # GNU tar marks a hole at the end so
        add.case(f"{form}: three segments", make(b"f", _SPARSE_SIZE, ends, _SPARSE_DATA), file(b"after"), shows=shown, **known)
        add.case(
            f"{form}: sixty segments",
            make(b"f", 60 * 8192, [*_MANY, (60 * 8192, 0)], _MANY_DATA),
            file(b"after"),
            shows={b"f": {"size": 60 * 8192}},
            **known,
        )
        add.case(
            f"{form}: one hole",
            make(b"f", 100_000, [(100_000, 0)], b""),
            file(b"after"),
            shows={b"f": {"content": bytes(100_000)}},
            **known,
        )
        add.case(f"{form}: no hole", make(b"f", 4, [(0, 4)], b"data"), file(b"after"), shows={b"f": {"content": b"data"}}, **known)
        add.case(
            f"{form}: a hole first",
            make(b"f", 8192, [(4096, 4096)], b"x" * 4096),
            file(b"after"),
            shows={b"f": {"content": bytes(4096) + b"x" * 4096}},
            **known,
        )
        add.case(
            f"{form}: a hard link to it",
            make(b"f", _SPARSE_SIZE, ends, _SPARSE_DATA),
            link(b"l", b"f"),
            shows={b"l": {"content": _SPARSE_CONTENT}},
            **known,
        )
        add.refusal(f"{form}: segments out of order", "out of order", make(b"f", 8192, [(4096, 2), (0, 2)], b"data"))
        add.refusal(f"{form}: segments that overlap", "out of order", make(b"f", 8192, [(0, 3), (2, 1)], b"data"))
        add.refusal(f"{form}: a segment beyond the end", "out of order", make(b"f", 8192, [(8190, 4)], b"data"))
        add.refusal(f"{form}: less data than segments", "add up", make(b"f", 8192, [(0, 512)], b"data"))
    add.case(
        "old: a real size in base-256",
        old_sparse(b"f", _SPARSE_SIZE, [*_SEGMENTS, (_SPARSE_SIZE, 0)], _SPARSE_DATA, size_field=base256(_SPARSE_SIZE, 12)),
        shows={b"f": {"content": _SPARSE_CONTENT}},
        umoci=_UNKNOWN_TYPE,
        decision="0007: 4",
    )
    add.case(
        "old: a hole at the end that no segment marks",
        old_sparse(b"f", _SPARSE_SIZE, _SEGMENTS, _SPARSE_DATA),
        shows={b"f": {"content": _SPARSE_CONTENT}},
        umoci=_UNKNOWN_TYPE,
        kernel=differs((b"f", "size"), (b"f", "content")),
        decision="0007: 12",
    )
    add.stack(
        "replaced by an upper layer, and linked to",
        (
            archive(sparse_1_0(b"f", _SPARSE_SIZE, _SEGMENTS, _SPARSE_DATA), file(b"g")),
            archive(file(b"f"), sparse_0_1(b"g", 8192, [(4096, 4096)], b"x" * 4096)),
        ),
        shows={b"f": {"content": b"data"}, b"g": {"content": bytes(4096) + b"x" * 4096}},
    )
    add.refusal("PAX 0.1: no size", "real size", pax((b"GNU.sparse.map", b"0,4")) + file(b"f"))
    add.refusal("PAX 0.1: an odd map", "no length", pax((b"GNU.sparse.size", b"9"), (b"GNU.sparse.map", b"0,4,5")) + file(b"f"))
    add.refusal(
        "PAX 0.0: a length first", "without its offset", pax((b"GNU.sparse.size", b"9"), (b"GNU.sparse.numbytes", b"4")) + file(b"f")
    )
    add.refusal(
        "PAX 1.0: a count in words",
        "decimal number",
        pax((b"GNU.sparse.realsize", b"9"), (b"GNU.sparse.major", b"1")) + file(b"f", padded(b"two\n")),
        umoci=UNPACKS,
        decision="0007: R",
    )
    add.refusal(
        "PAX 1.0: a count beyond the data",
        "does not end",
        pax((b"GNU.sparse.realsize", b"9"), (b"GNU.sparse.major", b"1")) + file(b"f", padded(b"9999999999\n")),
        umoci=UNPACKS,
        decision="0007: R",
    )
    add.refusal("a size of 2^63", "9223372036854775808", sparse_0_1(b"f", 1 << 63, [(1 << 63, 0)], b""))


def _numbers(add: Rows) -> None:
    add.case("size in base-256", header(b"f", size=base256(4, 12), magic=GNU) + padded(b"data"), shows={b"f": {"content": b"data"}})
    add.case(
        "ids in base-256",
        file(b"f", uid=base256(1 << 31, 8), gid=base256(70_000, 8), magic=GNU),
        shows={b"f": {"uid": 1 << 31, "gid": 70_000}},
    )
    add.case("time in base-256, negative", file(b"f", mtime=base256(-86_400, 12), magic=GNU), shows={b"f": {"mtime_ns": -86_400 * 10**9}})
    add.case(
        "time in base-256, after 2106", file(b"f", mtime=base256(1 << 33, 12), magic=GNU), shows={b"f": {"mtime_ns": (1 << 33) * 10**9}}
    )
    add.case("size of twelve digits", header(b"f", size=b"%012o" % 4) + padded(b"data"), shows={b"f": {"content": b"data"}})
    add.case(
        "padded with spaces",
        file(b"f", mode=b"   644 \0", uid=b"     7 \0", gid=b" 10    \0"),
        shows={b"f": {"mode": 0o100644, "uid": 7, "gid": 8}},
    )
    add.case("ended by a space", file(b"f", mode=b"000644 \0", uid=b"0000007 "), shows={b"f": {"mode": 0o100644, "uid": 7}})
    add.case(
        "empty ids",
        file(b"f", uid=bytes(8), gid=b" " * 8),
        shows={b"f": {"uid": 0, "gid": 0}},
        kernel=Fails("Blanks in header"),
        decision="0007: 15",
    )
    add.case("empty time", file(b"f", mtime=bytes(12)), shows={b"f": {"mtime_ns": 0}})
    add.case(
        "file type in the mode",
        file(b"f", mode=b"0100640\0"),
        directory(b"d", mode=b"0040750\0"),
        shows={b"f": {"mode": 0o100640}, b"d": {"mode": 0o40750}},
    )
    add.case("empty device numbers", header(b"b", b"4", device=bytes(16)), shows={b"b": {"rdev": 0}})
    add.case("the largest device", device(b"c", b"3", 4095, (1 << 20) - 1), shows={b"c": {}})
    add.case("size of a device", device(b"c", b"3", 1, 3, size=b"00000001000\0") + file(b"f"), shows={b"f": {"content": b"data"}})
    add.case("size of a fifo", header(b"p", b"6", size=512) + file(b"f"), shows={b"f": {"content": b"data"}})
    add.case("size of a directory", header(b"d", b"5", size=512) + file(b"f"), shows={b"f": {"content": b"data"}})
    add.case("size of a symlink", symlink(b"s", b"t", size=b"00000001000\0") + file(b"f"), shows={b"f": {"content": b"data"}})
    add.case(
        "size of a hard link",
        file(b"f") + link(b"l", b"f", size=b"00000001000\0") + file(b"g"),
        shows={b"g": {"content": b"data"}, b"l": {"nlink": 2}},
    )
    unsigned = file(b"\xff\xfe")
    signed = sum(byte - 256 if byte > 127 else byte for byte in unsigned[:148] + b" " * 8 + unsigned[156:512])
    add.case("a checksum of signed bytes", unsigned[:148] + b"%06o\0 " % signed + unsigned[156:], shows={b"\xff\xfe": {}})
    add.case("a checksum with leading spaces", _with_checksum(file(b"f"), b"%7o\0"), shows={b"f": {}})
    add.case("a checksum of seven digits", _with_checksum(file(b"f"), b"%07o "), shows={b"f": {}})
    add.refusal("a wrong checksum", "checksum", file(b"e") + _with_checksum(file(b"f"), b"%06o\0 ", 1))
    add.refusal("an id in letters", "octal uid", file(b"f", uid=b"root\0\0\0\0"))
    add.refusal("an octal 8", "octal gid", file(b"f", gid=b"0000008\0"))
    add.refusal("an id in base-256, negative", "user id -2", file(b"f", uid=base256(-2, 8), magic=GNU), umoci=UNPACKS, decision="0007: R")
    add.refusal("size in base-256, negative", "a size of -1 bytes", header(b"f", size=base256(-1, 12), magic=GNU))
    add.refusal("size in base-256, 2^70", "bytes", header(b"f", size=base256(1 << 70, 12), magic=GNU))
    add.refusal("time in base-256, 2^70", "64-bit seconds", file(b"f", mtime=base256(1 << 70, 12), magic=GNU))
    add.refusal("data of a directory", "checksum", header(b"d", b"5", size=4) + padded(b"data") + file(b"f"))
    add.refusal("data of a hard link", "checksum", file(b"f") + link(b"l", b"f", size=b"00000000004\0") + padded(b"data") + file(b"g"))
    add.refusal("data of a symlink", "checksum", symlink(b"s", b"f", size=b"00000000004\0") + padded(b"data") + file(b"g"))
    add.refusal("a character device 0:0", "0:0", device(b"c", b"3", 0, 0), umoci=UNPACKS, decision="0007: R")
    add.refusal("a device beyond Linux", "4096:0", device(b"b", b"4", 4096, 0), umoci=UNPACKS, decision="0007: R")


def _with_checksum(block: bytes, form: bytes, add: int = 0) -> bytes:
    return block[:148] + form % (sum(block[:148]) + sum(block[156:512]) + 256 + add) + block[156:]


def _dialects(add: Rows) -> None:
    def prefixed(prefix: bytes) -> bytes:
        return prefix.ljust(155, b"\0") + bytes(12)

    star = b"p" * 100 + bytes(31) + b"%011o " % 1 + b"%011o " % 2 + bytes(8) + b"tar\0"
    gnu_times = b"%011o\0" % 1_500_000_000 + b"%011o\0" % 1_500_000_000 + bytes(143)
    add.case("v7", file(b"f", kind=b"\0", magic=V7), directory(b"d/", magic=V7), shows={b"f": {}, b"d": {}})
    add.case("v7: a directory by its slash", file(b"d/", b"", b"\0", magic=V7), shows={b"d": {"mode": 0o40644}})
    add.case(
        "v7: a symlink and a hard link",
        file(b"f", kind=b"\0", magic=V7),
        link(b"l", b"f", magic=V7),
        symlink(b"s", b"f", magic=V7),
        shows={b"l": {"nlink": 2}},
    )
    add.case("v7: no prefix", file(b"f", magic=V7, rest=prefixed(b"ignored")), shows={b"f": {}, b"ignored": None})
    add.case("a file of type NUL", file(b"f", kind=b"\0"), shows={b"f": {"content": b"data"}})
    add.case(
        "a directory by its slash, type 0",
        file(b"d/", b""),
        file(b"d/f"),
        shows={b"d": {"mode": 0o40644}},
        umoci=Fails("not a directory"),
        decision="0007: 5",
    )
    add.case("ustar: a prefix", directory(b"p"), file(b"f", rest=prefixed(b"p")), shows={b"p/f": {}})
    add.case("ustar: the longest name", file(b"n" * 100, rest=prefixed(b"q" * 155)), shows={b"q" * 155 + b"/" + b"n" * 100: {}})
    add.case("ustar: a prefix with a slash", directory(b"p/q"), file(b"f", rest=prefixed(b"p/q/")), shows={b"p/q/f": {}})
    add.case("star: a prefix with times behind it", file(b"f", rest=star), shows={b"p" * 100 + b"/f": {}})
    add.case("GNU: times where a prefix would be", file(b"f", magic=GNU, rest=gnu_times), shows={b"f": {}})
    add.case("GNU: a long name", long_name(_LONG + b"\0") + file(b"cut off", magic=GNU), shows={_LONG: {}})
    add.case("GNU: a long name without NUL", long_name(_LONG) + file(b"cut off", magic=GNU), shows={_LONG: {}})
    add.case(
        "GNU: a long link", long_name(b"t" * 200 + b"\0", b"K") + symlink(b"s", b"cut off", magic=GNU), shows={b"s": {"target": b"t" * 200}}
    )
    add.case(
        "GNU: a long link and a long name",
        long_name(_LONG + b"\0") + file(b"cut off", magic=GNU),
        long_name(_LONG + b"\0", b"K") + long_name(b"l" * 150 + b"\0") + link(b"cut off", b"cut off", magic=GNU),
        shows={b"l" * 150: {"nlink": 2}},
    )
    add.case("GNU: a long name of a directory", long_name(_LONG + b"/\0") + directory(b"cut off", magic=GNU), shows={_LONG: {}})
    add.case(
        "GNU: two long names", long_name(b"first\0") + long_name(b"second\0") + file(b"f", magic=GNU), shows={b"second": {}, b"first": None}
    )
    add.case(
        "GNU: a long name ends with its entry",
        long_name(b"long\0") + file(b"a", magic=GNU) + file(b"b", magic=GNU),
        shows={b"long": {}, b"b": {}},
    )
    add.case(
        "GNU: a volume's label",
        header(b"label", b"V", magic=GNU) + file(b"f"),
        shows={b"f": {}, b"label": None},
        umoci=_UNKNOWN_TYPE,
        decision="0007: 4",
    )
    add.case("a contiguous file (7)", file(b"f", kind=b"7"), shows={b"f": {"content": b"data"}}, umoci=_UNKNOWN_TYPE, decision="0007: 4")
    add.case("an entry of every kind", *_every_kind(), shows={b"e": {"mode": 0o100644}})
    add.refusal("GNU: a long name of more than 64 KiB", "more than 4,095", long_name(b"x/" * 40_000) + file(b"f", magic=GNU))
    add.refusal("GNU: a long link of more than 64 KiB", "target of 80000", long_name(b"x/" * 40_000, b"K") + symlink(b"f", b"", magic=GNU))
    add.refusal("GNU: a long name without an entry", "truncated", file(b"f") + long_name(b"long\0"), umoci=UNPACKS, decision="0007: R")
    for flag, what in (
        (b"N", "old names"),
        (b"M", "a file that another volume began"),
        (b"D", "a dumped directory"),
        (b"A", "Solaris' ACL"),
        (b"Z", "nobody's"),
    ):
        add.refusal(f"type {flag.decode()}: {what}", f"type '{flag.decode()}'", header(b"e", flag, magic=GNU) + file(b"f"))


def _every_kind() -> list[bytes]:
    return [
        directory(b"d"),
        file(b"d/e"),
        file(b"e"),
        symlink(b"s", b"d"),
        link(b"h", b"e"),
        fifo(b"p"),
        device(b"c", b"3", 1, 3),
        device(b"b", b"4", 8, 1),
    ]


def _names(add: Rows) -> None:
    def long(path: bytes) -> bytes:
        return pax((b"path", path)) + file(b"short")

    add.case("./ before it", directory(b"./"), directory(b"./d"), file(b"./d/f"), shows={b"d/f": {}})
    add.case("/ before it", directory(b"/"), directory(b"/d"), file(b"/d/f"), shows={b"d/f": {}})
    add.case("doubled slashes", directory(b"d//"), file(b"d//f"), file(b"//e"), shows={b"d/f": {}, b"e": {}})
    add.case("dots inside", directory(b"d"), file(b"d/./f"), file(b"././e"), shows={b"d/f": {}, b"e": {}})
    add.case("a slash behind a directory", directory(b"d/"), directory(b"d/e//"), shows={b"d/e": {}})
    add.case("a slash behind a symlink", file(b"f"), symlink(b"s/", b"f"), shows={b"s": {"target": b"f"}})
    add.case("a slash behind a hard link", file(b"f"), link(b"l/", b"f"), shows={b"l": {"nlink": 2}})
    add.case("a slash behind a fifo", fifo(b"p/"), shows={b"p": {"mode": 0o10644}})
    add.case(
        "a slash behind a hard link's target",
        file(b"f"),
        link(b"l", b"f/"),
        shows={b"l": {"nlink": 2}},
        kernel=Fails("Not a directory"),
        decision="0007: 16",
    )
    for root in (b".", b"./", b"/"):
        add.case(
            f"the root as {root.decode()}",
            directory(root, mode=b"0000711\0", uid=b"0000005\0"),
            file(b"f"),
            shows={b"": {"mode": 0o40711, "uid": 5}},
        )
    add.case(
        "the root twice, the second time last",
        directory(b"./"),
        file(b"f"),
        directory(b"/", mode=b"0001777\0"),
        shows={b"": {"mode": 0o41777}},
    )
    add.case("255 bytes", long(b"n" * 255), shows={b"n" * 255: {}})
    add.case("a path of 3,569 bytes", long(_DEEP), shows={_DEEP: {}})
    add.case("1,100 levels", long(b"/".join([b"s"] * 1100)), shows={b"/".join([b"s"] * 1100): {}})
    add.case("not UTF-8", file(b"\xff\x80\xfe"), directory(b"\xc3"), file(b"\xc3/\xa9"), shows={b"\xc3/\xa9": {}})
    add.case("two that Unicode calls one", file("é".encode()), file("e\u0301".encode()), shows={"é".encode(): {}, "e\u0301".encode(): {}})
    add.case("two that differ by case", file(b"README"), file(b"readme", b"other"), shows={b"README": {"content": b"data"}})
    add.case("control bytes", file(b"a\tb\nc\rd\x01\x7f"), shows={b"a\tb\nc\rd\x01\x7f": {}})
    add.case("dots that are names", file(b"..."), file(b"..a"), file(b".a."), shows={b"...": {}, b"..a": {}})
    add.case(
        "what shells and tools read otherwise",
        file(b"-rf"),
        file(b"*"),
        file(b"a\\b"),
        file(b"C:d"),
        file(b"$HOME"),
        file(b" "),
        shows={b"a\\b": {}, b" ": {}},
    )
    add.case(
        "what looks like a whiteout", file(b"wh.a"), file(b".whb"), file(b"c.wh.d"), file(b".WH.e"), shows={b".whb": {}, b"c.wh.d": {}}
    )
    add.refusal("256 bytes", "a name has 256 bytes", long(b"n" * 256))
    add.refusal("256 bytes of a directory above", "a name has 256 bytes", long(b"n" * 256 + b"/f"))
    add.refusal("a path of 4,096 bytes", "more than 4,095 bytes", long(b"/".join([b"e" * 255] * 16) + b"f"))
    add.refusal("a path of a megabyte", "more than 4,095 bytes", long(b"e/" * 500_000))
    add.refusal("no name", "root of a layer", file(b""))
    add.refusal("a regular file as the root", "root of a layer", file(b"."))
    add.refusal("a symlink as the root", "root of a layer", symlink(b"./", b"etc"))
    add.refusal("a hard link as the root", "root of a layer", file(b"f"), link(b"/", b"f"))
    add.refusal(".. first", r"\.\.", file(b"../f"), umoci=UNPACKS, decision="0007: R")
    add.refusal(".. inside", r"\.\.", directory(b"d"), file(b"d/../f"), umoci=UNPACKS, decision="0007: R")
    add.refusal(".. last", r"\.\.", directory(b"d/.."), umoci=UNPACKS, decision="0007: R")
    add.refusal(".. from the root", r"\.\.", file(b"/../../etc/passwd"), umoci=UNPACKS, decision="0007: R")


def _parents(add: Rows) -> None:
    delayed: dict[str, object] = {"kernel": Fails("Cannot open"), "decision": "0007: 8"}
    add.case("none", file(b"a/b/c"), shows={b"a": {"mode": 0o40755, "mtime_ns": 0}, b"a/b/c": {}})
    add.case(
        "its entry later",
        file(b"d/f"),
        directory(b"d", mode=b"0000700\0"),
        shows={b"d": {"mode": 0o40700, "mtime_ns": TIME_S * 10**9}, b"d/f": {}},
    )
    add.case(
        "its entry before and after",
        directory(b"d"),
        file(b"d/f"),
        directory(b"d", mode=b"0000500\0"),
        shows={b"d": {"mode": 0o40500}, b"d/f": {}},
    )
    add.case("without permissions", directory(b"d", mode=b"0000000\0"), file(b"d/f"), shows={b"d": {"mode": 0o40000}, b"d/f": {}})
    add.case(
        "a symlink of the archive",
        directory(b"usr/lib"),
        symlink(b"lib", b"usr/lib"),
        file(b"lib/f"),
        shows={b"usr/lib/f": {}, b"lib": {"target": b"usr/lib"}},
    )
    add.case("a chain of symlinks", directory(b"d"), symlink(b"a", b"b"), symlink(b"b", b"./d/"), file(b"a/f"), shows={b"d/f": {}})
    add.case("an absolute symlink", directory(b"usr"), symlink(b"u", b"/usr"), file(b"u/f"), shows={b"usr/f": {}}, **delayed)
    add.case("a symlink upwards", directory(b"a"), directory(b"b"), symlink(b"a/s", b"../b"), file(b"a/s/f"), shows={b"b/f": {}}, **delayed)
    add.case("a symlink above the root", directory(b"etc"), symlink(b"s", b"../../../etc"), file(b"s/f"), shows={b"etc/f": {}}, **delayed)
    add.case("a symlink to nothing yet", symlink(b"s", b"made"), file(b"s/f"), shows={b"made/f": {}}, **delayed)
    add.case("a symlink to the root", symlink(b"s", b"."), file(b"s/f"), shows={b"f": {}})
    add.case(
        "a file after what it holds",
        file(b"d/f"),
        file(b"d"),
        shows={b"d": {"mode": 0o100644}, b"d/f": None},
        kernel=Fails("File exists"),
        decision="0007: 9",
    )
    add.refusal("a file", "not a directory in this layer", file(b"d"), file(b"d/f"))
    add.refusal("a fifo", "not a directory in this layer", fifo(b"d"), file(b"d/f"))
    add.refusal("a symlink to a file", "not a directory in this layer", file(b"g"), symlink(b"d", b"g"), file(b"d/f"))
    add.refusal("a symlink to itself", "loop", symlink(b"s", b"s"), file(b"s/f"))
    add.refusal("two symlinks in a circle", "loop", symlink(b"a", b"b"), symlink(b"b", b"a"), file(b"a/f"))
    add.stack(
        "a symlink of a lower layer",
        (archive(directory(b"usr/lib"), file(b"usr/lib/a"), symlink(b"lib", b"usr/lib")), archive(file(b"lib/b"))),
        shows={b"usr/lib/b": {}, b"lib": {"target": b"usr/lib"}},
        kernel=differs((b"lib", ""), (b"lib/b", ""), (b"usr/lib/b", "")),
        decision="0002: 3",
    )
    add.stack(
        "an absolute symlink of a lower layer",
        (archive(directory(b"etc"), symlink(b"s", b"/etc")), archive(file(b"s/passwd"))),
        shows={b"etc/passwd": {}},
        kernel=differs((b"s", ""), (b"s/passwd", ""), (b"etc/passwd", "")),
        decision="0002: 3",
    )
    add.stack(
        "a directory over a symlink of a lower layer",
        (archive(directory(b"d"), symlink(b"s", b"d")), archive(directory(b"s"), file(b"s/f"))),
        shows={b"s": {"mode": 0o40755}, b"s/f": {}, b"d/f": None},
    )


def _duplicates(add: Rows) -> None:
    add.case("file, file", file(b"a", b"one", uid=b"0000007\0"), file(b"a", b"two"), shows={b"a": {"content": b"two", "uid": 0}})
    add.case("file, directory", file(b"a"), directory(b"a"), file(b"a/b"), shows={b"a": {"mode": 0o40755}, b"a/b": {}})
    add.case("directory, file", directory(b"a"), file(b"a"), shows={b"a": {"mode": 0o100644}})
    add.case(
        "full directory, file",
        directory(b"a"),
        file(b"a/b"),
        file(b"a"),
        shows={b"a": {"mode": 0o100644}, b"a/b": None},
        kernel=Fails("File exists"),
        decision="0007: 9",
    )
    add.case(
        "full directory, symlink",
        directory(b"a"),
        file(b"a/b"),
        symlink(b"a", b"t"),
        shows={b"a": {"target": b"t"}, b"a/b": None},
        kernel=Fails("File exists"),
        decision="0007: 9",
    )
    add.case(
        "directory, directory",
        directory(b"a", uid=b"0000007\0"),
        file(b"a/b"),
        directory(b"a", mode=b"0000700\0"),
        shows={b"a": {"mode": 0o40700, "uid": 0}, b"a/b": {}},
    )
    add.case("symlink, directory", directory(b"d"), symlink(b"s", b"d"), directory(b"s"), file(b"s/f"), shows={b"s/f": {}, b"d/f": None})
    add.case(
        "symlink, file",
        file(b"t", b"kept"),
        symlink(b"s", b"t"),
        file(b"s"),
        shows={b"s": {"content": b"data"}, b"t": {"content": b"kept"}},
    )
    add.case("dangling symlink, file", symlink(b"s", b"nowhere"), file(b"s"), shows={b"s": {"content": b"data"}, b"nowhere": None})
    add.case("symlink, symlink", symlink(b"s", b"one"), symlink(b"s", b"two"), shows={b"s": {"target": b"two"}})
    add.case("file, symlink", file(b"a"), symlink(b"a", b"t"), shows={b"a": {"target": b"t"}})
    add.case("fifo, file", fifo(b"a"), file(b"a"), shows={b"a": {"mode": 0o100644}})
    add.case("file, fifo", file(b"a"), fifo(b"a"), shows={b"a": {"mode": 0o10644}})
    add.case("file, device", file(b"a"), device(b"a", b"3", 1, 3), shows={b"a": {"mode": 0o20644}})
    add.case("directory, fifo", directory(b"a"), fifo(b"a"), shows={b"a": {"mode": 0o10644}})
    add.case("attributes do not stay", pax((b"SCHILY.xattr.user.a", b"v")) + file(b"a"), file(b"a"), shows={b"a": {"xattrs": ()}})
    add.case(
        "a directory's attributes do not stay",
        pax((b"SCHILY.xattr.user.a", b"v")) + directory(b"a"),
        directory(b"a"),
        shows={b"a": {"xattrs": ()}},
        kernel=differs((b"a", "xattrs")),
        decision="0007: 7",
    )
    add.case(
        "a link made before",
        file(b"a", b"one"),
        link(b"l", b"a"),
        file(b"a", b"two"),
        shows={b"l": {"content": b"one", "nlink": 1}, b"a": {"content": b"two"}},
    )
    add.case("a link made after", file(b"a", b"one"), file(b"a", b"two"), link(b"l", b"a"), shows={b"l": {"content": b"two", "nlink": 2}})
    add.case(
        "links before and after",
        file(b"a", b"one"),
        link(b"l", b"a"),
        file(b"a", b"two"),
        link(b"m", b"a"),
        shows={b"l": {"nlink": 1}, b"m": {"nlink": 2}},
    )
    add.case(
        "a link, then a file",
        file(b"a"),
        link(b"l", b"a"),
        file(b"l", b"own"),
        shows={b"a": {"content": b"data", "nlink": 1}, b"l": {"content": b"own"}},
    )
    add.case("a file, then a link", file(b"a"), file(b"l", b"own"), link(b"l", b"a"), shows={b"l": {"content": b"data", "nlink": 2}})
    add.case("a link, then a directory", file(b"a"), link(b"l", b"a"), directory(b"l"), shows={b"a": {"nlink": 1}, b"l": {"mode": 0o40755}})
    add.case("a link twice", file(b"a"), link(b"l", b"a"), link(b"l", b"a"), shows={b"l": {"nlink": 2}})
    add.case("an empty directory, then a link", file(b"a"), directory(b"l"), link(b"l", b"a"), shows={b"l": {"nlink": 2}})
    add.case("spelled in two ways", file(b"./a", b"one"), file(b"//a", b"two"), shows={b"a": {"content": b"two"}})
    add.case(
        "a link to itself",
        file(b"a"),
        link(b"a", b"a"),
        shows={b"a": {"content": b"data", "nlink": 1}},
        umoci=Fails("no such file"),
        decision="0007: 10",
    )


def _hard_links(add: Rows) -> None:
    below = archive(
        directory(b"d"), file(b"d/f", b"below"), symlink(b"s", b"d/f"), fifo(b"p"), device(b"c", b"3", 1, 3), symlink(b"e", b"d")
    )
    add.case("to a file", file(b"a"), link(b"b", b"a"), shows={b"a": {"nlink": 2, "group": (b"a", b"b")}})
    add.case("a chain", file(b"a"), link(b"b", b"a"), link(b"c", b"b"), link(b"d", b"c"), shows={b"d": {"nlink": 4}})
    add.case("to a symlink", symlink(b"s", b"t"), link(b"l", b"s"), shows={b"l": {"target": b"t", "nlink": 2}})
    add.case(
        "to a symlink to a file",
        file(b"a"),
        symlink(b"s", b"a"),
        link(b"l", b"s"),
        shows={b"l": {"target": b"a", "nlink": 2}, b"a": {"nlink": 1}},
    )
    add.case("to a fifo", fifo(b"p"), link(b"l", b"p"), shows={b"l": {"mode": 0o10644, "nlink": 2}})
    add.case("to a device", device(b"c", b"3", 1, 3), link(b"l", b"c"), shows={b"l": {"mode": 0o20644, "nlink": 2}})
    add.case("to an empty file", file(b"a", b""), link(b"b", b"a"), shows={b"b": {"size": 0, "nlink": 2}})
    add.case(
        "its own mode, owner and time",
        file(b"a"),
        link(b"l", b"a", mode=b"0000777\0", uid=b"0000007\0", mtime=b"%011o\0" % 5),
        shows={b"a": {"nlink": 2}},
    )
    add.case("its own attributes", file(b"a"), pax((b"SCHILY.xattr.user.l", b"v")) + link(b"l", b"a"), shows={b"a": {"nlink": 2}})
    add.case("an absolute target", directory(b"d"), file(b"d/a"), link(b"b", b"/d/a"), shows={b"b": {"nlink": 2}})
    add.case("a target with ./ and //", directory(b"d"), file(b"d/a"), link(b"b", b"./d//a"), shows={b"b": {"nlink": 2}})
    add.case(
        "a target by way of a symlink", directory(b"d"), file(b"d/a"), symlink(b"s", b"d"), link(b"b", b"s/a"), shows={b"b": {"nlink": 2}}
    )
    add.case("between directories", directory(b"d"), directory(b"e"), file(b"d/a"), link(b"e/a", b"d/a"), shows={b"e/a": {"nlink": 2}})
    add.case("from a directory that is implied", file(b"a"), link(b"x/y/l", b"a"), shows={b"x/y/l": {"nlink": 2}})
    add.over(below, "into a lower layer", link(b"l", b"d/f"), kernel=LOWER_LINK, shows={b"l": {"nlink": 2, "content": b"below"}})
    add.over(below, "to a lower symlink", link(b"l", b"s"), kernel=LOWER_LINK, shows={b"l": {"target": b"d/f", "nlink": 2}})
    add.over(
        below,
        "to a lower file by way of a lower symlink",
        link(b"l", b"e/f"),
        kernel=LOWER_LINK,
        shows={b"l": {"nlink": 2, "content": b"below"}},
    )
    add.over(below, "to a lower fifo", link(b"l", b"p"), kernel=LOWER_LINK, shows={b"l": {"mode": 0o10644, "nlink": 2}})
    add.over(below, "to a lower device", link(b"l", b"c"), kernel=LOWER_LINK, shows={b"l": {"mode": 0o20644, "nlink": 2}})
    add.over(below, "a chain into a lower layer", link(b"l", b"d/f"), link(b"m", b"l"), kernel=LOWER_LINK, shows={b"m": {"nlink": 3}})
    add.over(
        below,
        "to a lower file that is replaced later",
        link(b"l", b"d/f"),
        file(b"d/f", b"new"),
        kernel=LOWER_LINK,
        shows={b"l": {"content": b"below", "nlink": 1}, b"d/f": {"content": b"new"}},
    )
    add.over(
        below,
        "to a lower file that is hidden later",
        link(b"l", b"d/f"),
        whiteout(b"d/f"),
        kernel=LOWER_LINK,
        shows={b"l": {"content": b"below", "nlink": 1}, b"d/f": None},
    )
    add.over(
        below,
        "to a lower file that was hidden before",
        whiteout(b"d/f"),
        link(b"l", b"d/f"),
        kernel=LOWER_LINK,
        shows={b"l": {"content": b"below", "nlink": 1}},
        umoci=Fails("no such file"),
        decision="0002: 11",
    )
    add.over(
        below,
        "to a file over a lower one",
        file(b"d/f", b"new"),
        link(b"l", b"d/f"),
        kernel=LOWER_LINK,
        shows={b"l": {"content": b"new", "nlink": 2}},
    )
    add.over(
        below,
        "into its own place",
        link(b"d/f", b"d/f"),
        kernel=LOWER_LINK,
        shows={b"d/f": {"content": b"below", "nlink": 1}},
        umoci=Fails("no such file"),
        decision="0007: 10",
    )
    add.over(
        below,
        "below a directory that another link replaces",
        link(b"l", b"d/f"),
        link(b"d", b"p"),
        kernel=LOWER_LINK,
        shows={b"l": {"content": b"below", "nlink": 1}, b"d": {"mode": 0o10644, "nlink": 2}},
    )
    add.over(
        below,
        "below a directory that it replaces",
        link(b"l", b"d/f"),
        link(b"d", b"d/f"),
        kernel=LOWER_LINK,
        shows={b"l": {"nlink": 2}, b"d": {"content": b"below", "group": (b"d", b"l")}},
        umoci=Fails("no such file"),
        decision="0007: 10",
    )
    add.over(
        below,
        "that an upper file replaces",
        link(b"l", b"d/f"),
        file(b"l", b"own"),
        kernel=LOWER_LINK,
        shows={b"l": {"content": b"own"}, b"d/f": {"nlink": 1}},
    )
    add.stack(
        "through three layers",
        (below, archive(link(b"l", b"d/f")), archive(link(b"m", b"l"))),
        shows={b"m": {"nlink": 3, "group": (b"d/f", b"l", b"m")}},
        kernel=LOWER_LINK,
    )
    add.refusal("to a directory", "hard link to the directory", directory(b"d"), link(b"l", b"d"))
    add.refusal("to the root", "hard link to the root", link(b"l", b"/"))
    add.refusal("to an empty target", "hard link to the root", file(b"f"), link(b"l", b""))
    add.refusal("to a target with ..", r"\.\.", file(b"a"), directory(b"d"), link(b"d/l", b"d/../a"), umoci=UNPACKS, decision="0007: R")
    add.refusal("to a whiteout", "which is a whiteout", file(b".wh.a", b""), link(b"l", b".wh.a"))
    add.refusal("to a name of 256 bytes", "256 bytes", pax((b"linkpath", b"n" * 256)) + link(b"l", b"x"))
    add.refusal("before its target", "hard link to 'a'", link(b"l", b"a"), file(b"a"), in_plan=True)
    add.refusal("to nothing", "hard link to 'never'", link(b"l", b"never"), in_plan=True)
    add.refused_stack("to a lower directory", (below, archive(link(b"l", b"d"))), "hard link to 'd'", in_plan=True)


def _whiteouts(add: Rows) -> None:
    below = archive(
        directory(b"d"), file(b"d/old"), directory(b"d/e"), file(b"d/e/old"), file(b"f"), symlink(b"s", b"d"), directory(b"empty")
    )

    add.over(below, "of a file", whiteout(b"f"), shows={b"f": None})
    add.over(below, "of a directory", whiteout(b"d"), shows={b"d": None, b"d/e/old": None})
    add.over(below, "of an empty directory", whiteout(b"empty"), shows={b"empty": None})
    add.over(below, "of a symlink", whiteout(b"s"), shows={b"s": None, b"d": {}})
    add.over(below, "in a directory with an entry", directory(b"d"), whiteout(b"d/old"), shows={b"d/old": None, b"d/e/old": {}})
    add.over(below, "in a directory without an entry", whiteout(b"d/e/old"), shows={b"d/e/old": None, b"d/e": {}})
    add.over(
        below, "before the directory's entry", whiteout(b"d/old"), directory(b"d"), file(b"d/new"), shows={b"d/old": None, b"d/new": {}}
    )
    add.over(
        below,
        "by way of a lower symlink",
        whiteout(b"s/old"),
        shows={b"d/old": None, b"s": {"target": b"d"}},
        kernel=differs((b"s", ""), (b"d/old", "")),
        decision="0002: 3",
    )
    add.over(below, "of nothing", whiteout(b"never"), shows={b"never": None})
    add.over(below, "of nothing, in a directory that is there", directory(b"d"), whiteout(b"d/never"), shows={b"d/never": None})
    add.over(below, "and a file of its name after it", whiteout(b"f"), file(b"f", b"new"), shows={b"f": {"content": b"new"}})
    add.over(below, "and a file of its name before it", file(b"f", b"new"), whiteout(b"f"), shows={b"f": {"content": b"new"}})
    add.over(
        below,
        "and a directory of its name after it",
        whiteout(b"d"),
        directory(b"d"),
        file(b"d/new"),
        shows={b"d/old": None, b"d/e": None, b"d/new": {}},
    )
    add.over(
        below,
        "and a directory of its name before it",
        directory(b"d"),
        file(b"d/new"),
        whiteout(b"d"),
        shows={b"d/old": None, b"d/new": {}},
    )
    add.over(
        below,
        "between the entries of its directory",
        directory(b"d"),
        file(b"d/a"),
        whiteout(b"d"),
        file(b"d/b"),
        shows={b"d/old": None, b"d/a": {}, b"d/b": {}},
    )
    add.over(
        below,
        "of a directory, and a file in its place",
        whiteout(b"d"),
        file(b"d", b"new"),
        shows={b"d": {"content": b"new"}, b"d/old": None},
    )
    add.over(below, "of a file, and a directory in its place", whiteout(b"f"), directory(b"f"), file(b"f/g"), shows={b"f/g": {}})
    add.over(
        below,
        "and a link to what it hides, made before",
        link(b"l", b"f"),
        whiteout(b"f"),
        shows={b"l": {"content": b"data"}, b"f": None},
        kernel=LOWER_LINK,
    )
    add.over(
        archive(file(b"a"), link(b"b", b"a")),
        "below a file of a lower layer",
        whiteout(b"a/x"),
        shows={b"a": {"mode": 0o40755}, b"b": {"nlink": 1}},
        umoci=differs((b"a", ""), (b"b", "nlink"), (b"b", "group")),
        kernel=differs((b"b", "nlink"), (b"b", "group")),
        decision="0002: 6",
    )
    add.over(below, "twice", whiteout(b"f"), whiteout(b"f"), shows={b"f": None})
    add.over(below, "with contents", file(b".wh.f", b"ignored"), shows={b"f": None})
    add.over(below, "that is a directory", directory(b".wh.f"), shows={b"f": None})
    add.over(below, "that is a symlink", symlink(b".wh.f", b"t"), shows={b"f": None})
    add.over(below, "with ./ before it", file(b"./.wh.f", b""), shows={b"f": None})
    add.over(below, "of a name that is not UTF-8", whiteout(b"\xff"), shows={b"\xff": None})
    add.over(below, "of its own layer's file only", file(b"own"), whiteout(b"own"), shows={b"own": {}})
    add.over(below, "of its own layer's directory only", directory(b"own"), whiteout(b"own"), file(b"own/f"), shows={b"own/f": {}})
    add.stack("in the lowest layer", (archive(whiteout(b"f"), file(b"g")),), shows={b"f": None, b"g": {}})
    add.stack(
        "and made again above",
        (below, archive(whiteout(b"d")), archive(directory(b"d"), file(b"d/new"))),
        shows={b"d/new": {}, b"d/old": None},
    )
    add.stack("of what a middle layer added", (below, archive(file(b"x")), archive(whiteout(b"x"))), shows={b"x": None})
    add.stack("of a name in two layers", (below, archive(file(b"f", b"two")), archive(whiteout(b"f"))), shows={b"f": None})
    add.over(below, "opaque, before the entries", directory(b"d"), opaque(b"d"), file(b"d/new"), shows={b"d/old": None, b"d/new": {}})
    add.over(below, "opaque, after the entries", directory(b"d"), file(b"d/new"), opaque(b"d"), shows={b"d/old": None, b"d/new": {}})
    add.over(
        below,
        "opaque, between the entries",
        directory(b"d"),
        file(b"d/a"),
        opaque(b"d"),
        file(b"d/b"),
        shows={b"d/old": None, b"d/a": {}, b"d/b": {}},
    )
    add.over(
        below,
        "opaque, before the directory's entry",
        opaque(b"d"),
        directory(b"d", mode=b"0000700\0"),
        file(b"d/new"),
        shows={b"d": {"mode": 0o40700}, b"d/old": None},
    )
    add.over(below, "opaque, without the directory's entry", opaque(b"d"), file(b"d/new"), shows={b"d/old": None, b"d/new": {}})
    add.over(
        below,
        "opaque, and the same file again",
        directory(b"d"),
        opaque(b"d"),
        file(b"d/old", b"new"),
        shows={b"d/old": {"content": b"new"}, b"d/e": None},
    )
    add.over(
        below,
        "opaque, inside an opaque directory",
        directory(b"d"),
        opaque(b"d"),
        directory(b"d/e"),
        opaque(b"d/e"),
        file(b"d/e/new"),
        shows={b"d/e/old": None, b"d/e/new": {}, b"d/old": None},
    )
    add.over(below, "opaque, below a directory that is not", directory(b"d/e"), opaque(b"d/e"), shows={b"d/e/old": None, b"d/old": {}})
    add.over(below, "opaque, where nothing is below", directory(b"own"), opaque(b"own"), file(b"own/f"), shows={b"own/f": {}})
    add.over(below, "opaque, over a file", directory(b"f"), opaque(b"f"), file(b"f/g"), shows={b"f/g": {}})
    add.over(below, "opaque, over a symlink", directory(b"s"), opaque(b"s"), file(b"s/g"), shows={b"s/g": {}, b"d/old": {}})
    add.over(
        below,
        "opaque and hidden names",
        directory(b"d"),
        opaque(b"d"),
        whiteout(b"d/old"),
        file(b"d/new"),
        shows={b"d/old": None, b"d/new": {}},
    )
    add.over(
        below,
        "opaque root",
        opaque(b"."),
        file(b"new"),
        shows={b"d": None, b"f": None, b"new": {}},
        kernel=differs(*((path, "") for path in (b"d", b"d/e", b"d/e/old", b"d/old", b"empty", b"f", b"s"))),
        decision="0002: 7",
    )
    add.over(
        below,
        "AUFS' bookkeeping",
        file(b".wh..wh.aufs", b""),
        directory(b".wh..wh.plnk"),
        file(b".wh..wh.plnk/1.2"),
        directory(b".wh..wh.orph"),
        shows={b"f": {}},
        umoci=differs((b".wh..wh.plnk", ""), (b".wh..wh.plnk/1.2", "")),
        decision="0007: 11",
    )
    add.refusal_over(below, "of nothing at all", "must name what it hides", file(b".wh.", b""))
    add.refusal_over(below, "of .", "must name what it hides", file(b".wh..", b""), umoci=Fails("no such file"))
    add.refusal_over(below, "of ..", "must name what it hides", file(b".wh...", b""), umoci=_OUTSIDE, decision="0007: R")
    add.refusal_over(below, "with something below it", "nothing below it", file(b".wh.d/f"), umoci=UNPACKS, decision="0007: R")
    add.refusal_over(
        below,
        "below a file of its layer",
        "not a directory in this layer",
        file(b"x"),
        file(b"x/.wh.f", b""),
        umoci=UNPACKS,
        decision="0007: R",
    )
    add.refusal_over(below, "of a name of 256 bytes", "256 bytes", pax((b"path", b".wh." + b"n" * 256)) + file(b"x", b""))


def _attributes(add: Rows) -> None:
    def schily(name: bytes, value: bytes) -> tuple[bytes, bytes]:
        return b"SCHILY.xattr." + name, value

    def libarchive(name: bytes, value: bytes) -> tuple[bytes, bytes]:
        return b"LIBARCHIVE.xattr." + name, base64.b64encode(value).rstrip(b"=")

    capability = ((b"security.capability", _CAPABILITY),)
    only_libarchive = "0007: 6"
    add.case("set-user-id", file(b"f", mode=b"0004755\0"), shows={b"f": {"mode": 0o104755}})
    add.case(
        "set-group-id and an owner",
        file(b"f", mode=b"0002755\0", uid=b"0000007\0", gid=b"0000010\0"),
        shows={b"f": {"mode": 0o102755, "uid": 7, "gid": 8}},
    )
    add.case(
        "set-group-id of a directory",
        directory(b"d", mode=b"0002775\0", gid=b"0000010\0"),
        directory(b"d/e"),
        file(b"d/f"),
        shows={b"d": {"mode": 0o42775}, b"d/e": {"mode": 0o40755, "gid": 0}},
    )
    add.case("sticky", directory(b"t", mode=b"0001777\0"), shows={b"t": {"mode": 0o41777}})
    add.case("no bits", file(b"f", mode=b"0000000\0"), shows={b"f": {"mode": 0o100000}})
    add.case(
        "all bits",
        file(b"f", mode=b"0007777\0"),
        directory(b"d", mode=b"0007777\0"),
        shows={b"f": {"mode": 0o107777}, b"d": {"mode": 0o47777}},
    )
    add.case("a symlink's bits", header(b"s", b"2", target=b"t".ljust(100, b"\0"), mode=b"0000600\0"), shows={b"s": {"mode": 0o120777}})
    add.case("a symlink's owner", symlink(b"s", b"t", uid=b"0000007\0", gid=b"0000010\0"), shows={b"s": {"uid": 7, "gid": 8}})
    add.case(
        "security.capability",
        pax(schily(b"security.capability", _CAPABILITY)) + file(b"f", mode=b"0000755\0", uid=b"0000007\0"),
        shows={b"f": {"xattrs": capability}},
    )
    add.case(
        "security.capability, libarchive's",
        pax(libarchive(b"security.capability", _CAPABILITY)) + file(b"f"),
        shows={b"f": {"xattrs": capability}},
        umoci=differs((b"f", "xattrs")),
        kernel=differs((b"f", "xattrs")),
        decision=only_libarchive,
    )
    add.case(
        "both spellings, as bsdtar writes them",
        pax(schily(b"security.capability", _CAPABILITY), libarchive(b"security.capability", _CAPABILITY)) + file(b"f"),
        shows={b"f": {"xattrs": capability}},
    )
    add.case(
        "libarchive's, a name with escapes",
        pax(libarchive(b"user.%C3%A9%25", b"\0v")) + file(b"f"),
        shows={b"f": {"xattrs": (("user.é%".encode(), b"\0v"),)}},
        umoci=differs((b"f", "xattrs")),
        kernel=differs((b"f", "xattrs")),
        decision=only_libarchive,
    )
    add.case("a text", pax(schily(b"user.note", b"text")) + file(b"f"), shows={b"f": {"xattrs": ((b"user.note", b"text"),)}})
    add.case(
        "newlines and =",
        pax(schily(b"user.note", b"a=b\n9 c=d\n")) + file(b"f"),
        shows={b"f": {"xattrs": ((b"user.note", b"a=b\n9 c=d\n"),)}},
    )
    add.case(
        "bytes that are no text",
        pax(schily(b"user.note", b"\xff\x80\x01")) + file(b"f"),
        shows={b"f": {"xattrs": ((b"user.note", b"\xff\x80\x01"),)}},
    )
    add.case("a NUL", pax(schily(b"user.note", b"a\0b\0")) + file(b"f"), shows={b"f": {"xattrs": ((b"user.note", b"a\0b\0"),)}})
    add.case(
        "an empty value",
        pax(schily(b"user.note", b"")) + file(b"f"),
        shows={b"f": {"xattrs": ((b"user.note", b""),)}},
        umoci=differs((b"f", "xattrs")),
        decision="0002: 16",
    )
    add.case(
        "= in a name",
        pax(schily(b"user.a%3Db", b"v")) + file(b"f"),
        shows={b"f": {"xattrs": ((b"user.a=b", b"v"),)}},
        umoci=differs((b"f", "xattrs")),
        decision="0002: 16",
    )
    add.case(
        "several",
        pax(schily(b"user.z", b"1"), schily(b"user.a", b"2"), schily(b"trusted.m", b"3")) + file(b"f"),
        shows={b"f": {"xattrs": ((b"trusted.m", b"3"), (b"user.a", b"2"), (b"user.z", b"1"))}},
    )
    add.case(
        "one twice", pax(schily(b"user.a", b"1"), schily(b"user.a", b"2")) + file(b"f"), shows={b"f": {"xattrs": ((b"user.a", b"2"),)}}
    )
    add.case("of a directory", pax(schily(b"user.a", b"1")) + directory(b"d"), shows={b"d": {"xattrs": ((b"user.a", b"1"),)}})
    add.case("of the root", pax(schily(b"user.a", b"1")) + directory(b"./"), shows={b"": {"xattrs": ((b"user.a", b"1"),)}})
    add.case("of a fifo", pax(schily(b"trusted.a", b"1")) + fifo(b"p"), shows={b"p": {"xattrs": ((b"trusted.a", b"1"),)}})
    add.case("of a symlink", pax(schily(b"trusted.a", b"1")) + symlink(b"s", b"t"), shows={b"s": {"xattrs": ((b"trusted.a", b"1"),)}})
    add.stack(
        "of a file that a layer above replaces",
        (archive(pax(schily(b"user.a", b"1")) + file(b"f")), archive(file(b"f"))),
        shows={b"f": {"xattrs": ()}},
    )
    add.stack(
        "of a directory that a layer above states again",
        (archive(pax(schily(b"user.a", b"1")) + directory(b"d")), archive(directory(b"d"))),
        shows={b"d": {"xattrs": ()}},
    )
    add.case(
        "an ACL",
        pax((b"SCHILY.acl.access", b"user::rwx,group::r-x,other::r-x")) + file(b"f"),
        shows={b"f": {"xattrs": ()}},
        warns="SCHILY.acl.access is not carried over",
    )
    add.case(
        "a label of SELinux",
        pax((b"RHT.security.selinux", b"system_u:object_r:usr_t:s0")) + file(b"f"),
        warns="RHT.security.selinux is not carried over",
    )
    add.refusal("a name of 256 bytes", "256 bytes", pax(schily(b"user." + b"n" * 251, b"v")) + file(b"f"))
    add.refusal("no name", "name of 0 bytes", pax(schily(b"", b"v")) + file(b"f"))
    add.refusal("a value of 65,537 bytes", "65537 bytes", pax(schily(b"user.a", bytes(65_537))) + file(b"f"))
    add.refusal(
        "a value that is not base64", "base64", pax((b"LIBARCHIVE.xattr.user.a", b"!!")) + file(b"f"), umoci=UNPACKS, decision="0007: R"
    )


def _ends(add: Rows) -> None:
    one = file(b"f")

    add.stack("two blocks", (one + END,), shows={b"f": {}})
    add.stack("a whole record", ((one + END).ljust(10_240, b"\0"),), shows={b"f": {}})
    add.stack("megabytes of zeros", (one + bytes(3 << 20),), shows={b"f": {}})
    add.stack("zeros that are no whole blocks", (one + END + bytes(100),), shows={b"f": {}})
    add.stack("garbage behind it", (one + END + b"garbage" * 100,), shows={b"f": {}})
    add.stack("another archive behind it", (one + END + file(b"g") + END,), shows={b"f": {}, b"g": None})
    add.stack("no mark", (one,), shows={b"f": {}}, warns="no end-of-archive marker")
    add.stack("one block", (one + bytes(BLOCK),), shows={b"f": {}})
    add.stack("nothing but the mark", (END,), shows={b"f": None})
    add.stack(
        "no byte at all",
        (b"",),
        shows={b"f": None},
        warns="no end-of-archive marker",
        kernel=Fails("not look like a tar archive"),
        decision="0007: 13",
    )
    add.refused_stack("one block and then an entry", (one + bytes(BLOCK) + file(b"g") + END,), "two zero blocks")
    add.refused_stack("half a header", (one + file(b"g")[:300],), "truncated")
    add.refused_stack("half of the data", (header(b"f", size=2000) + b"x" * 1000,), "truncated")
    add.refused_stack(
        "the data without its padding", (one + header(b"g", size=4) + b"data",), "truncated", umoci=UNPACKS, decision="0007: R"
    )
    add.refused_stack("text", (b"#!/bin/sh\n" * 200,), "neither a tar")
    add.refused_stack("a few bytes", (b"abc",), "truncated|neither a tar")


def rows() -> list[Case | Refusal]:
    """The whole table."""
    result: list[Case | Refusal] = []
    for kind, part in _PARTS.items():
        add = Rows(kind)
        part(add)
        result += add.rows
    return result


_PARTS: dict[str, Callable[[Rows], None]] = {
    "extended header": _extended_headers,
    "global header": _global_headers,
    "sparse": _sparse,
    "number": _numbers,
    "dialect": _dialects,
    "name": _names,
    "parent": _parents,
    "duplicate": _duplicates,
    "hard link": _hard_links,
    "whiteout": _whiteouts,
    "attribute": _attributes,
    "end": _ends,
}

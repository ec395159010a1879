"""The C validator against the reference decoder: they accept the same TOCs, whole and mutated, and refuse the same
ones.
"""

from __future__ import annotations

import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strategies import Layer, encode_layer, layer_stacks, layers

from layerformat import FormatError, Toc, decode_footer, restore_toc
from weefs.core import CoreError, check_toc

INTERESTING = [
    0,
    1,
    2,
    7,
    0x7F,
    0x80,
    0xFF,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    1 << 62,
    (1 << 63) - 1,
    (1 << 64) - 1,
]
HEADER_SIZE, TABLES_AT, TABLES = 192, 72, 6
RECORDS = (64, 12, 16, 24, 64, 1)


def raw_toc(layer: Layer) -> bytes:
    blob = encode_layer(layer)
    footer = decode_footer(blob[-80:], blob_size=len(blob))
    stored = blob[footer.toc_offset : footer.toc_offset + footer.toc_stored_size]
    return restore_toc(stored, footer.toc_raw_size)


def c_accepts(toc: bytes) -> str | None:
    """None, or the sentence of the refusal."""
    try:
        check_toc(toc)
    except CoreError as error:
        return error.strerror or "(a refusal that does not say why)"
    return None


def python_accepts(toc: bytes) -> str | None:
    try:
        Toc.parse(toc)
    except FormatError as error:
        return str(error)
    return None


def agree(toc: bytes) -> None:
    c, python = c_accepts(toc), python_accepts(toc)
    assert (c is None) == (python is None), f"C says: {c}; the reference decoder says: {python}"


@given(layers())
def test_both_accept_what_the_encoder_writes(layer: Layer) -> None:
    toc = raw_toc(layer)
    assert c_accepts(toc) is None
    assert python_accepts(toc) is None


@st.composite
def mutations(draw: st.DrawFn, toc: bytes) -> bytes:
    """A TOC with some of its fields replaced: fields of a record, chosen table by table, so that small tables are
    not missed.
    """
    mutated = bytearray(toc)
    tables = struct.unpack_from("<12Q", toc, TABLES_AT)
    places = [(HEADER_SIZE, 0, HEADER_SIZE)]
    places += [(RECORDS[i], tables[2 * i], tables[2 * i + 1] * RECORDS[i]) for i in range(TABLES) if tables[2 * i + 1]]
    for _ in range(draw(st.integers(1, 3))):
        record, start, length = draw(st.sampled_from(places))
        index = draw(st.integers(0, max(0, length // record - 1)))
        width = draw(st.sampled_from([1, 2, 4, 8]))
        at = start + index * record + draw(st.integers(0, max(0, record - width)))
        width = min(width, len(toc) - at)
        old = int.from_bytes(mutated[at : at + width], "little")
        new = draw(
            st.one_of(
                st.sampled_from(INTERESTING),
                st.integers(-2, 2).map(lambda d, old=old: old + d),
                st.integers(0, 1 << 64),
            )
        )
        mutated[at : at + width] = (new % (1 << 8 * width)).to_bytes(width, "little")
    return bytes(mutated)


@settings(max_examples=400)
@given(st.data())
def test_both_judge_a_mutated_toc_alike(data: st.DataObject) -> None:
    layer = data.draw(st.one_of(layers(), layer_stacks().map(lambda stack: stack[-1])))
    toc = raw_toc(layer)
    for _ in range(8):
        agree(data.draw(mutations(toc)))


@given(layers(), st.data())
def test_every_truncation_and_every_extension_is_refused(layer: Layer, data: st.DataObject) -> None:
    toc = raw_toc(layer)
    cut = toc[: data.draw(st.integers(0, len(toc) - 1))]
    assert c_accepts(cut) is not None
    assert python_accepts(cut) is not None
    agree(toc + b"\0" * data.draw(st.integers(1, 16)))


@given(st.binary(max_size=600))
@example(b"")
@example(b"WEENVTOC" + bytes(184))
def test_noise_is_refused(noise: bytes) -> None:
    assert c_accepts(noise) is not None


@pytest.mark.parametrize(
    ("offset", "value", "sentence"),
    [
        (0, b"X", "magic"),
        (8, b"\x02", "version 2, this reader knows 1"),
        (16, b"\x01", "unknown incompatible features"),
        (32, b"\xff", "toc_size"),
        (168, b"\x01", "reserved"),
    ],
)
def test_a_refusal_names_the_rule(offset: int, value: bytes, sentence: str) -> None:
    toc = bytearray(raw_toc([]))
    toc[offset : offset + len(value)] = value
    assert sentence in (c_accepts(bytes(toc)) or "")


def test_an_unknown_compatible_feature_is_ignored() -> None:
    toc = bytearray(raw_toc([]))
    toc[24] = 0xFF
    assert c_accepts(bytes(toc)) is None

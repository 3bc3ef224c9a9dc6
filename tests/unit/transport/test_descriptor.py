"""Decoding of descriptors that a peer sent."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import FormatError
from penstock.transport.protocol import MAX_DESCRIPTOR_BYTES, Descriptor, decode, encode

GOOD = {"transport": "loopback", "endpoint": "a", "generation": 1, "nbytes": 5}


@given(
    transport=st.text(min_size=1, max_size=128),
    generation=st.integers(0, 2**63 - 1),
    nbytes=st.integers(0, 2**63 - 1),
    payload=st.binary(max_size=300),
)
def test_transport_descriptor_round_trips_through_encoding(
    transport: str, generation: int, nbytes: int, payload: bytes
) -> None:
    one = Descriptor(transport=transport, endpoint="e", generation=generation, nbytes=nbytes, payload=payload)
    assert decode(encode(one)) == one


@given(st.binary(max_size=400))
def test_arbitrary_bytes_decode_or_raise_format_error(raw: bytes) -> None:
    try:
        found = decode(raw)
    except FormatError as error:
        assert error.blame == "source"
    else:
        assert decode(encode(found)) == found


@pytest.mark.parametrize(
    "change",
    [
        {"nbytes": -1},
        {"nbytes": 2**63},
        {"nbytes": 1.0},
        {"generation": -1},
        {"generation": "1"},
        {"transport": ""},
        {"endpoint": "x" * 129},
        {"payload": "text"},
    ],
    ids=str,
)
def test_descriptor_with_wrong_fields_raises_format_error(change: dict[str, object]) -> None:
    decode(msgspec.msgpack.encode(GOOD))
    with pytest.raises(FormatError):
        decode(msgspec.msgpack.encode(GOOD | change))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        msgspec.msgpack.encode({"transport": "x"}),
        msgspec.msgpack.encode(GOOD) + b"\0",
        msgspec.msgpack.encode(GOOD)[:-1],
        b"\x91" * 5000,
        msgspec.msgpack.encode(GOOD | {"payload": bytes(MAX_DESCRIPTOR_BYTES)}),
        b"\x84\xa9transport\xa1\xff\xa8endpoint\xa1a\xaageneration\x01\xa6nbytes\x05",
    ],
    ids=["empty", "missing", "trailing", "cut", "deep", "long", "not-utf8"],
)
def test_invalid_descriptor_bytes_raise_format_error(raw: bytes) -> None:
    with pytest.raises(FormatError):
        decode(raw)


def test_unknown_fields_from_newer_version_are_ignored() -> None:
    assert encode(decode(msgspec.msgpack.encode({**GOOD, "more": 1}))) == encode(decode(msgspec.msgpack.encode(GOOD)))

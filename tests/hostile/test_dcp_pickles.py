"""Pickles of DCP checkpoints that lie: each is refused by a typed error, nothing runs, nothing large is allocated."""

from __future__ import annotations

import io
import pickle
import struct
import tracemalloc
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from penstock import errors
from penstock.errors import FormatError, PenstockError, PlanError
from penstock_dcp import distcp
from penstock_dcp.pickled import PLAIN, archive, decode, plain

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

SCALARS = (
    st.none() | st.booleans() | st.integers(-(1 << 80), 1 << 80) | st.floats(allow_nan=False) | st.text() | st.binary()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.dictionaries(st.text(), inner).map(OrderedDict)
        | st.frozensets(st.integers())
        | st.sets(st.text())
    ),
    max_leaves=20,
)


def read(raw: bytes) -> Any:
    return plain(decode(raw, PLAIN, uri="x"), uri="x")


@given(VALUES, st.integers(2, 5))
@settings(max_examples=150, deadline=None)
def test_plain_values_round_trip_through_every_pickle_protocol(value: Any, protocol: int) -> None:
    assert read(pickle.dumps(value, protocol)) == value
    again = torch.load(io.BytesIO(archive(value)), weights_only=False)
    assert again == value and type(again) is type(value)


# name: (pickle, words of the fault)
BOMB = b"\x80\x02]q\x00" + b"".join(b"h%ch%c\x87q%c" % (n - 1, n - 1, n) for n in range(1, 60)) + b"."
# A tuple that holds the one before it twice, 60 times over: to hash it, or to write it out, takes for ever.
TWICE = b"\x80\x04)\x94" + b"".join(b"h%ch%c\x86\x94" % (n, n) for n in range(60))
DEEP = b")" + b"\x85" * 100_000
ATTACKS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "no end"),
    "a call of the system": (b"cos\nsystem\n(S'x'\ntR.", "os.system"),
    "the same by protocol 4": (b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x01x\x85R.", "os.system"),
    "getattr": (b"cbuiltins\ngetattr\n.", "builtins.getattr"),
    "an instance": (b"(ios\nsystem\n.", "opcode"),
    "an object": (b"\x80\x02(cos\nsystem\no.", "os.system"),
    "an extension": (b"\x80\x02\x82\x01.", "opcode"),
    "a buffer": (b"\x80\x05\x97.", "opcode"),
    "a text protocol 0": (b"I1\n.", "opcode"),
    "a call of a value": (b"\x80\x02K\x01)R.", "not a name"),
    "a call without a tuple": (b"\x80\x02ctorch\nSize\nK\x01R.", "not a name"),
    "state of a list": (b"\x80\x02]}b.", "state"),
    "a memo that is not there": (b"\x80\x02h\x05.", "malformed"),
    "an empty stack": (b"\x80\x02\x86.", "malformed"),
    "no mark": (b"\x80\x02K\x01t.", "a mark is missing"),
    "a mark as a value": (b"\x80\x02(.", "malformed"),
    "values below a mark": (b"\x80\x02N(\x85.", "malformed"),
    "a mark without an end": (b"\x80\x02(N.", "after its end"),
    "a length of 4 GiB": (b"\x80\x02X\xff\xff\xff\xff.", "too early"),
    "a length of 2**63": (b"\x80\x04\x8d" + b"\xff" * 8 + b".", "too early"),
    "a long of 255 bytes": (b"\x80\x02\x8a\xff.", "too early"),
    "a key that cannot be one": (b"\x80\x02}]K\x01s.", "malformed"),
    "an odd number of items": (b"\x80\x02}(K\x01u.", "key has no value"),
    "two pickles": (b"\x80\x02N.N.", "after its end"),
    "values left": (b"\x80\x02NN.", "after its end"),
    "a newer protocol": (b"\x80\x09N.", "newer"),
    "not UTF-8": (b"\x80\x02X\x01\x00\x00\x00\xff.", "malformed"),
    "a name without an end": (b"c" + b"a" * 600, "has no end"),
    "a list in itself": (b"\x80\x02]q\x00h\x00a.", "nesting"),
    "a list of a billion": (BOMB, "parts"),
    "a size of a text": (b"\x80\x02ctorch\nSize\nX\x01\x00\x00\x00a\x85R.", "unknown call"),
    "a negative size": (b"\x80\x02ctorch\nSize\nJ\xff\xff\xff\xff\x85\x85R.", "unknown call"),
    "a deep key": (b"\x80\x04}" + DEEP + b"Ns.", "a key has too many"),
    "a deep element": (b"\x80\x04\x8f(" + DEEP + b"\x90.", "a key has too many"),
    "a deep name": (b"\x80\x04" + DEEP + b"\x8c\x01a\x93.", "a name is not text"),
    "a key of endless parts": (TWICE + b"}h\x3cNs.", "a key has too many"),
    "keys of endless parts": (TWICE + b"}(h\x3cNu.", "a key has too many"),
    "an element of endless parts": (TWICE + b"\x8f(h\x3c\x90.", "a key has too many"),
    "a frozen set of endless parts": (TWICE + b"(h\x3c\x91.", "a key has too many"),
    "a name of endless parts": (TWICE + b"\x8c\x01a\x93.", "a name is not text"),
    "a set of lists": (b"\x80\x02c__builtin__\nset\n]]a\x85R.", "value is malformed"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_inconsistent_pickles_are_rejected(attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock_dcp.pickled.MAX_VALUES", 1 << 10)
    raw, words = ATTACKS[attack]
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=words):
            read(raw)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("value", [object(), torch.ones(2), [1, {"a": Path()}], 1 << 4000], ids=str)
def test_non_plain_values_are_not_written(value: Any) -> None:
    with pytest.raises(PlanError):
        archive(value)


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    place = tmp_path_factory.mktemp("dcp")
    dcp.save({"w": torch.ones(3, 4), "step": 1, "model": {"b": torch.zeros(2)}}, checkpoint_id=place)
    return (place / ".metadata").read_bytes()


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_corrupt_metadata_is_read_or_rejected(metadata: bytes, data: st.DataObject) -> None:
    raw = bytearray(metadata)
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        distcp.parse_metadata(bytes(raw), uri="x")
    except FormatError as error:
        assert error.uri == "x"


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_corrupt_archives_are_read_or_rejected(data: st.DataObject) -> None:
    buffer = io.BytesIO()
    torch.save(torch.arange(6.0).reshape(2, 3), buffer)
    raw = bytearray(buffer.getvalue())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = distcp.member_of(bytes(raw), "data.pkl", uri="x", tensor="w")
        stored, _, needed = distcp.parse_tensor(found, uri="x", tensor="w")
        assert stored.offset <= needed
    except FormatError as error:
        assert error.uri == "x"


@pytest.mark.parametrize(
    ("size", "chunks", "is_whole"),
    [
        ((8,), [((0,), (4,)), ((4,), (4,))], True),
        ((8,), [((4,), (4,)), ((0,), (4,)), ((2,), (0,))], True),
        ((8,), [((0,), (4,)), ((0,), (4,))], False),
        ((8,), [((0,), (4,)), ((3,), (4,))], False),
        ((4, 4), [((a, b), (2, 2)) for a in (0, 2) for b in (0, 2)], True),
        ((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 1)), ((2, 1), (2, 3))], True),
        ((4, 4), [((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 2)), ((1, 1), (2, 2))], False),
        ((0, 4), [((0, 0), (0, 4)), ((0, 0), (0, 4))], True),
        ((1 << 40, 1 << 40), [((0, 0), (1 << 39, 1 << 40)), ((1 << 39, 0), (1 << 39, 1 << 40))], True),
    ],
)
def test_overlapping_checkpoint_chunks_are_rejected(size: Any, chunks: Any, is_whole: bool) -> None:
    stored = [ChunkStorageMetadata(offsets=torch.Size(at), sizes=torch.Size(extent)) for at, extent in chunks]
    if is_whole:
        distcp.require_covered("w", torch.Size(size), stored, "x")
        return
    with pytest.raises(FormatError, match="overlap"):
        distcp.require_covered("w", torch.Size(size), stored, "x")


def test_archive_with_oversized_directory_is_refused() -> None:
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 1, 1, 100, 0, 0)
    with pytest.raises(FormatError, match="too long"):
        distcp.directory(end.rjust(1024, b"\0"), 100 << 30, uri="x", tensor="w")


def test_metadata_with_invalid_field_is_rejected(metadata: bytes) -> None:
    def changed(old: bytes, new: bytes) -> bytes:
        assert metadata.count(old) and len(old) == len(new)
        return metadata.replace(old, new)

    for raw, words in (
        (changed(b"__0_0.distcp", b"../../../etc"), "not a valid file name"),
        (changed(b"\x8c\x07float32", b"\x8c\x07flout32"), "torch.flout32"),
        # The first of the places where the size of `w` stands is that of the tensor, the others of its parts.
        (metadata.replace(b"K\x03K\x04", b"K\x03K\x05", 1), "a shard is missing"),
    ):
        with pytest.raises(FormatError, match=words):
            distcp.parse_metadata(raw, uri="x")


# The arguments of errors that have fields of their own; the others take a URI.
FIELDS: dict[type[PenstockError], dict[str, object]] = {
    errors.BudgetTooSmall: {"minimum_bytes": 7},
    errors.BaseMismatch: {"expected": "w1-a", "found": "w1-b"},
    errors.VersionRefused: {"version": 3, "member": "m", "reason": "not finite"},
    errors.VersionNotLive: {"live": 2},
}
ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PenstockError)]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_errors_reach_other_ranks_unchanged(kind: type[PenstockError]) -> None:
    """DCP gathers the exceptions of all ranks by pickle."""
    error = kind("no room", **FIELDS.get(kind, {"uri": "s3://x/y"}))
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert type(again) is kind and str(again) == str(error) and vars(again) == vars(error)

"""Bytes between processes that no message class describes: frames, trailers, files, signatures and digests.

In: nothing. Out: `FRAMES`: a name, how today's code writes the bytes, and the value that it reads from such bytes.
Not here: messages (`messages`).
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch

from penstock.config import Settings
from penstock.digest import leaf
from penstock.errors import GrantRefused
from penstock.holding.weight_layout import tabulate
from penstock.http.compression import Planes
from penstock.http.region_messages import CHUNK_HEAD_BYTES, CODING, TRAILER, TRAILER_WORD
from penstock.hub.grants import GrantChecker, GrantSigner
from penstock.hub.messages import PROTOCOL, PROTOCOL_HEADER, Identity, layout_digest, sync_key
from penstock.loader.group import plan_digest
from penstock.plan.layout import Form, Layout
from penstock.plan.schedule import plan_load
from penstock.ranks import agreement, exchange
from penstock.storage import MemorySource, manifest
from penstock.storage.cache import open_cached
from penstock.storage.safetensors import encode_header
from penstock.sync.check import decode_values, encode_values
from penstock.sync.membership import name_of_strips
from penstock.transport import fd_server
from penstock.transport.host_endpoint import checksum_of
from penstock.transport.protocol import Descriptor
from penstock.types import Box, DType, FileEntry, Manifest
from penstock_convert.messages import JOB_PROTOCOL, TaskWork, Wire
from penstock_dcp.checkpoint import BYTES_KEY, PATHS_KEY
from penstock_dcp.distcp import member_of
from penstock_dcp.pickled import PLAIN, archive, decode, plain
from penstock_hub import app


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Bytes that today's code writes, and the value that it reads from them."""

    write: Callable[[], bytes]
    read: Callable[[bytes], Any]


TABLE = tabulate(("a.weight", "b.weight"), (DType.BF16, DType.F32), ((2, 3), (5,)))
LEAVES = np.array([0x1122334455667788, 0x99AABBCCDDEEFF00], np.uint64)
MEMBER, KEY = "a1b2c3d4e5f60718293a4b5c6d7e8f90", "0f" * 16


def _write_job_frame() -> bytes:
    with _pair() as (ours, theirs):
        Wire(ours).send(TaskWork(tasks=(3, 5), revoked=(2,)))
        return theirs.recv(4096)


def _read_job_frame(raw: bytes) -> Any:
    with _pair() as (ours, theirs):
        theirs.sendall(raw)
        return msgspec.to_builtins(Wire(ours).to_worker())


class _pair:
    def __enter__(self) -> tuple[socket.socket, socket.socket]:
        self.ends = socket.socketpair()
        return self.ends

    def __exit__(self, *error: object) -> None:
        for end in self.ends:
            end.close()


BLOCK = np.frombuffer(bytes((at * 7 + 3) % 256 for at in range(41)), np.uint8)


def _write_planes() -> bytes:
    return b"".join(Planes().encode(BLOCK))


def _read_planes(raw: bytes) -> Any:
    into = np.zeros(len(BLOCK), np.uint8)
    Planes().decode(memoryview(raw), into)
    return into.tolist()


class _Object(MemorySource):
    def __init__(self) -> None:
        super().__init__(OBJECT, uri="s3://bucket/key")
        self.identity = '"etag-1"'


OBJECT = bytes(range(256)) * 3


def _cache_file(folder: str) -> tuple[Path, Any]:
    """Read an object through a cache in `folder`; return the only chunk file, and the source."""
    source = open_cached(_Object(), settings=Settings(cache_dir=Path(folder)))
    into = bytearray(len(OBJECT))
    source.readv(0, [memoryview(into)])
    assert into == OBJECT
    return next(path for path in Path(folder).rglob("00000000")), source


def _write_cache_chunk() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path, _ = _cache_file(folder)
        return f"{path.parent.parent.name}/{path.parent.name}\n".encode() + path.read_bytes()


def _read_cache_chunk(raw: bytes) -> Any:
    place, _, chunk = raw.partition(b"\n")
    with tempfile.TemporaryDirectory() as folder:
        path, _ = _cache_file(folder)
        path.write_bytes(chunk)
        again, source = _cache_file(folder)
        return {"place": place.decode(), "hits": source.stats.hits, "rotten": source.stats.rotten, "name": again.name}


def _write_manifest() -> bytes:
    files = (FileEntry(name="m.safetensors", nbytes=160, identity="1:2:3:160", metadata={"format": "pt"}),)
    placed = tabulate(TABLE.names, TABLE.dtypes, TABLE.shapes)
    revision = leaf.revision(placed, leaf.LEAF_BYTES, LEAVES)
    return manifest.encode(
        Manifest(files=files, tensors=placed, leaf_bytes=leaf.LEAF_BYTES, leaves=LEAVES, revision=revision)
    )


def _read_manifest(raw: bytes) -> Any:
    read = manifest.decode(raw, uri="m.penstock")
    assert read.leaves is not None
    return [read.revision, read.leaves.tolist(), [file.name for file in read.files], list(read.tensors.names)]


def _signer() -> GrantSigner:
    return GrantSigner(bytes(range(32)))


def _write_grant(alone: bool) -> bytes:
    epochs = {MEMBER: 41, "other-member": 42}
    with mock.patch.object(os, "urandom", bytes):
        # A source before 2.5 takes a grant with a signature of its own, and no caller in it.
        protocols = {MEMBER: "2.4"} if alone else None
        grants = _signer().sign(key=KEY, reader="reader-1", epochs=epochs, protocols=protocols, caller="caller-1")
    return grants[MEMBER]


def _read_grant(raw: bytes) -> Any:
    # The epochs of a new checker begin at a random number: "expired" is said only of a grant whose signature, key,
    # reader and source are right.
    try:
        GrantChecker(_signer().public_key, MEMBER).check(raw, key=KEY, reader="reader-1")
    except GrantRefused as error:
        return error.message
    return "accepted"


def _write_strip_name() -> bytes:
    return name_of_strips(*[np.array([at, at + 8], "<i8").tobytes() for at in range(4)])


def _write_check_values() -> bytes:
    return encode_values({"logits": torch.tensor([[1.0, -2.5]], dtype=torch.bfloat16), "tokens": [1, 2], "name": "n"})


def _read_check_values(raw: bytes) -> Any:
    values = decode_values(raw)
    return {**values, "logits": [str(values["logits"].dtype), values["logits"].tolist()]}


def _write_plan_digest() -> bytes:
    """The digest that a rank of a load gives to the others after its word, before they read."""
    return plan_digest(plan_load(TABLE, file_nbytes=[160], chunk_bytes=64), "w1-" + "ab" * 32)


def _digests() -> bytes:
    """Digests that two processes compute, each for itself, and compare."""
    identity = Identity(model="m", revision="w1-1", layout=KEY, dtype="BF16", parallel={"tp": "1/4", "pp": "0/1"})
    form = Form(dtype=DType.BF16, shape=(4, 6), box=Box((1, 0), (3, 6)))
    columns = {"form": np.zeros(1, np.int64), "offset": np.array([64], np.int64)}
    layout = Layout(member=MEMBER, address="at", regions=(256,), forms=(form,), names=("a.weight",), **columns)
    descriptor = Descriptor(
        transport="http", endpoint="e", generation=7, nbytes=4096, device="cuda:0", payload=b"payload"
    )
    return msgspec.json.encode(
        {
            "identity": identity.key(),
            "layout of tensors": layout_digest(TABLE),
            "layout of a rank": layout.digest(),
            "sync": sync_key("policy"),
            "strips": _write_strip_name().hex(),
            "revision of leaves": leaf.revision(TABLE, leaf.LEAF_BYTES, LEAVES),
            "revision of headers": leaf.headers_revision([b"one", b"two"]),
            "descriptor": checksum_of(descriptor),
        }
    )


def _read_checkpoint_value(raw: bytes) -> Any:
    value = plain(decode(member_of(raw, "data.pkl", uri="f", tensor="t"), PLAIN, uri="f"), uri="f")
    return {**value, "raw": value["raw"].hex()}


def _words() -> bytes:
    """Constants that both sides have: major versions, headers, words of ranks, lengths of frames."""
    return msgspec.json.encode(
        {
            "protocol of a fleet": [PROTOCOL.partition(".")[0], PROTOCOL_HEADER],
            "protocol of a job": JOB_PROTOCOL.partition(".")[0],
            "coding of a region": [CODING, CHUNK_HEAD_BYTES],
            "words of a shared read": [
                agreement.READY,
                agreement.BUSY,
                agreement.FAILED,
                agreement.BEGIN,
                agreement.END,
            ],
            "bytes of a round's status": exchange.STATUS_BYTES,
            "keys of a checkpoint": [BYTES_KEY, PATHS_KEY],
            "request for the page": fd_server.PAGE,
        }
    )


def _routes() -> bytes:
    rows = [[operation.method, operation.path] for operation in app.OPERATIONS]
    return msgspec.json.encode(sorted(rows))


def _write_header() -> bytes:
    rows = [("a", DType.BF16, (2, 3), 0, 12), ("b", DType.F8_E4M3, (4,), 12, 16)]
    return encode_header(rows, {"format": "pt"}, uri="m.safetensors")


FRAMES = {
    "job.frame": Frame(write=_write_job_frame, read=_read_job_frame),
    "transport.region_trailer": Frame(
        write=lambda: TRAILER.pack(TRAILER_WORD, 41), read=lambda r: TRAILER.unpack(r)[1]
    ),
    "transport.planes": Frame(write=_write_planes, read=_read_planes),
    "cache.chunk": Frame(write=_write_cache_chunk, read=_read_cache_chunk),
    "manifest.whole": Frame(write=_write_manifest, read=_read_manifest),
    "manifest.safetensors_header": Frame(write=_write_header, read=lambda raw: raw[8:].decode()),
    "peer.grant_alone": Frame(write=lambda: _write_grant(True), read=_read_grant),
    "peer.grant_together": Frame(write=lambda: _write_grant(False), read=_read_grant),
    "sync.check_values": Frame(write=_write_check_values, read=_read_check_values),
    "ranks.plan_digest": Frame(write=_write_plan_digest, read=bytes.hex),
    "dcp.value": Frame(
        write=lambda: archive({"step": 7, "names": ["a", "b"], "rate": 0.5, "raw": b"\x00\xff"}),
        read=_read_checkpoint_value,
    ),
    "fleet.digests": Frame(write=_digests, read=msgspec.json.decode),
    "fleet.words": Frame(write=_words, read=msgspec.json.decode),
    "hub.routes": Frame(write=_routes, read=msgspec.json.decode),
}

STRUCT_FORMATS = {
    "<II": "transport.planes",
    "<8sQ": "transport.region_trailer",
    "<8sQQ": "cache.chunk",
    "<Q": "a request for descriptors is the generation; also numbers of GGUF, a format of others",
    "<I": "numbers of GGUF, a format of others",
    "<4s5H3I2H": "zip, a format of others",
    "<4s6H3I5H2I": "zip, a format of others",
    "<4s4H2IH": "zip, a format of others",
    "<4sQ2H2I4Q": "zip, a format of others",
    "3i": "credentials of the kernel",
    "<BBHiQQIIQQQQ": "io_uring, of the kernel",
    "<QiI": "io_uring, of the kernel",
}
"""The formats of `struct` constants in the package: the frame that holds each, or why it needs none."""

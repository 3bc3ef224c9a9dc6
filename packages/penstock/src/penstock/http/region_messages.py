"""The messages of the data port: a request for runs of a region, and the framing of the answer.

In: offsets and lengths. Out: a checked `ReadRequest`; trailers and heads of chunks.
Not here: the ends that exchange them (`region_server`, `transport.http_reader`), the frames in chunks (`compression`).

    POST /v1/regions/GENERATION           ReadRequest, msgpack -> 200, Content-Length: bytes of the runs, the trailer
      Accept-Encoding: penstock-planes    -> 200, Content-Encoding the same: a chunk for each frame, the trailer
"""

from __future__ import annotations

import re
import struct
from typing import Annotated

import msgspec
import numpy as np

from penstock.errors import FormatError
from penstock.types import I64, MIB

MAX_RUNS = 4096
"""Most runs of one request: 64 KiB of columns."""
MAX_BODY_BYTES = 128 << 10
"""Longest body of a request: the columns and 200 bytes."""
PIECE_BYTES = 4 * MIB
"""Moved in one system call, so that a fence is seen soon. Source: benchmarks/results/cpu2_202611/hosts.md."""
CODING = "penstock-planes"
"""Content coding that a reader may accept and a server may use."""
TRAILER = struct.Struct("<8sQ")
"""`TRAILER_WORD` and the generation. The server sends it only if the generation still holds after the last byte:
without it the bytes may be of two generations."""
TRAILER_WORD = b"penstock"
CHUNK_HEAD_BYTES = 10
"""Bytes of the head of a chunk: eight hexadecimal digits and CR LF. Reason: with a fixed length, one call receives a
chunk and the head of the next."""
_CHUNK_HEAD = re.compile(rb"[0-9a-f]{8}\r\n")

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Columns = Annotated[bytes, msgspec.Meta(max_length=8 * MAX_RUNS)]


class ReadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for runs of bytes of one region, with the key that proves that the reader has its descriptor.

    Attributes:
        endpoint: id of the server.
        key: key of the region, or one that was lent to this reader.
        nbytes: bytes of the region, as the descriptor says.
        src: offsets of the runs, little-endian int64.
        length: bytes of the runs, little-endian int64.
    """

    endpoint: Annotated[str, msgspec.Meta(max_length=128)]
    key: Annotated[bytes, msgspec.Meta(max_length=64)]
    nbytes: _Count
    src: _Columns
    length: _Columns

    def runs(self) -> tuple[I64, I64]:
        """Return offsets and lengths. FormatError unless all lie in the region."""
        # The columns come from a peer: every check here stands between it and memory outside the region. The last one
        # subtracts instead of adding, because a sum of two large int64 could wrap to a small number.
        if len(self.src) != len(self.length) or len(self.src) % 8:
            raise FormatError(f"columns of {len(self.src)} and {len(self.length)} bytes")
        src = np.frombuffer(self.src, "<i8")
        length = np.frombuffer(self.length, "<i8")
        inside = (
            (src >= 0) & (length > 0) & (src <= self.nbytes) & (length <= self.nbytes - np.clip(src, 0, self.nbytes))
        )
        if not inside.all():
            raise FormatError("a run lies outside the region")
        return src.astype(np.int64), length.astype(np.int64)


def chunk_head(nbytes: int) -> bytes:
    """Return the head of a chunk of this length; CR LF follows the chunk. A chunk of 0 bytes is the last one."""
    return b"%08x\r\n" % nbytes


def chunk_bytes(head: memoryview, limit: int) -> int:
    """Return the length of a chunk by its head. FormatError if it is not one of ours, or above `limit`."""
    nbytes = int(bytes(head[:8]), 16) if _CHUNK_HEAD.fullmatch(head) else -1
    if not 0 <= nbytes <= limit:
        raise FormatError("a malformed or too long chunk")
    return nbytes

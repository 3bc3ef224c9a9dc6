"""Messages of the data port: a request for runs of a region, and the framing of the response.

A reader sends `POST /v1/regions/GENERATION` with a ReadRequest in msgpack. The response contains the bytes of the runs
and a trailer. With `Content-Encoding: penstock-planes` the response has one chunk per frame of `compression`.
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
"""Maximum number of runs in a request: 64 KiB of columns."""
MAX_BODY_BYTES = 128 << 10
"""Maximum size of a request's body: the columns and 200 bytes for the other fields."""
PIECE_BYTES = 4 * MIB
"""Bytes moved by one system call, so that a fence is detected soon. Source: benchmarks/results/cpu2_202611/hosts.md."""
CODING = "penstock-planes"
"""Content coding that a reader may accept and a server may use."""
TRAILER = struct.Struct("<8sQ")
"""`TRAILER_WORD` and the generation. Without a trailer the bytes may belong to two generations."""
TRAILER_WORD = b"penstock"
CHUNK_HEAD_BYTES = 10
"""Size of a chunk's head: eight hexadecimal digits and CR LF. One call receives a chunk and the next head."""
_CHUNK_HEAD = re.compile(rb"[0-9a-f]{8}\r\n")

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Columns = Annotated[bytes, msgspec.Meta(max_length=8 * MAX_RUNS)]


class ReadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for runs of a region, with a key that proves that the reader has the region's descriptor.

    `src` and `length` are offsets and sizes of the runs in bytes, little-endian int64. `nbytes` is the size of the
    region.
    """

    endpoint: Annotated[str, msgspec.Meta(max_length=128)]
    key: Annotated[bytes, msgspec.Meta(max_length=64)]
    nbytes: _Count
    src: _Columns
    length: _Columns

    def runs(self) -> tuple[I64, I64]:
        """Return the offsets and sizes of the runs. Raises FormatError unless all runs are inside the region."""
        # The columns may be hostile. Subtract in the last check, because a sum of two large int64 could overflow.
        if len(self.src) != len(self.length) or len(self.src) % 8:
            raise FormatError(f"the columns have {len(self.src)} and {len(self.length)} bytes, which must be equal")
        src = np.frombuffer(self.src, "<i8")
        length = np.frombuffer(self.length, "<i8")
        inside = (
            (src >= 0) & (length > 0) & (src <= self.nbytes) & (length <= self.nbytes - np.clip(src, 0, self.nbytes))
        )
        if not inside.all():
            raise FormatError("a run is outside the region")
        return src.astype(np.int64), length.astype(np.int64)


def chunk_head(nbytes: int) -> bytes:
    """Return the head of a chunk. Send CR LF after each chunk, and end the body with a chunk of 0 bytes."""
    return b"%08x\r\n" % nbytes


def chunk_bytes(head: memoryview, limit: int) -> int:
    """Return the size of a chunk from its head. Raises FormatError for a malformed head or a size above `limit`."""
    nbytes = int(bytes(head[:8]), 16) if _CHUNK_HEAD.fullmatch(head) else -1
    if not 0 <= nbytes <= limit:
        raise FormatError("a chunk is malformed or too long")
    return nbytes

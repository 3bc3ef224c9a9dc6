"""Descriptors, by which a peer reads our memory, and their bytes on the wire: typed msgpack, never pickle.

In: a `Descriptor`, or bytes that claim to be one. Out: the other.
Not here: the meaning of the payload (each transport), sending descriptors (`peer`).
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from penstock.errors import FormatError

MAX_DESCRIPTOR_BYTES = 64 << 10
"""Longest encoded descriptor that is decoded. A NIXL agent's metadata is 427 bytes; one arena is one registration."""

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Descriptor(msgspec.Struct, frozen=True, kw_only=True):
    """The data by which a peer reads a registration. It is valid for one generation."""

    transport: _Name
    endpoint: _Name
    """The holder's transport: one life of one process."""
    generation: _Count
    """Of the registration; never given twice by an endpoint, so an address used again is not mistaken."""
    nbytes: _Count
    device: _Name = "cpu"
    payload: bytes = b""
    """The transport's own: an IPC handle, an agent's metadata. Hostile until that transport has checked it."""


_DECODER = msgspec.msgpack.Decoder(Descriptor)
_Payload = TypeVar("_Payload", bound=msgspec.Struct)


def encode(descriptor: Descriptor) -> bytes:
    """The descriptor as bytes (msgpack)."""
    return msgspec.msgpack.encode(descriptor)


def decode(raw: bytes) -> Descriptor:
    """The descriptor that a peer sent. FormatError for anything else."""
    # Before decoding: the bytes come from another process, and a decoder allocates what they claim.
    if len(raw) > MAX_DESCRIPTOR_BYTES:
        raise FormatError(f"a descriptor of {len(raw)} bytes, more than {MAX_DESCRIPTOR_BYTES}")
    try:
        return _DECODER.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"malformed descriptor: {error}") from error


def decode_payload(source: Descriptor, decoder: msgspec.msgpack.Decoder[_Payload]) -> _Payload:
    """A descriptor's payload, typed. FormatError if it is malformed."""
    try:
        return decoder.decode(source.payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"malformed {source.transport} descriptor: {error}") from error

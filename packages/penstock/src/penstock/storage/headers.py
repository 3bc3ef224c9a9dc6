"""Read the header of a safetensors or GGUF file, chosen by the file's first bytes."""

from __future__ import annotations

from penstock.errors import FormatError
from penstock.storage import gguf, safetensors
from penstock.storage.pickled import is_pickle, refusal
from penstock.storage.safetensors import Header
from penstock.storage.source import Source


def gguf_header(source: Source) -> gguf.GgufHeader | None:
    """Return the header of a GGUF file, or None for another format. Raises as `read_header`."""
    header = read_header(source)
    return header if isinstance(header, gguf.GgufHeader) else None


def read_header(source: Source) -> Header:
    """Read and check the header of a safetensors or GGUF file.

    Raises:
        FormatError: the header is malformed or inconsistent, or the file has another format.
        UnsafeFormat: the file is a pickle.
        SourceTruncated: the file ends inside the header or before the end of the bodies.
    """
    is_named = source.uri.partition("?")[0].endswith(gguf.SUFFIX)
    guess = gguf.GUESS_BYTES if is_named else safetensors.HEADER_GUESS_BYTES
    first = bytearray(min(guess, source.nbytes))
    if first:
        source.readv(0, [memoryview(first)])
    # Files in a cache have no suffix. As the length of a safetensors header, these bytes would be too large.
    if first.startswith(gguf.MAGIC):
        return gguf.read_header(source, first)
    if is_named:
        raise FormatError("not a GGUF file: it does not begin with 'GGUF'", uri=source.uri)
    if is_pickle(first):
        raise refusal([source.uri], source.uri)
    return safetensors.read_header(source, first=first)

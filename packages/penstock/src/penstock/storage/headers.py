"""The choice of the reader of a file's header, by the file's first bytes.

In: a `Source`. Out: `Header`.
Not here: the formats (`safetensors`, `gguf`), the files of a weight set (`weight_set`).
"""

from __future__ import annotations

from penstock.errors import FormatError
from penstock.storage import gguf, safetensors
from penstock.storage.pickled import is_pickle, refusal
from penstock.storage.safetensors import Header
from penstock.storage.source import Source


def gguf_header(source: Source) -> gguf.GgufHeader | None:
    """Return the header of a GGUF file, with all its metadata; None for a file of another format. See `read_header`."""
    header = read_header(source)
    return header if isinstance(header, gguf.GgufHeader) else None


def read_header(source: Source) -> Header:
    """Read and check the header of a safetensors or GGUF file.

    Raises:
        FormatError: it is of another format, malformed, or lies; names the tensor and the fault. UnsafeFormat: pickle.
        SourceTruncated: the file ends before its header does, or before the bodies that its header promises.
    """
    is_named = source.uri.partition("?")[0].endswith(gguf.SUFFIX)
    guess = gguf.GUESS_BYTES if is_named else safetensors.HEADER_GUESS_BYTES
    first = bytearray(min(guess, source.nbytes))
    if first:
        source.readv(0, [memoryview(first)])
    # By content: files of a cache have no suffix. No safetensors file begins so, for its header would be too long.
    if first.startswith(gguf.MAGIC):
        return gguf.read_header(source, first)
    if is_named:
        raise FormatError("no GGUF file: it does not begin with 'GGUF'", uri=source.uri)
    if is_pickle(first):
        raise refusal([source.uri], source.uri)
    return safetensors.read_header(source, first=first)

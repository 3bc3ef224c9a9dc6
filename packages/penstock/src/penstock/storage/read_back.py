"""Reading back the headers of files that were written, before they take the place of others.

In: a directory whose files are complete. Out: an error unless Penstock's own reader finds the tensors that were meant.
Not here: the bytes of the tensors (their writers digest them), the publication (`output`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from penstock.errors import DestinationError, FormatError, IntegrityError, SourceError
from penstock.storage.files import FileSource
from penstock.storage.headers import read_header
from penstock.storage.locate import SIDECAR, SUFFIX
from penstock.storage.manifest import decode
from penstock.storage.safetensors import parse_header
from penstock.types import DType

Entry = tuple[str, DType, tuple[int, ...], int, int]
"""Name, dtype, shape, offset in the file and size of one tensor."""


_HINT = "what was there before is untouched: check the disk, and write it again"


def require_readable(path: Path, nbytes: int, wanted: Mapping[str, Entry] | None) -> None:
    """Read the header of a file and compare it with what was meant to be written.

    Args:
        path: a file of safetensors or GGUF.
        nbytes: the size that the file should have.
        wanted: the tensors by name; None: only the header's own consistency and the size are checked.

    Raises:
        DestinationError: the file is not what was written. Nothing else was touched.
    """
    try:
        with closing(FileSource(str(path))) as source:
            size, tensors = source.nbytes, read_header(source).tensors
    except (FormatError, SourceError) as error:
        raise _unreadable(path, error) from error
    if size != nbytes:
        raise DestinationError(f"{nbytes} bytes were written, and the file has {size}", uri=str(path), hint=_HINT)
    if wanted is None:
        return
    columns = (tensors.names, tensors.dtypes, tensors.shapes, tensors.offset.tolist(), tensors.nbytes.tolist())
    found = {entry[0]: entry for entry in zip(*columns, strict=True)}
    if found != wanted:
        name = next(name for name in (*wanted, *found) if found.get(name) != wanted.get(name))
        message = "the header that was read back differs from what was written"
        raise DestinationError(message, uri=str(path), tensor=name, hint=_HINT)


def require_readable_bytes(path: Path, data: bytes) -> None:
    """Read a small file before it is published, if it is a manifest or has weights.

    Args:
        path: where it will be.
        data: its content.

    Raises:
        DestinationError: Penstock's own reader refuses it.
    """
    try:
        if path.name == SIDECAR:
            decode(data, uri=str(path))
        elif path.name.endswith(SUFFIX):
            stop = 8 + int.from_bytes(data[:8], "little")
            parse_header(data[8:stop], file_nbytes=len(data), uri=str(path))
    except (FormatError, IntegrityError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: FormatError | SourceError | IntegrityError) -> DestinationError:
    return DestinationError(f"what was written cannot be read back: {error.message}", uri=str(path), hint=_HINT)

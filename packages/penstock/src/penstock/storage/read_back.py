"""Check that written files can be read, before they replace others.

Only headers are read. The writers digest the tensors' bytes themselves.
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


_HINT = "nothing was replaced: check the disk, and write the file again"


def require_readable(path: Path, nbytes: int, wanted: Mapping[str, Entry] | None) -> None:
    """Read the header of a file and compare it with the expected tensors.

    Args:
        wanted: the expected tensors by name. None checks only the size and the consistency of the header.

    Raises:
        DestinationError: the file differs. Nothing else was changed.
    """
    try:
        with closing(FileSource.open(str(path))) as source:
            size, tensors = source.nbytes, read_header(source).tensors
    except (FormatError, SourceError) as error:
        raise _unreadable(path, error) from error
    if size != nbytes:
        message = f"{nbytes} bytes were written, but the file has {size}"
        raise DestinationError(message, uri=str(path), hint=_HINT)
    if wanted is None:
        return
    columns = (tensors.names, tensors.dtypes, tensors.shapes, tensors.offset.tolist(), tensors.nbytes.tolist())
    found = {entry[0]: entry for entry in zip(*columns, strict=True)}
    if found != wanted:
        name = next(name for name in (*wanted, *found) if found.get(name) != wanted.get(name))
        message = "the header on disk differs from the header written"
        raise DestinationError(message, uri=str(path), tensor=name, hint=_HINT)


def require_readable_bytes(path: Path, data: bytes) -> None:
    """Read a small file before it is published, if it is a manifest or has weights.

    Args:
        path: its later path.

    Raises:
        DestinationError: Penstock cannot read it.
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
    return DestinationError(f"the file cannot be read back: {error.message}", uri=str(path), hint=_HINT)

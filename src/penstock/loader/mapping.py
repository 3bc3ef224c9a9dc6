"""Local files mapped for a load to the CPU: slabs that are views of them, and sources that bring the views in.

In: the files of a weight set, then a `LoadPlan` over them. Out: a `HostPlace` and its `Source`s.
Not here: whether to map (`load`), the mapping of one file (`storage.mapped`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.engine.place import Bytes, HostPlace
from penstock.plan.schedule import LoadPlan
from penstock.storage import Source, local_path
from penstock.storage.files import FileSource
from penstock.storage.mapped import MappedFile


class Mappings:
    """The files of one load, mapped. Opened by the constructor; views outlive `close`.

    Args:
        sources: local files; each is mapped only while it is the very file that was opened there.

    Raises:
        SourceChanged: a file was replaced since its source was opened.
        SourceError: it cannot be opened.
    """

    def __init__(self, sources: Sequence[FileSource]) -> None:
        self._files: list[MappedFile] = []
        try:
            for source in sources:
                self._files.append(MappedFile(local_path(source.uri), state=source.state))
        except BaseException:
            self.close()
            raise

    def are_ready(self) -> bool:
        """Return whether all files are in the page cache already."""
        return all(file.is_ready() for file in self._files)

    def place(self, plan: LoadPlan, *, is_ready: bool) -> tuple[HostPlace, list[Source]]:
        """Return a place whose slabs are views of the files, and sources whose reads bring those in.

        Args:
            plan: of the files, each slab one run of one of them.
            is_ready: bring nothing in; the pages fault when they are touched.

        Ownership: each view keeps its own range mapped; the sources live as long as this.
        """
        first = np.flatnonzero((plan.row_slab >= 0) & (plan.row_offset == 0))
        table, nbytes = plan.table, plan.slab_nbytes.tolist()
        columns = (table.file_index[first].tolist(), table.offset[first].tolist(), nbytes)
        slabs: list[Bytes | None] = [
            np.frombuffer(self._files[file].view(offset, length), np.uint8)
            for file, offset, length in zip(*columns, strict=True)
        ]
        return HostPlace(nbytes, slabs), [_MappedSource(file, is_ready) for file in self._files]

    def check_unchanged(self) -> None:
        """See `FileSource.check_unchanged`, of every file."""
        for file in self._files:
            file.check_unchanged()

    def close(self) -> None:
        """Close the files; views live on. Idempotent."""
        for file in self._files:
            file.close()


class _MappedSource:
    """A mapped file as a source whose bytes are already in place: a read only brings their pages in."""

    def __init__(self, mapped: MappedFile, is_ready: bool) -> None:
        self._mapped, self._is_ready = mapped, is_ready
        self.uri, self.nbytes, self.identity = mapped.uri, mapped.nbytes, mapped.identity

    def readv(self, offset: int, buffers: Sequence[memoryview]) -> str:
        """See `Source.readv`; `buffers` are views of this very range."""
        if not self._is_ready:
            self._mapped.prefetch(offset, sum(buffer.nbytes for buffer in buffers))
        return "mmap"

    def close(self) -> None:
        """Do nothing: `Mappings` closes the file."""

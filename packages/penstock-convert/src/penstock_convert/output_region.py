"""The output of a conversion into shared memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from penstock.storage.output import DISK_WRITE_BYTES, OutputSet
from penstock.types import TensorTable


class OutputRegion(OutputSet):
    """The tensors of one output file in shared memory, which processes on this host open through a path.

    The owner of the memory creates, shares and frees the memory.
    """

    # Do not call the base constructor, which would encode a header. The memory contains no header.
    def __init__(self, path: Path, table: TensorTable) -> None:
        self.directory = path
        self.table = table
        self.groups = ("",)
        self.names = [""]
        self.data_offset = [0]
        self._body_nbytes = [int(table.nbytes.sum())]
        self._headers = [b""]
        self.metadata = {"format": "pt"}
        self._fds = []
        self._write_bytes = DISK_WRITE_BYTES

    def allocate(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Do nothing, because the memory is already allocated."""

"""`SafetensorsStreamer`: the tensors of safetensors files as they arrive, as `penstock.stream` gives them.

In: paths or URIs. Out: `(name, tensor)`, owned by the caller, and `files_to_tensors_metadata`.
Not here: the loading itself (`loader`), raw ranges (`files`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

from penstock.compat.runai_streamer.objects import S3Credentials, raising_value_errors, storage_options
from penstock.config import Settings, runai_settings
from penstock.loader.load import TensorStream
from penstock.loader.session import Options, Session, resolve_device
from penstock.loader.tensor import torch_dtype
from penstock.storage import open_source, text_of
from penstock.storage.safetensors import Header, read_header


@dataclass(frozen=True, slots=True)
class Offsets:
    """Where a tensor's bytes are, from the first byte after the header."""

    start: int
    end: int

    def get_diff(self) -> int:
        """Bytes between."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class SafetensorMetadata:
    """One tensor of a file, as its header describes it."""

    name: str
    shape: list[int]
    dtype: str
    offsets: Offsets

    def get_bytesize(self) -> int:
        """Bytes of the tensor."""
        return self.offsets.get_diff()

    def get_item_count(self) -> int:
        """Elements of the tensor, by the header's shape."""
        return math.prod(self.shape)

    def get_torch_dtype(self) -> torch.dtype:
        """Its torch dtype. PlanError (a ValueError too) where torch has none."""
        from penstock.types import DType

        with raising_value_errors():
            return torch_dtype(DType(self.dtype))

    def get_element_size(self) -> int:
        """Bytes of one element of `get_torch_dtype`."""
        return self.get_torch_dtype().itemsize


class SafetensorsStreamer:
    """Streams the tensors of safetensors files; a context manager, used as Run:ai Model Streamer's is.

        with SafetensorsStreamer() as streamer:
            streamer.stream_files(paths, device="cuda:0")
            for name, tensor in streamer.get_tensors():
                ...

    Attributes:
        files_to_tensors_metadata: for each path's index, its tensors in the order of the file.
        total_size: bytes of all of them.
        device_str: the device asked for.
    """

    def __init__(self) -> None:
        self.files_to_tensors_metadata: dict[int, list[SafetensorMetadata]] = {}
        self.total_size = 0
        self.device_str: str | None = None
        self._is_open = False
        self._parts: list[Sequence[str]] = []
        self._settings = Settings()
        self._options = Options(device=torch.device("cpu"))
        self._group: Any = None
        self._stream: TensorStream | None = None

    def __enter__(self) -> Self:
        self._is_open = True
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        self._parts = []
        self._close()

    def stream_file(
        self,
        path: str,
        s3_credentials: S3Credentials | None = None,
        device: str | torch.device | None = "cpu",
        is_distributed: bool = False,
        tensor_names: Collection[str] | None = None,
        owned: bool = True,
    ) -> None:
        """`stream_files` of one path."""
        self.stream_files([path], s3_credentials, device, is_distributed, tensor_names, owned)

    def stream_files(
        self,
        paths: list[str],
        s3_credentials: S3Credentials | None = None,
        device: str | torch.device | None = "cpu",
        is_distributed: bool = False,
        tensor_names: Collection[str] | None = None,
        owned: bool = True,
    ) -> None:
        """Read the headers of `paths`; `get_tensors` then gives their tensors.

        Args:
            paths: local paths or s3://, gs://, az:// URIs.
            s3_credentials: win over the environment.
            device: where the tensors are to be.
            is_distributed: with torch.distributed running and its back end fit for the device, each rank reads a part
                of the bytes and every rank yields every tensor; RUNAI_STREAMER_DIST as there (auto: NCCL only).
            tensor_names: only these.
            owned: accepted; what is yielded is always the caller's own.

        Raises:
            ValueError (and Penstock's own error): a file is missing, malformed or truncated; a name of `tensor_names`
                is in no file or in two.
        """
        if isinstance(tensor_names, str):
            raise ValueError("tensor_names must be a collection of names, not a str")
        if tensor_names is not None and len(tensor_names) == 0:
            raise ValueError("tensor_names must not be empty; None takes every tensor")
        if not self._is_open:
            raise ValueError("Streamer not initialized")
        self._close()
        wanted = None if tensor_names is None else frozenset(tensor_names)
        with raising_value_errors():
            paths = [text_of(path) for path in paths]
            options = storage_options(paths[0], s3_credentials) if paths else None
            asked = runai_settings()
            self._settings = Settings.read(
                fetch_threads=asked.fetch_threads, chunk_bytes=asked.chunk_bytes, memory_bytes=asked.memory_bytes
            )
            place = resolve_device("cpu" if device is None else device)
            headers = [_header(path, self._settings, options) for path in paths]
        self.files_to_tensors_metadata = {i: _metadata(header, wanted) for i, header in enumerate(headers)}
        tensors = [one for file in self.files_to_tensors_metadata.values() for one in file]
        self.total_size = sum(one.get_bytesize() for one in tensors)
        self.device_str = "cpu" if device is None else str(device)
        counts = Counter(one.name for one in tensors)
        repeated = sorted(name for name, count in counts.items() if count > 1)
        if wanted is not None:
            if missing := sorted(wanted - counts.keys()):
                raise ValueError(f"tensor_names not found in checkpoint: {missing}")
            if repeated:
                raise ValueError(f"tensor_names appear in more than one file: {repeated}")
        names = None if wanted is None else wanted.__contains__
        self._options = Options(device=place, names=names, storage_options=options, progress=False)
        self._group = _group(asked.distributed, place) if is_distributed else None
        # A weight set has every name once; files that share a name are streamed one after the other, as there.
        self._parts = [[path] for path in paths] if repeated else [paths] if paths else []

    def get_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor asked for, as it arrives. Ownership: the caller's, for as long as it likes.

        Raises:
            ValueError (and Penstock's own error): not inside `with`, or the bytes could not be had.
        """
        if not self._is_open:
            raise ValueError("Streamer not initialized")
        parts, self._parts = self._parts, []
        for part in parts:
            with raising_value_errors():
                self._stream = TensorStream(Session(part, self._options, self._settings), self._group)
            try:
                while True:
                    with raising_value_errors():
                        found = next(self._stream, None)
                    if found is None:
                        break
                    yield found
            finally:
                self._close()

    def _close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


def _header(path: str, settings: Settings, options: dict[str, str] | None) -> Header:
    source = open_source(path, settings=settings, storage_options=options)
    try:
        return read_header(source)
    finally:
        source.close()


def _metadata(header: Header, wanted: Collection[str] | None) -> list[SafetensorMetadata]:
    table = header.tensors
    starts = (table.offset - header.data_offset).tolist()
    return [
        SafetensorMetadata(name, list(shape), str(dtype), Offsets(start, start + nbytes))
        for name, shape, dtype, start, nbytes in zip(
            table.names, table.shapes, table.dtypes, starts, table.nbytes.tolist(), strict=True
        )
        if wanted is None or name in wanted
    ]


def _group(distributed: str, device: torch.device) -> Any:
    """The process group to share the reading over; None: each rank reads for itself."""
    import torch.distributed as dist

    if distributed == "off" or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    backend = dist.get_backend()
    fits = {"nccl": device.type == "cuda", "gloo": device.type == "cpu" and distributed == "on"}
    return dist.group.WORLD if fits.get(backend, False) else None

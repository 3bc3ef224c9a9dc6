"""`SafetensorsStreamer`: the tensors of safetensors files as they arrive, read by `penstock.stream`.

In: paths or URIs. Out: `(name, tensor)`, owned by the caller, and `files_to_tensors_metadata`.
Not here: the loading itself (`loader`), raw ranges (`files`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

from penstock.compat.runai_streamer.objects import S3Credentials, raising_value_errors, storage_options
from penstock.config import Settings, runai_settings
from penstock.loader.load import TensorStream, open_stream
from penstock.loader.session import Options, Session, resolve_device
from penstock.loader.tensor import torch_dtype
from penstock.storage import open_source, text_of
from penstock.storage.safetensors import Header, read_header


@dataclass(frozen=True, slots=True)
class Offsets:
    """The range of a tensor's bytes, from the first byte after the header."""

    start: int
    end: int

    def get_diff(self) -> int:
        """Return the number of bytes."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class SafetensorMetadata:
    """A tensor of a file, as the header describes it."""

    name: str
    shape: list[int]
    dtype: str
    offsets: Offsets

    def get_bytesize(self) -> int:
        """Return the bytes of the tensor."""
        return self.offsets.get_diff()

    def get_item_count(self) -> int:
        """Return the number of elements of the tensor, by the header's shape."""
        return math.prod(self.shape)

    def get_torch_dtype(self) -> torch.dtype:
        """Return the torch dtype. PlanError (a ValueError too) if torch has none."""
        from penstock.types import DType

        with raising_value_errors():
            return torch_dtype(DType(self.dtype))

    def get_element_size(self) -> int:
        """Return the bytes of one element of `get_torch_dtype`."""
        return self.get_torch_dtype().itemsize


class SafetensorsStreamer:
    """A stream of the tensors of safetensors files; a context manager, used like Run:ai Model Streamer's.

        with SafetensorsStreamer() as streamer:
            streamer.stream_files(paths, device="cuda:0")
            for name, tensor in streamer.get_tensors():
                ...

    Attributes:
        files_to_tensors_metadata: path's index -> its tensors in the order of the file.
        total_size: bytes of all these tensors.
        device_str: the requested device.
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
        """Run `stream_files` for one path."""
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
            s3_credentials: they win over the environment.
            device: device of the tensors.
            is_distributed: each rank reads a part of the bytes and every rank yields every tensor, if torch.distributed
                is initialised with a backend for the device; RUNAI_STREAMER_DIST as in the original (auto: NCCL only).
            tensor_names: only these tensors.
            owned: accepted and ignored: yielded tensors are always the caller's own.

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
            limits = runai_settings()
            self._settings = Settings.read(
                fetch_threads=limits.fetch_threads, chunk_bytes=limits.chunk_bytes, memory_bytes=limits.memory_bytes
            )
            place = resolve_device("cpu" if device is None else device)
            headers = [_header(path, self._settings, options) for path in paths]
        self.files_to_tensors_metadata = {i: _metadata(header, wanted) for i, header in enumerate(headers)}
        tensors = [tensor for file in self.files_to_tensors_metadata.values() for tensor in file]
        self.total_size = sum(tensor.get_bytesize() for tensor in tensors)
        self.device_str = "cpu" if device is None else str(device)
        counts = Counter(tensor.name for tensor in tensors)
        repeated = sorted(name for name, count in counts.items() if count > 1)
        if wanted is not None:
            if missing := sorted(wanted - counts.keys()):
                raise ValueError(f"tensor_names not found in checkpoint: {missing}")
            if repeated:
                raise ValueError(f"tensor_names appear in more than one file: {repeated}")
        names = None if wanted is None else wanted.__contains__
        self._options = Options(device=place, names=names, storage_options=options, progress=False)
        self._group = _group(limits.distributed, place) if is_distributed else None
        # A weight set has every name once: files that share a name are streamed one after the other, as in the
        # original.
        self._parts = [[path] for path in paths] if repeated else [paths] if paths else []

    def get_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every requested tensor as it arrives; it belongs to the caller.

        Raises:
            ValueError (and Penstock's own error): not inside `with`, or the bytes cannot be read.
        """
        if not self._is_open:
            raise ValueError("Streamer not initialized")
        parts, self._parts = self._parts, []
        for part in parts:
            with raising_value_errors():
                opens = partial(Session, part, self._options, self._settings)
                self._stream = open_stream(part, self._options, self._group, opens)
            try:
                while True:
                    # Around `next` only: an error that the caller raises at the yield is not ours to change.
                    with raising_value_errors():
                        pair = next(self._stream, None)
                    if pair is None:
                        break
                    yield pair
            finally:
                self._close()

    def _close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


def _header(path: str, settings: Settings, options: dict[str, str] | None) -> Header:
    """Read the header of a file."""
    source = open_source(path, settings=settings, storage_options=options)
    try:
        return read_header(source)
    finally:
        source.close()


def _metadata(header: Header, wanted: Collection[str] | None) -> list[SafetensorMetadata]:
    """Return the tensors of a header, all or those with a wanted name."""
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
    """Return the process group whose ranks share the reading; None: each rank reads for itself."""
    import torch.distributed as dist

    if distributed == "off" or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    backend = dist.get_backend()
    fits = {"nccl": device.type == "cuda", "gloo": device.type == "cpu" and distributed == "on"}
    return dist.group.WORLD if fits.get(backend, False) else None

"""`SafetensorsStreamer`: yield the tensors of safetensors files as they arrive, through `penstock.stream`.

The caller owns each `(name, tensor)`. `files_to_tensors_metadata` describes the tensors.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

from penstock import ReadSettings, TensorStream
from penstock.errors import FormatError, SourceTruncated
from penstock.spi import (
    MIN_CHUNK_BYTES,
    Header,
    LoadSession,
    ReadOptions,
    Settings,
    open_source,
    open_stream,
    read_header,
    resolve_device,
    text_of,
    timed_source,
    torch_dtype,
)
from penstock_hf.runai_streamer.objects import S3Credentials, is_object, raising_value_errors, storage_options
from penstock_hf.runai_streamer.settings import runai_settings


@dataclass(frozen=True, slots=True)
class Offsets:
    """The range of a tensor's bytes, relative to the first byte after the header."""

    start: int
    end: int

    def get_diff(self) -> int:
        """Return the number of bytes."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class SafetensorMetadata:
    """The description of a tensor in a file's header."""

    name: str
    shape: list[int]
    dtype: str
    offsets: Offsets

    def get_bytesize(self) -> int:
        """Return the number of bytes of the tensor."""
        return self.offsets.get_diff()

    def get_item_count(self) -> int:
        """Return the number of elements of the tensor, according to the header."""
        return math.prod(self.shape)

    def get_torch_dtype(self) -> torch.dtype:
        """Return the torch dtype. Raise PlanError (also a ValueError) if torch has no such dtype."""
        from penstock import DType

        with raising_value_errors():
            return torch_dtype(DType(self.dtype))

    def get_element_size(self) -> int:
        """Return the number of bytes per element of the tensor."""
        return self.get_torch_dtype().itemsize


class SafetensorsStreamer:
    """A stream of the tensors in safetensors files, with the Run:ai Model Streamer's interface. A context manager.

        with SafetensorsStreamer() as streamer:
            streamer.stream_files(paths, device="cuda:0")
            for name, tensor in streamer.get_tensors():
                ...

    Attributes:
        files_to_tensors_metadata: the tensors in each file in file order, by the index of the file's path.
        total_size: total size of the tensors in the metadata, in bytes.
        device_str: the requested device.
    """

    def __init__(self) -> None:
        self.files_to_tensors_metadata: dict[int, list[SafetensorMetadata]] = {}
        self.total_size = 0
        self.device_str: str | None = None
        self._is_open = False
        self._parts: list[Sequence[str]] = []
        self._settings = Settings()
        self._options = ReadOptions(device=torch.device("cpu"))
        self._group: Any = None
        self._stream: TensorStream | None = None
        self._owned = True

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
        """Read the headers of the files at `paths`, whose tensors `get_tensors` yields.

        Args:
            paths: local paths or s3://, gs://, az:// URIs.
            s3_credentials: credentials that override the environment.
            device: device of the tensors.
            is_distributed: whether each rank reads only a share of the bytes, although every rank yields every tensor.
                torch.distributed must be initialised with a backend for the device. RUNAI_STREAMER_DIST has the same
                meaning as in the original: "auto" divides reads only with NCCL.
            tensor_names: names of the tensors to yield, or None for all tensors.
            owned: if True, the caller owns each tensor. If `owned` is False, a tensor on the CPU is valid until the
                next tensor is yielded, because its memory is reused.

        Raises:
            ValueError (also a PenstockError): a file is missing, malformed or truncated, or a name in `tensor_names` is
                in no file or in two files.
        """
        if isinstance(tensor_names, str):
            raise ValueError("tensor_names must be a collection of names, not a str")
        if tensor_names is not None and len(tensor_names) == 0:
            raise ValueError("tensor_names must not be empty, pass None for every tensor")
        if not self._is_open:
            raise ValueError("Streamer not initialized")
        self._close()
        wanted = None if tensor_names is None else frozenset(tensor_names)
        with raising_value_errors():
            paths = [text_of(path) for path in paths]
            options = storage_options(paths[0], s3_credentials) if paths else None
            limits = runai_settings()
            memory_bytes = limits.memory_bytes
            # Raise a limit that is too small for Penstock's buffers to the minimum.
            if memory_bytes is not None:
                memory_bytes = max(memory_bytes, 4 * MIN_CHUNK_BYTES)
            self._settings = Settings.read(
                fetch_threads=limits.fetch_threads, chunk_bytes=limits.chunk_bytes, memory_bytes=memory_bytes
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
        self._owned = owned or place.type != "cpu"
        self._options = ReadOptions(
            device=place, names=names, progress=False, settings=ReadSettings(storage_options=options)
        )
        self._group = _group(limits.distributed, place) if is_distributed else None
        # Names in a weight set are unique. If two files contain the same tensor name, stream the files one after
        # another.
        self._parts = [[path] for path in paths] if repeated else [paths] if paths else []

    def get_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every requested tensor as it arrives. The caller owns the tensor unless `owned` was False.

        Raises:
            ValueError (also a PenstockError): this is called outside a `with` block, or the bytes cannot be read.
        """
        if not self._is_open:
            raise ValueError("Streamer not initialized")
        parts, self._parts = self._parts, []
        shared = None if self._owned else _SharedMemory()
        for part in parts:
            with raising_value_errors():
                opens = partial(LoadSession, part, self._options, self._settings)
                self._stream = open_stream(part, self._options, self._group, opens)
            try:
                while True:
                    # Convert only errors from `next`. An error that the caller raises at the `yield` is not converted.
                    with raising_value_errors():
                        pair = next(self._stream, None)
                    if pair is None:
                        break
                    yield pair if shared is None else (pair[0], shared.copy(pair[1]))
            finally:
                self._close()

    def _close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


class _SharedMemory:
    """Memory that holds a copy of one tensor at a time.

    The memory is reused for each tensor, so a program that wrongly keeps a tensor fails in every run instead of
    sometimes.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor that is valid until the next call."""
        if tensor.nbytes > self._memory.nbytes:
            self._memory = torch.empty(tensor.nbytes, dtype=torch.uint8)
        lent = self._memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return lent.copy_(tensor)


def _header(path: str, settings: Settings, options: dict[str, str] | None) -> Header:
    """Read a file's header. If the header is invalid, begin the error message with the original library's message."""
    source = open_source(path, settings=settings, storage_options=options)
    try:
        return read_header(timed_source(source, path, settings))
    except (FormatError, SourceTruncated) as error:
        _word_as_original(error, path)
        raise
    finally:
        source.close()


_WORDS = (
    (r"the header has \d+ bytes, but the format allows \d+|a Git LFS pointer", "the header's size exceeds limit"),
    (r"malformed JSON|header does not begin with", "the header is not valid JSON"),
    (r"Invalid enum value (?P<dtype>'[^']*')", "Unsupported dtype {dtype}"),
    (
        r"data_offsets are \[(?P<start>-?\d+), (?P<stop>-?\d+)\], but (?P<kind>.*) has (?P<nbytes>\d+) bytes",
        "Shape claims {nbytes} bytes ({kind}), but offsets reserve {span} bytes",
    ),
    (r"overlaps ", "a tensor overlaps with next tensor"),
    (r"gap of \d+ bytes", "gaps are not allowed: a tensor does not start where the data before it ends"),
)
"""Penstock's messages, and the original's wording, which programs and the original's tests search for."""


def _word_as_original(error: FormatError | SourceTruncated, path: str) -> None:
    """Put the original library's message in front of an error message."""
    words = None
    if isinstance(error, SourceTruncated) and error.byte_range is not None:
        words = _length_fault(error.byte_range[1], error.byte_range[0])
    elif found := re.fullmatch(r"the file has (\d+) bytes after the last tensor", error.message):
        actual = _get_actual_file_size(path)
        words = "extra trailing bytes" if actual is None else _length_fault(actual - int(found[1]), actual)
    else:
        for pattern, template in _WORDS:
            if found := re.search(pattern, error.message):
                values = found.groupdict()
                if "start" in values:
                    values["span"] = str(int(values["stop"]) - int(values["start"]))
                words = template.format(**values)
                break
    if words is not None:
        error.message = f"{words}: {error.message}"


def _length_fault(expected: int, actual: int) -> str | None:
    """Return the original library's message for a file with a wrong length, or None if the length is right."""
    if actual < expected:
        return f"truncated: header declares {expected} total bytes but the file is only {actual} bytes"
    if actual > expected:
        return f"{actual - expected} extra trailing bytes: {actual} bytes, but the header declares {expected}"
    return None


def _get_actual_file_size(path: str) -> int | None:
    """Return the size of a local file in bytes, or None for an object, whose size would cost a request."""
    return None if is_object(path) else os.path.getsize(path)


def _validate_physical_length(path: str, expected_total_bytes: int, actual_bytes: int | None) -> None:
    """Raise FormatError (also a ValueError) if a file has a different length than its header declares.

    If `actual_bytes` is None, the length is not checked.
    """
    # The original's tests and tools call this function. In Penstock, `read_header` makes the same check for every file.
    fault = None if actual_bytes is None else _length_fault(expected_total_bytes, actual_bytes)
    if fault is not None:
        with raising_value_errors():
            raise FormatError(fault, uri=path)


def _metadata(header: Header, wanted: Collection[str] | None) -> list[SafetensorMetadata]:
    """Return the tensors in a header. If `wanted` is not None, return only the tensors with these names."""
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
    """Return the process group whose ranks divide the reads, or None if every rank reads all bytes."""
    import torch.distributed as dist

    if distributed == "off" or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    backend = dist.get_backend()
    fits = {"nccl": device.type == "cuda", "gloo": device.type == "cpu" and distributed == "on"}
    return dist.group.WORLD if fits.get(backend, False) else None

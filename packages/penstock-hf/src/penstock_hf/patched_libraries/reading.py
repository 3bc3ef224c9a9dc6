"""Read a hub's weight files through the interface of safetensors, in the order in which libraries request tensors.

transformers first requests a slice object for every tensor, and then reads the slices in the natural order of their
names (2 before 10). The first read of a slice tells the reader this order, so that the reader reads tensors ahead.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed

from penstock import ReadSettings, load, safe_open
from penstock.errors import NotFound
from penstock.spi import SafeSlice, deferred

_DIGITS = re.compile(r"(\d+)")


class StreamedFile(safe_open):
    """A file on a hub, whose tensors are read ahead. See `safe_open`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.nbytes = self._open().source.nbytes
        self._asked: list[str] | None = []
        self._lock = threading.Lock()

    def get_slice(self, name: str) -> SafeSlice:
        """See `safe_open.get_slice`. The first read from any slice announces all slices that were requested."""
        inner = super().get_slice(name)
        with self._lock:
            if self._asked is not None:
                self._asked.append(name)
        return _AnnouncingSlice(inner, self)

    def abandon(self) -> None:
        """Close the file even if its slices still exist, because the traceback of a failed load may reference them."""
        with deferred():
            if self._file is not None:
                self._file.close()
            self._file = None

    def announce(self) -> None:
        """Start reading ahead all requested slices in transformers' order. Only the first call has an effect."""
        with self._lock:
            names, self._asked = self._asked, None
        # With tensor parallelism, each rank needs only parts of most tensors, so do not read whole tensors ahead.
        if names is None or self._file is None or _is_one_of_many():
            return
        self.expect(sorted(names, key=in_natural_order))


class _AnnouncingSlice(SafeSlice):
    """A slice object whose first read starts reading ahead all requested slices of the file."""

    def __init__(self, inner: SafeSlice, owner: StreamedFile) -> None:
        self.__dict__.update(inner.__dict__)
        self._owner = owner

    def __getitem__(self, index: Any) -> Any:
        self._owner.announce()
        return super().__getitem__(index)


class DiskFile(StreamedFile):
    """A file on disk, whose tensors a library requests on the CPU and then moves to a GPU.

    `tensor_on` reads a tensor straight to the GPU, and reads the following tensors ahead. Other requests return views
    of the mapped file.
    """

    def __init__(self, path: str, *arguments: Any, memory_bytes: int | None = None, **options: Any) -> None:
        super().__init__(path, *arguments, memory_bytes=memory_bytes, **options)
        self._path = path
        self._memory_bytes = memory_bytes
        self._on_gpu: dict[torch.device, safe_open] = {}
        self._is_ended = False

    def __exit__(self, *error: Any) -> None:
        self._close_on_gpu()
        super().__exit__(*error)

    def abandon(self) -> None:
        """See `StreamedFile.abandon`."""
        self._close_on_gpu()
        super().abandon()

    def get_slice(self, name: str) -> SafeSlice:
        """See `StreamedFile.get_slice`."""
        return LocalSlice(super().get_slice(name), self, name)

    def tensor_on(self, device: torch.device, name: str) -> torch.Tensor | None:
        """Return a tensor on a CUDA device, or None after the file's `with` block. The caller owns the tensor.

        Raise the errors of `safe_open.get_tensor`.
        """
        with self._lock:
            if self._is_ended:
                return None
            file = self._on_gpu.get(device)
            if file is None:
                file = safe_open(self._path, "pt", device, memory_bytes=self._memory_bytes)
                # With tensor parallelism, each rank needs only parts of most tensors.
                if self._asked and not _is_one_of_many():
                    file.expect(sorted(self._asked, key=in_natural_order))
                self._on_gpu[device] = file
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def _close_on_gpu(self) -> None:
        with self._lock:
            self._is_ended = True
            files, self._on_gpu = list(self._on_gpu.values()), {}
        for file in files:
            file.__exit__(None, None, None)


class LocalSlice(SafeSlice):
    """A slice object of a `DiskFile`."""

    def __init__(self, inner: SafeSlice, owner: DiskFile, name: str) -> None:
        self.__dict__.update(inner.__dict__)
        self._owner = owner
        self._name = name

    def on(self, device: torch.device) -> torch.Tensor | None:
        """Return the whole tensor on a CUDA device, or None. See `DiskFile.tensor_on`."""
        return self._owner.tensor_on(device, self._name)


def materialize(original: Callable[..., Any], tensor: Any, device: Any = None, dtype: Any = None) -> Any:
    """Return a tensor of transformers on its device. Read a slice of a `DiskFile` straight to the GPU."""
    place = gpu_of(device) if isinstance(tensor, LocalSlice) else None
    whole = None if place is None else tensor.on(place)
    if whole is None:
        return original(tensor, device, dtype)
    return whole if dtype is None else whole.to(dtype)


class VerifiedFile:
    """A file on a hub that is read completely and compared with its digest before any tensor is returned.

    The first read needs memory for the whole file. Each tensor stays in memory until it is read or the file is closed.
    """

    def __init__(
        self,
        uri: str,
        framework: str = "pt",
        device: Any = "cpu",
        *,
        backend: str = "mmap",
        storage_options: Mapping[str, str] | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        self._uri = uri
        self._device = device
        self._settings = ReadSettings(memory_bytes=memory_bytes, storage_options=storage_options)
        self._header = StreamedFile(
            uri, framework, "cpu", backend=backend, storage_options=storage_options, memory_bytes=memory_bytes
        )
        self.nbytes = self._header.nbytes
        # `StreamedFile` has already rejected any other framework.
        self._is_numpy = framework in {"np", "numpy"}
        self._tensors: dict[str, torch.Tensor] | None = None
        self._lock = threading.Lock()

    def abandon(self) -> None:
        """See `StreamedFile.abandon`."""
        self._header.abandon()
        self._tensors = {}

    def __enter__(self) -> VerifiedFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._header.__exit__(None, None, None)

    def keys(self) -> list[str]:
        """See `safe_open.keys`."""
        return self._header.keys()

    def offset_keys(self) -> list[str]:
        """See `safe_open.offset_keys`."""
        return self._header.offset_keys()

    def metadata(self) -> dict[str, str] | None:
        """See `safe_open.metadata`."""
        return self._header.metadata()

    def get_tensor(self, name: str) -> Any:
        """Return a tensor. Raise NotFound if the file does not contain the tensor or the tensor was already read.

        The first call reads the file, and raises the same errors as `penstock.load`.
        """
        return self.get_part(name, ...)

    def get_part(self, name: str, index: Any) -> Any:
        """Return the slice of a tensor that `index` selects in torch. Raises the same errors as `get_tensor`.

        A whole tensor is returned without a copy, and this object no longer holds it. A slice is a copy, because a
        program may read several slices of the same tensor.
        """
        with self._lock:
            if self._tensors is None:
                self._tensors = dict(load(self._uri, verify=True, progress=False, settings=self._settings))
            if name not in self._tensors:
                fault = f"file does not contain tensor {name}, or the tensor was already read"
                raise NotFound(fault, uri=self._uri, tensor=name)
            tensor = self._tensors[name]
            part = tensor[index]
            if part.numel() == tensor.numel():
                del self._tensors[name]
            else:
                part = part.clone()
        if self._is_numpy:
            return part.numpy()
        return part if self._device is None else part.to(_torch_device(self._device))

    def get_tensors(self) -> dict[str, Any]:
        """Return all tensors. See `get_tensor`."""
        return {name: self.get_tensor(name) for name in self.offset_keys()}

    def get_slice(self, name: str) -> Any:
        """See `safe_open.get_slice`."""
        return _VerifiedSlice(self._header.get_slice(name), self, name)


class _VerifiedSlice:
    """A handle for one tensor in a verified file. See `VerifiedFile.get_part`."""

    def __init__(self, header: SafeSlice, owner: VerifiedFile, name: str) -> None:
        self.get_shape = header.get_shape
        self.get_dtype = header.get_dtype
        self._owner = owner
        self._name = name

    def __getitem__(self, index: Any) -> Any:
        return self._owner.get_part(self._name, index)


def gpu_of(device: Any) -> torch.device | None:
    """Return the CUDA device, with its index, that an argument of a library means. Return None for other devices."""
    if device is None or isinstance(device, bool):
        return None
    place = _torch_device(device)
    if place.type != "cuda":
        return None
    return torch.device("cuda", torch.cuda.current_device() if place.index is None else place.index)


def _torch_device(device: Any) -> torch.device:
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def in_natural_order(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that compares numbers in names by value, and sorts numbers before words."""
    parts = [part for piece in name.split(".") for part in _DIGITS.split(piece) if part]
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]


def _is_one_of_many() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1

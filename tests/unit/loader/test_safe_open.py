"""`safe_open` has the keys, tensors, slices and errors of safetensors, and reads only the needed bytes."""

import json
import os
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, FormatError, NotFound, PlanError, SourceTruncated
from penstock.loader import safe_open as module
from penstock.loader.index import IndexRefused
from penstock.loader.safe_open import load_file, safe_open
from penstock.storage import MemorySource
from penstock.types import DType, bits_to_bytes

F6 = {DType.F6_E2M3, DType.F6_E3M2}
HELD = [d for d in DType if d not in F6]
PLAIN = [d for d in HELD if d.name[:2] not in ("F4", "F8", "BF")]
"""What numpy holds by itself."""

CUBE = (3, 4, 5)


def write(path: Path, tensors: dict[str, tuple[DType, Sequence[int]]], metadata: dict[str, str] | None = None) -> Path:
    """Write a file by hand, so that the expected bytes do not depend on a writer."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    body = b""
    for name, (dtype, shape) in tensors.items():
        nbytes = bits_to_bytes(int(np.prod(shape)), dtype)
        random = np.random.default_rng(len(body))
        body_part = random.integers(0, 2 if dtype is DType.BOOL else 256, nbytes, dtype=np.uint8).tobytes()
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(body), len(body) + nbytes]}
        body += body_part
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + body)
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors: dict[str, tuple[DType, Sequence[int]]] = {f"z.{d}": (d, (4, 8)) for d in sorted(DType, reverse=True)}
    tensors |= {
        "a.scalar": (DType.F32, ()),
        "empty": (DType.F32, (0, 3)),
        "cube": (DType.I32, CUBE),
        "empty.f4": (DType.F4, (0, 4)),
        "f4.cube": (DType.F4, (2, 3, 4)),
    }
    return write(tmp_path_factory.mktemp("safe_open") / "all.safetensors", tensors, {"k": "v", "ä": "ü"})


def theirs(path: Path, framework: str = "pt") -> Any:
    return safetensors.safe_open(path, framework=framework)


class Recorder(MemorySource):
    """A source in memory that counts the requested bytes."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data, uri="s3://bucket/all.safetensors")
        self.read_bytes = 0

    def readv(self, offset: int, buffers: Sequence[memoryview]) -> str:
        self.read_bytes += sum(b.nbytes for b in buffers)
        return super().readv(offset, buffers)


@pytest.fixture
def remote(file: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Callable[..., safe_open], Recorder]:
    source = Recorder(file.read_bytes())
    monkeypatch.setattr(module, "open_source", lambda uri, **_: source)
    return lambda framework="pt": safe_open(source.uri, framework), source


def assert_same(mine: Any, true: Any) -> None:
    assert type(mine) is type(true)
    assert mine.dtype == true.dtype
    assert tuple(mine.shape) == tuple(true.shape)
    if isinstance(true, torch.Tensor):
        # The CPU cannot compare float4 and float8 elements, so compare their bytes.
        mine, true = (_bytes_of(t) for t in (mine, true))
    assert mine.tobytes() == true.tobytes()


def _bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    if not tensor.numel():
        return np.empty(0)
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy()


def outcome(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or the error that it raises."""
    try:
        return call()
    except (Exception, BaseException) as error:  # noqa: BLE001 - a panic of the ground truth is no Exception
        return error


class TestWholeTensors:
    def test_names_shapes_and_dtypes_match_safetensors(self, file: Path) -> None:
        with safe_open(file, "pt") as mine, theirs(file) as true:
            assert mine.keys() == true.keys()
            assert mine.offset_keys() == true.offset_keys()
            assert mine.metadata() == true.metadata()
            for name in true.keys():  # noqa: SIM118 - not a dict
                assert mine.get_slice(name).get_shape() == true.get_slice(name).get_shape()
                assert mine.get_slice(name).get_dtype() == true.get_slice(name).get_dtype()

    def test_file_without_metadata_returns_none(self, tmp_path: Path) -> None:
        path = write(tmp_path / "m.safetensors", {"a": (DType.F32, (2,))})
        assert safe_open(path).metadata() is None

    @pytest.mark.parametrize("dtype", HELD)
    @pytest.mark.parametrize("backend", ["mmap", "pread"])
    def test_every_dtype_matches_safetensors(self, file: Path, dtype: DType, backend: str) -> None:
        with safe_open(file, "pt", backend=backend) as mine, theirs(file) as true:
            assert_same(mine.get_tensor(f"z.{dtype}"), true.get_tensor(f"z.{dtype}"))

    @pytest.mark.parametrize("name", ["a.scalar", "empty", "cube", "empty.f4", "f4.cube"])
    @pytest.mark.parametrize("backend", ["mmap", "pread"])
    def test_every_shape_class_matches_safetensors(self, file: Path, name: str, backend: str) -> None:
        with safe_open(file, "pt", backend=backend) as mine, theirs(file) as true:
            assert_same(mine.get_tensor(name), true.get_tensor(name))

    @pytest.mark.parametrize("name", ["a.scalar", "empty", "cube", *(f"z.{d}" for d in PLAIN)])
    @pytest.mark.parametrize("backend", ["mmap", "pread"])
    @pytest.mark.parametrize("framework", ["np", "numpy"])
    def test_numpy_tensor_matches_safetensors_and_is_writable(
        self, file: Path, name: str, backend: str, framework: str
    ) -> None:
        with safe_open(file, framework, backend=backend) as mine, theirs(file, "np") as true:
            found = mine.get_tensor(name)
            assert_same(found, true.get_tensor(name))
            assert found.flags.writeable

    @pytest.mark.parametrize("backend", ["mmap", "pread"])
    def test_get_tensors_and_load_file_match_safetensors(self, tmp_path: Path, backend: str) -> None:
        tensors: dict[str, tuple[DType, Sequence[int]]] = {
            "odd": (DType.U8, (3,)),
            "after.odd": (DType.F32, (5,)),
            "none": (DType.F16, (0,)),
            "big": (DType.I16, (700_000,)),
            "small": (DType.BF16, (7, 3)),
        }
        path = write(tmp_path / "m.safetensors", tensors)
        true = safetensors.torch.load_file(path)
        for mine in (safe_open(path, backend=backend).get_tensors(), load_file(path, "cpu", backend=backend)):
            assert list(mine) == list(tensors)
            for name in tensors:
                assert_same(mine[name], true[name])
                assert mine[name].data_ptr() % mine[name].element_size() == 0
        arrays = safe_open(path, "np", backend=backend)
        assert_same(arrays.get_tensor("after.odd"), theirs(path, "np").get_tensor("after.odd"))

    def test_file_without_tensors_has_no_keys(self, tmp_path: Path) -> None:
        path = write(tmp_path / "m.safetensors", {})
        assert load_file(path) == {}
        assert safe_open(path).keys() == []

    def test_each_get_tensor_call_returns_new_tensor(self, file: Path) -> None:
        with safe_open(file) as f:
            first, second = f.get_tensor("cube"), f.get_tensor("cube")
        first.zero_()
        assert second.count_nonzero() > 0
        assert load_file(file_without_f6(file))["cube"].count_nonzero() > 0

    @pytest.mark.parametrize("framework", ["pt", "np"])
    @pytest.mark.parametrize("dtype", sorted(F6))
    def test_f6_tensor_raises_safetensor_error(self, file: Path, framework: str, dtype: DType) -> None:
        with pytest.raises(safetensors.SafetensorError):
            theirs(file, framework).get_tensor(f"z.{dtype}")
        with pytest.raises(safetensors.SafetensorError) as caught:
            safe_open(file, framework).get_tensor(f"z.{dtype}")
        assert isinstance(caught.value, PlanError)

    @pytest.mark.parametrize("device", ["cpu", None, torch.device("cpu"), "cpu:0"])
    def test_every_cpu_device_spelling_is_accepted(self, file: Path, device: Any) -> None:
        assert safe_open(file, "pt", device=device).get_tensor("cube").device.type == "cpu"


def file_without_f6(file: Path) -> Path:
    return write(file.parent / "plain.safetensors", {"cube": (DType.I32, CUBE)})


TORCH_FORMS: list[Any] = [
    np.s_[:], 0, -1, -3, np.s_[1:2], np.s_[::2], np.s_[2:1], np.s_[5:9], np.s_[-2:], np.s_[:-1], np.s_[-10:10],
    ..., np.s_[..., 0], np.s_[0, ...], np.s_[0, ..., 1], (..., ...), None, (None, 0), (0, None), True, False, (True,),
    (0, 1), (0, 1, 2), (), np.s_[:, :], np.s_[:, 1:3, ::2], np.s_[1:, 0], [0, 2], [-1, 0], ([0, 2],),
    (slice(None), [0, 2]), ([0, 1], [1, 2]), ([0, 1], slice(1, 3)), [], [True, False, True], np.array([0, 2]),
    np.array([True, False, True]), np.int64(1), torch.tensor([0, 2]), torch.tensor(1), (0, slice(None), [1, 2]),
    torch.tensor([True, False, True]), torch.ones(CUBE, dtype=torch.bool), range(2), slice(np.int64(0), np.int64(2)),
    slice(0, 10**30), slice(-3, None, 2), np.s_[::2, ::2], np.s_[::100], (0, [1, 2]), ([0], None),
    (slice(None), None, [1]), (Ellipsis, [0, 1]), (1, Ellipsis, [0, 1]),
    # These indexes are invalid.
    -4, 3, np.s_[::-1], np.s_[::0], (0, 0, 0, 0), "a", 1.5, slice(0, 1.5), b"a", {}, {1}, 10**30, [0, 7],
]  # fmt: skip


class TestTorchSlices:
    """For `pt`, every index and error of torch behaves as in torch."""

    @pytest.mark.parametrize("index", TORCH_FORMS, ids=repr)
    @pytest.mark.parametrize("name", ["cube", "a.scalar", "empty"])
    @pytest.mark.parametrize("place", ["mapped", "read", "remote"])
    def test_every_kind_of_index_matches_safetensors(
        self, file: Path, name: str, index: Any, place: str, remote: tuple[Callable[..., safe_open], Recorder]
    ) -> None:
        true = outcome(lambda: theirs(file).get_slice(name)[index])
        mine_file = remote[0]() if place == "remote" else None
        if mine_file is None:
            mine_file = _local(file, backend="mmap" if place == "mapped" else "pread")
        mine = outcome(lambda: mine_file.get_slice(name)[index])
        if isinstance(true, BaseException):
            assert type(mine) is type(true)
            assert str(mine) == str(true)
        else:
            assert_same(mine, true)

    @pytest.mark.parametrize("dtype", [d for d in HELD if d is not DType.F4])
    @pytest.mark.parametrize("index", [0, np.s_[1:3], np.s_[:, 2:7:2], np.s_[-1, -1]], ids=repr)
    def test_slice_of_every_dtype_matches_safetensors(
        self, file: Path, dtype: DType, index: Any, remote: tuple[Callable[..., safe_open], Recorder]
    ) -> None:
        true = theirs(file).get_slice(f"z.{dtype}")[index]
        assert_same(remote[0]().get_slice(f"z.{dtype}")[index], true)

    @pytest.mark.parametrize("index", [0, np.s_[1:], np.s_[:, 1:3], np.s_[:, :, 1:], np.s_[0, 0, 0], ...], ids=repr)
    def test_f4_slice_matches_unsliced_tensor(
        self, file: Path, index: Any, remote: tuple[Callable[..., safe_open], Recorder]
    ) -> None:
        whole = theirs(file).get_tensor("f4.cube")
        for mine in (_local(file, backend="mmap"), remote[0]()):
            assert_same(mine.get_slice("f4.cube")[index], whole[index])

    def test_slice_stays_readable_after_close(self, file: Path) -> None:
        with safe_open(file) as mine, theirs(file) as true:
            kept, wanted = mine.get_slice("cube"), true.get_slice("cube")
        assert_same(kept[1:], wanted[1:])


def _local(file: Path, *, backend: str) -> safe_open:
    with pytest.MonkeyPatch.context() as patch:
        from penstock.storage import open_source

        patch.setattr(module, "open_source", open_source)
        return safe_open(file, backend=backend)


entries = st.one_of(
    st.integers(-8, 8),
    st.builds(slice, *[st.none() | st.integers(-9, 9)] * 2, st.none() | st.integers(1, 4)),
    st.just(...),
    st.none(),
    st.lists(st.integers(-3, 3), max_size=3),
)
indices = st.one_of(entries, st.lists(entries, max_size=4).map(tuple))


class TestRandomSlices:
    @settings(max_examples=300, deadline=None)
    @given(shape=st.lists(st.integers(0, 7), max_size=4), index=indices)
    def test_random_slice_matches_torch(
        self, tmp_path_factory: pytest.TempPathFactory, shape: list[int], index: Any
    ) -> None:
        path = write(tmp_path_factory.getbasetemp() / "h.safetensors", {"x": (DType.I16, shape)})
        true = outcome(lambda: safetensors.safe_open(path, "pt").get_slice("x")[index])
        for backend in ("mmap", "pread"):
            mine = outcome(lambda backend=backend: safe_open(path, backend=backend).get_slice("x")[index])
            if isinstance(true, BaseException):
                assert type(mine) is type(true)
            else:
                assert_same(mine, true)

    @settings(max_examples=300, deadline=None)
    @given(
        shape=st.lists(st.integers(1, 7), max_size=4),
        index=st.lists(
            st.one_of(
                st.integers(-8, 8),
                st.builds(slice, *[st.none() | st.integers(-9, 9)] * 2, st.none() | st.integers(1, 4)),
            ),
            max_size=4,
        ).map(tuple),
    )
    def test_random_slice_matches_numpy(
        self, tmp_path_factory: pytest.TempPathFactory, shape: list[int], index: Any
    ) -> None:
        path = write(tmp_path_factory.getbasetemp() / "h.safetensors", {"x": (DType.I16, shape)})
        whole = safetensors.safe_open(path, "np").get_tensor("x")
        true = outcome(lambda: whole[(*index, ...)])
        for backend in ("mmap", "pread"):
            mine = outcome(lambda backend=backend: safe_open(path, "np", backend=backend).get_slice("x")[index])
            if isinstance(true, BaseException):
                assert isinstance(mine, IndexRefused)
            else:
                assert_same(mine, true)


class TestNumpySlices:
    @pytest.mark.parametrize(
        "index",
        [np.s_[:], 0, -1, True, (True,), np.s_[1:2], np.s_[::2], ..., np.s_[..., 0], np.s_[0, ...], np.s_[0, ..., 1],
         (0, 1, 2), (), [], np.s_[:, 1:3, ::2], np.int64(1), np.array(1), torch.tensor(1),
         slice(np.int64(0), np.int64(2)), np.s_[::100]],
        ids=repr,
    )  # fmt: skip
    def test_numpy_slice_matches_safetensors(self, file: Path, index: Any) -> None:
        true = theirs(file, "np").get_slice("cube")[index]
        for backend in ("mmap", "pread"):
            assert_same(safe_open(file, "np", backend=backend).get_slice("cube")[index], true)

    @pytest.mark.parametrize(
        "index",
        [-4, 3, np.s_[::-1], np.s_[::0], (..., ...), None, (None, 0), [0, 2], ([0, 2],), np.array([0, 2]), range(2),
         (0, 0, 0, 0), "a", 1.5, b"a", {}, 10**30],
        ids=repr,
    )  # fmt: skip
    def test_index_unsupported_by_safetensors_raises(self, file: Path, index: Any) -> None:
        with pytest.raises(safetensors.SafetensorError):
            theirs(file, "np").get_slice("cube")[index]
        with pytest.raises(safetensors.SafetensorError) as caught:
            safe_open(file, "np").get_slice("cube")[index]
        assert isinstance(caught.value, IndexError)
        assert caught.value.blame == "plan"

    def test_float_slice_bound_raises_type_error(self, file: Path) -> None:
        with pytest.raises(TypeError):
            safe_open(file, "np").get_slice("cube")[0:1.5]

    @pytest.mark.parametrize("index", [np.s_[2:1], np.s_[5:9], np.s_[-2:], np.s_[:, -10:10], np.s_[:7]], ids=repr)
    def test_out_of_range_and_negative_slices_match_numpy(self, file: Path, index: Any) -> None:
        whole = theirs(file, "np").get_tensor("cube")
        assert_same(safe_open(file, "np").get_slice("cube")[index], whole[index])


class TestSliceReads:
    def test_row_slice_reads_only_its_rows(self, remote: tuple[Callable[..., safe_open], Recorder]) -> None:
        opened, source = remote
        f = opened()
        before = source.read_bytes
        f.get_slice("cube")[1]
        assert source.read_bytes - before == 4 * 5 * 4
        f.get_slice("cube")[2, 3]
        assert source.read_bytes - before == 4 * 5 * 4 + 5 * 4

    def test_column_slice_reads_only_its_byte_runs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write(tmp_path / "wide.safetensors", {"wide": (DType.U8, (4, 1 << 20))})
        source = Recorder(path.read_bytes())
        monkeypatch.setattr(module, "open_source", lambda uri, **_: source)
        f = safe_open(source.uri, "np")
        before = source.read_bytes
        part = f.get_slice("wide")[:, 1000:3000:2]
        assert source.read_bytes - before == 4 * 1999
        assert_same(part, np.ascontiguousarray(theirs(path, "np").get_slice("wide")[:, 1000:3000:2]))

    def test_invalid_index_reads_no_bytes(self, remote: tuple[Callable[..., safe_open], Recorder]) -> None:
        opened, source = remote
        f = opened()
        before = source.read_bytes
        with pytest.raises(IndexError):
            f.get_slice("cube")[3]
        with pytest.raises(IndexError):
            f.get_slice("cube")[0, 0, 0, 0]
        assert source.read_bytes == before


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("many") / "big.safetensors"
    return write(path, {"t": (DType.I16, (40, 512, 1024)), "u": (DType.U8, (3,))})


class TestLargeFiles:
    """Large tensors and slices, and several reads over a network, use the engine."""

    @pytest.mark.parametrize("index", [(), np.s_[1:39], np.s_[:, 3:5], np.s_[::7, :, 1000:]])
    def test_large_file_slices_match_safetensors(self, big: Path, index: Any) -> None:
        with safe_open(big, backend="pread") as mine, theirs(big) as true:
            for _ in range(2):
                found = mine.get_slice("t")[index]
                assert_same(found.contiguous(), true.get_tensor("t")[index].contiguous())
        assert load_file(big, backend="pread").keys() == {"t", "u"}

    def test_forked_child_reads_large_slice(self, big: Path) -> None:
        with safe_open(big, backend="pread") as mine:
            part = mine.get_slice("t")
            true = part[:, 3:500]
            child = os.fork()
            if not child:
                os._exit(0 if np.array_equal(part[:, 3:500].numpy(), true.numpy()) else 1)
            assert os.waitpid(child, 0)[1] == 0
            assert torch.equal(part[:, 3:500], true)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock")]

    def test_strided_slice_of_remote_file_reads_few_bytes(self, big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source = Recorder(big.read_bytes())
        monkeypatch.setattr(module, "open_source", lambda uri, **_: source)
        with safe_open(source.uri) as mine, theirs(big) as true:
            before = source.read_bytes
            assert_same(mine.get_slice("t")[::8, 0], true.get_tensor("t")[::8, 0].contiguous())
            assert source.read_bytes - before < 2**20
            assert_same(mine.get_tensor("t"), true.get_tensor("t"))

    def test_failed_slice_leaves_file_usable(self, big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source = Recorder(big.read_bytes())
        monkeypatch.setattr(module, "open_source", lambda uri, **_: source)
        with safe_open(source.uri) as mine, theirs(big) as true:
            with monkeypatch.context() as patch:
                patch.setattr(Recorder, "readv", lambda *_: (_ for _ in ()).throw(SourceTruncated("cut")))
                with pytest.raises(SourceTruncated):
                    mine.get_slice("t")[:, :8]
            assert_same(mine.get_slice("t")[:, :8], true.get_tensor("t")[:, :8].contiguous())


class TestErrors:
    def test_missing_tensor_error_contains_its_name(self, file: Path) -> None:
        for ask in ("get_tensor", "get_slice"):
            with pytest.raises(safetensors.SafetensorError, match="does not contain tensor nope") as caught:
                getattr(safe_open(file), ask)("nope")
            assert isinstance(caught.value, NotFound)
            assert caught.value.tensor == "nope"

    @pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this build of torch has CUDA")
    @pytest.mark.parametrize("device", ["cuda:99", "cuda", 0])
    def test_build_without_cuda_raises_class_of_safetensors_at_first_tensor(
        self, file: Path, device: str | int
    ) -> None:
        def take(opened: Any) -> None:
            opened.get_tensor("cube")

        def take_slice(opened: Any) -> None:
            opened.get_slice("cube")[:1]

        for call in (take, take_slice):
            with safetensors.safe_open(file, "pt", device=device) as opened, pytest.raises(Exception) as theirs:
                call(opened)
            with safe_open(file, "pt", device=device) as opened, pytest.raises(type(theirs.value)) as caught:
                call(opened)
            assert isinstance(caught.value, ConfigError) and "install torch for CUDA" in caught.value.hint
        with pytest.raises(RuntimeError):
            load_file(file, device=device)

    def test_call_on_closed_file_raises(self, file: Path) -> None:
        with safe_open(file) as f:
            pass
        calls = (f.keys, f.offset_keys, f.metadata, f.get_tensors, lambda: f.get_tensor("cube"))
        for call in (*calls, lambda: f.get_slice("cube")):
            with pytest.raises(safetensors.SafetensorError, match="closed") as caught:
                call()
            assert isinstance(caught.value, ConfigError)

    def test_missing_file_raises_not_found(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError) as caught:
            safe_open(tmp_path / "none.safetensors", "pt")
        assert isinstance(caught.value, NotFound)

    @pytest.mark.parametrize("raw", [b"", b"abc", b"hello world, this is no such file", struct.pack("<Q", 2**63) * 4])
    def test_invalid_file_raises_format_error(self, tmp_path: Path, raw: bytes) -> None:
        path = tmp_path / "bad.safetensors"
        path.write_bytes(raw)
        with pytest.raises(safetensors.SafetensorError):
            theirs(path)
        with pytest.raises(safetensors.SafetensorError) as caught:
            safe_open(path, "pt")
        assert isinstance(caught.value, FormatError)

    @pytest.mark.parametrize("device", ["bogus", "meta", "0", 1.5, -2])
    def test_invalid_device_raises_config_error(self, file: Path, device: Any) -> None:
        with pytest.raises(safetensors.SafetensorError) as caught:
            safe_open(file, "pt", device=device)
        assert isinstance(caught.value, ConfigError)

    def test_numpy_framework_with_device_raises(self, file: Path) -> None:
        with pytest.raises(safetensors.SafetensorError, match="numpy"):
            safe_open(file, "np", device="cuda:0")

    @pytest.mark.parametrize("keyword", [{"framework": "bogus"}, {"backend": "bogus"}])
    def test_unknown_option_error_contains_its_value(self, file: Path, keyword: dict[str, str]) -> None:
        with pytest.raises(safetensors.SafetensorError, match="bogus"):
            safe_open(file, **{"framework": "pt", **keyword})

    def test_wrong_argument_types_raise_type_error(self, file: Path) -> None:
        with pytest.raises(TypeError):
            safe_open(file, None)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            safe_open(3)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            safe_open(file).get_tensor(3)  # type: ignore[arg-type]

    def test_missing_tensor_raises_not_found_without_safetensors_import(
        self, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delitem(__import__("sys").modules, "safetensors")
        with pytest.raises(NotFound) as caught:
            safe_open(file).get_tensor("nope")
        assert type(caught.value) is NotFound

"""safetensors with Penstock's reader: what is replaced, what stays, and how the replacement is undone."""

import inspect
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from tests.support.servers.http_server import RangeServer

from penstock.errors import PenstockError
from penstock.loader.safe_open import safe_open as ours
from penstock_hf.safetensors import install, installed, is_gpu, uninstall


class Kept:
    """A holder of the original outside the globals of this module, which would be replaced too."""

    safe_open = safetensors.safe_open


TENSORS = {f"layer.{index}.weight": torch.arange(16.0).view(4, 4) + index for index in range(30)}


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    yield
    assert safetensors.safe_open is Kept.safe_open
    assert safetensors.torch.safe_open is Kept.safe_open


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("safetensors") / "lora.safetensors"
    safetensors.torch.save_file(TENSORS, path, metadata={"format": "pt"})
    return path


def are_equal(tensors: dict[str, torch.Tensor]) -> bool:
    return tensors.keys() == TENSORS.keys() and all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)


def test_local_file_uses_original_safetensors(path: Path) -> None:
    with installed():
        assert type(safetensors.safe_open(path, "pt")) is Kept.safe_open
        assert are_equal(safetensors.torch.load_file(path))
        assert set(safetensors.numpy.load_file(path)) == set(TENSORS)


def test_every_function_reads_uri_through_penstock(path: Path) -> None:
    with RangeServer(path.parent) as server, installed():
        uri = f"{server.url}/{path.name}"
        with safetensors.safe_open(uri, framework="pt") as file:
            assert type(file) is ours
            assert isinstance(file, safetensors.safe_open)
            assert file.metadata() == {"format": "pt"}
            assert torch.equal(file.get_slice("layer.3.weight")[1:3], TENSORS["layer.3.weight"][1:3])
        assert are_equal(safetensors.torch.load_file(uri))
        arrays = safetensors.numpy.load_file(uri)
        assert np.array_equal(arrays["layer.7.weight"], TENSORS["layer.7.weight"].numpy())
        model = torch.nn.Linear(4, 4, bias=False)
        model.register_parameter("weight", torch.nn.Parameter(torch.zeros(4, 4)))
        missing, unexpected = safetensors.torch.load_model(model, uri, strict=False)
        assert missing == {"weight"} or missing == ["weight"]
        assert len(unexpected) == len(TENSORS)
        assert are_equal(safetensors.torch.load_file(f"file://{path}"))


def test_names_in_importing_modules_are_patched_and_restored(path: Path) -> None:
    before = types.ModuleType("program_before")
    exec("from safetensors import safe_open; from safetensors.torch import load_file", before.__dict__)
    sys.modules["program_before"] = before
    meanwhile = types.ModuleType("program_meanwhile")
    sys.modules["program_meanwhile"] = meanwhile
    try:
        with installed():
            assert before.safe_open is safetensors.safe_open is not Kept.safe_open
            exec("from safetensors import safe_open", meanwhile.__dict__)
            assert meanwhile.safe_open is safetensors.safe_open
        assert before.safe_open is meanwhile.safe_open is Kept.safe_open
        assert before.load_file is safetensors.torch.load_file
    finally:
        del sys.modules["program_before"], sys.modules["program_meanwhile"]


def test_patched_function_after_uninstall_calls_original(path: Path) -> None:
    with installed():
        kept = safetensors.safe_open
    assert type(kept(path, "pt")) is Kept.safe_open
    with pytest.raises(FileNotFoundError):
        kept("http://127.0.0.1:9/none.safetensors", "pt")


def test_nested_install_stays_until_outermost_uninstall() -> None:
    with installed():
        with installed():
            install()
        assert safetensors.safe_open is not Kept.safe_open
        uninstall()
        assert safetensors.safe_open is not Kept.safe_open
    uninstall()
    assert safetensors.safe_open is Kept.safe_open


def test_concurrent_install_and_uninstall_is_safe(path: Path) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(5):
                with installed():
                    assert are_equal(safetensors.torch.load_file(path))
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors


def test_replacement_can_be_inspected_and_pickled(path: Path) -> None:
    opened_before = Kept.safe_open(path, "pt")
    with installed():
        replacement = safetensors.safe_open
        assert inspect.isclass(replacement)
        assert replacement.__name__ == "safe_open"
        assert replacement.__doc__ == Kept.safe_open.__doc__
        assert inspect.signature(replacement) == inspect.signature(Kept.safe_open)
        assert isinstance(opened_before, replacement)
        assert not isinstance(path, replacement)
        assert issubclass(Kept.safe_open, replacement)
        assert replacement.get_tensor is Kept.safe_open.get_tensor
        for each in (replacement, safetensors.torch.load_file):
            assert pickle.loads(pickle.dumps(each)) is each  # noqa: S301


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((), {}),
        (("{path}",), {}),
        (("{path}.none", "pt"), {}),
        (("{path}", "unknown"), {}),
        (("{path}", "pt"), {"device": "nonsense"}),
        (("{path}", "pt"), {"backend": "nonsense"}),
        ((b"bytes", "pt"), {}),
        ((None, "pt"), {}),
        (("", "pt"), {}),
        (("nul\0", "pt"), {}),
        (("vault://x/y", "pt"), {}),
        ((".", "pt"), {}),
    ],
)
def test_wrong_arguments_raise_original_error(
    path: Path, arguments: tuple[object, ...], options: dict[str, object]
) -> None:
    filled = tuple(value.format(path=path) if isinstance(value, str) else value for value in arguments)
    with pytest.raises(Exception) as theirs:
        Kept.safe_open(*filled, **options)
    with installed(), pytest.raises(Exception) as raised:
        safetensors.safe_open(*filled, **options)
    assert type(raised.value) is type(theirs.value)
    assert str(raised.value) == str(theirs.value)


def test_missing_uri_raises_file_not_found(path: Path) -> None:
    with RangeServer(path.parent) as server, installed(), pytest.raises(FileNotFoundError):
        safetensors.torch.load_file(f"{server.url}/none.safetensors")


def test_corrupt_remote_file_raises_safetensor_error(path: Path) -> None:
    damaged = {"bad.safetensors": path.read_bytes()[:-5]}
    with RangeServer(damaged) as server, installed(), pytest.raises(safetensors.SafetensorError):
        safetensors.torch.load_file(f"{server.url}/bad.safetensors")


KINDS = {
    "F32": torch.arange(24.0).view(4, 6),
    "row": torch.arange(6.0),
    "scalar": torch.tensor(3.0),
    "empty": torch.ones(0, 3),
    "BF16": torch.ones(4, 6).bfloat16(),
    **{str(dtype): torch.ones(4, 4).to(dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)},
    "F8_E8M0": torch.ones(4, 4, dtype=torch.uint8).view(torch.float8_e8m0fnu),
    "bool": torch.ones(4, dtype=torch.bool),
    "C64": torch.ones(4, dtype=torch.complex64),
}
INDEXES = [
    *((), 0, -1, 5, -7, 2**70, -(2**70), None, ..., (..., ...), (0, 0, 0), 1.5, "a", b"x", 1j, {}, object(), (1.0,)),
    *(slice(None), slice(1, 3), slice(-5, -1, -1), slice(5, 0, -1), slice(None, None, 0), slice(None, None, -2)),
    *(slice(-3, None, -1), slice(1.5), slice("a", None), slice(None, None, 1.5), slice(0, 2, 2), (slice(None), 9)),
    *((slice(None), slice(None, None, -1)), [], [0], [0, 1], (0, [0]), True, np.int64(1), np.int64(-9), range(2)),
    *(np.array([0, 1]), np.array([True, False]), torch.tensor(1), (None, 0), (slice(None),) * 3, ((0,),)),
]


def raised(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - compared
        return error
    return None


@pytest.mark.parametrize("framework", ["np", "pt"])
def test_installed_replacement_raises_original_error_classes(framework: str, tmp_path: Path) -> None:
    path = tmp_path / "kinds.safetensors"
    safetensors.torch.save_file(KINDS, path)
    theirs = Kept.safe_open(path, framework)
    with installed():
        mine = safetensors.safe_open(f"file://{path}", framework)
    wrong = []
    for name in [*KINDS, "absent", 3, None]:
        calls: list[Callable[[Any], object]] = [
            lambda file, name=name: file.get_tensor(name),
            lambda file, name=name: file.get_slice(name).get_dtype(),
            *(lambda file, name=name, index=index: file.get_slice(name)[index] for index in INDEXES),
        ]
        for number, call in enumerate(calls):
            original, error = raised(lambda call=call: call(theirs)), raised(lambda call=call: call(mine))
            # As documented, Penstock accepts some indexes that raise errors in the original.
            if error is not None and not isinstance(error, type(original)):
                wrong.append((name, number, original, error))
            if isinstance(error, PenstockError):
                assert type(pickle.loads(pickle.dumps(error))) is type(error)  # noqa: S301 - made here
    assert not wrong


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cuda", True),
        ("cuda:1", True),
        (0, True),
        (torch.device("cuda", 1), True),
        ("cuda:2", False),
        (2, False),
        ("cpu", False),
        (None, False),
        (True, False),
        ("nonsense", False),
        (1.5, False),
    ],
)
def test_only_existing_cuda_device_is_gpu(device: Any, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert is_gpu(device) is expected


def test_host_without_gpu_keeps_original_reader(path: Path) -> None:
    assert not is_gpu("cuda")
    with installed(), pytest.raises((RuntimeError, AssertionError)) as ours:
        safetensors.safe_open(path, "pt", "cuda").get_tensor("layer.0.weight")
    with pytest.raises(type(ours.value)):
        safetensors.safe_open(path, "pt", "cuda").get_tensor("layer.0.weight")

"""safetensors with Penstock under it: what is replaced, what stays, and how it is undone."""

import inspect
import pickle
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

from penstock.compat.safetensors import install, installed, uninstall
from penstock.loader.safe_open import safe_open as ours
from penstock.testing.http_server import RangeServer


class Kept:
    """Not a global of this module, which would be replaced too."""

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


def same(tensors: dict[str, torch.Tensor]) -> bool:
    return tensors.keys() == TENSORS.keys() and all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)


def test_a_local_file_is_read_by_the_original(path: Path) -> None:
    with installed():
        assert type(safetensors.safe_open(path, "pt")) is Kept.safe_open
        assert same(safetensors.torch.load_file(path))
        assert set(safetensors.numpy.load_file(path)) == set(TENSORS)


def test_a_uri_is_read_by_penstock_through_every_function(path: Path) -> None:
    with RangeServer(path.parent) as server, installed():
        uri = f"{server.url}/{path.name}"
        with safetensors.safe_open(uri, framework="pt") as file:
            assert type(file) is ours
            assert isinstance(file, safetensors.safe_open)
            assert file.metadata() == {"format": "pt"}
            assert torch.equal(file.get_slice("layer.3.weight")[1:3], TENSORS["layer.3.weight"][1:3])
        assert same(safetensors.torch.load_file(uri))
        arrays = safetensors.numpy.load_file(uri)
        assert np.array_equal(arrays["layer.7.weight"], TENSORS["layer.7.weight"].numpy())
        model = torch.nn.Linear(4, 4, bias=False)
        model.register_parameter("weight", torch.nn.Parameter(torch.zeros(4, 4)))
        missing, unexpected = safetensors.torch.load_model(model, uri, strict=False)
        assert missing == {"weight"} or missing == ["weight"]
        assert len(unexpected) == len(TENSORS)
        assert same(safetensors.torch.load_file(f"file://{path}"))


def test_what_other_modules_imported_before_and_meanwhile_is_replaced_and_put_back(path: Path) -> None:
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


def test_a_replacement_that_a_program_kept_is_the_original_after_uninstall(path: Path) -> None:
    with installed():
        kept = safetensors.safe_open
    assert type(kept(path, "pt")) is Kept.safe_open
    with pytest.raises(FileNotFoundError):
        kept("http://127.0.0.1:9/none.safetensors", "pt")


def test_nested_use_is_counted() -> None:
    with installed():
        with installed():
            install()
        assert safetensors.safe_open is not Kept.safe_open
        uninstall()
        assert safetensors.safe_open is not Kept.safe_open
    uninstall()
    assert safetensors.safe_open is Kept.safe_open


def test_threads_may_install_and_uninstall_at_once(path: Path) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(5):
                with installed():
                    assert same(safetensors.torch.load_file(path))
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors


def test_the_replacement_looks_like_the_original(path: Path) -> None:
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
def test_wrong_arguments_raise_what_the_original_raises(
    path: Path, arguments: tuple[object, ...], options: dict[str, object]
) -> None:
    filled = tuple(value.format(path=path) if isinstance(value, str) else value for value in arguments)
    with pytest.raises(Exception) as theirs:
        Kept.safe_open(*filled, **options)
    with installed(), pytest.raises(Exception) as raised:
        safetensors.safe_open(*filled, **options)
    assert type(raised.value) is type(theirs.value)
    assert str(raised.value) == str(theirs.value)


def test_a_uri_that_is_not_there_raises_what_a_path_raises(path: Path) -> None:
    with RangeServer(path.parent) as server, installed(), pytest.raises(FileNotFoundError):
        safetensors.torch.load_file(f"{server.url}/none.safetensors")


def test_a_damaged_remote_file_raises_the_error_of_safetensors(path: Path) -> None:
    damaged = {"bad.safetensors": path.read_bytes()[:-5]}
    with RangeServer(damaged) as server, installed(), pytest.raises(safetensors.SafetensorError):
        safetensors.torch.load_file(f"{server.url}/bad.safetensors")

"""Errors of safetensors' own reader after `install()`: the same error as before, with Penstock's hint as a note."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch

from penstock_hf.safetensors import installed


class Kept:
    """A holder of the originals outside the globals of this module, which would be replaced too."""

    safe_open = safetensors.safe_open
    exit = safetensors.safe_open.__exit__


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    yield
    assert safetensors.safe_open is Kept.safe_open
    assert Kept.safe_open.__exit__ is Kept.exit


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model-00001-of-00002.safetensors"
    safetensors.numpy.save_file({"embed.weight": np.ones((4, 4)), "norm.weight": np.ones(3)}, path)
    return path


def error_of(call: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def note_of(call: Callable[[], object]) -> str:
    """Return the only note of the error that a call raises after `install`. Compare the error with the original's."""
    theirs = error_of(call)
    with installed():
        error = error_of(call)
    assert (type(error), error.args, str(error)) == (type(theirs), theirs.args, str(theirs))
    assert (error.__cause__, error.__context__) == (theirs.__cause__, theirs.__context__) == (None, None)
    assert not hasattr(theirs, "__notes__")
    (note,) = getattr(error, "__notes__", [""])
    return str(note)


def opened(path: Any, framework: Any = "np", **options: Any) -> Callable[[], object]:
    return lambda: safetensors.safe_open(path, framework, **options)


def read(path: Path, name: str) -> object:
    with safetensors.safe_open(path, "np") as file:
        return file.get_tensor(name)


def test_missing_file_hint_names_similar_file(model: Path) -> None:
    note = note_of(opened(model.parent / "model-00002-of-00002.safetensors"))
    assert str(model.parent) in note and repr(model.name) in note


def test_missing_folder_hint_names_existing_parent(model: Path) -> None:
    note = note_of(opened(model.parent / "snapshots" / "a" / "x.safetensors"))
    assert f"{model.parent} has no snapshots. It has {model.name!r}" in note


def test_repository_name_hint_gives_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert '"hf://org/name/model.safetensors"' in note_of(opened("org/name"))
    assert '"hf://org/name/part/x.safetensors"' in note_of(opened("org/name/part/x.safetensors"))
    assert "hf://" not in note_of(opened("models/x.safetensors"))
    assert str(tmp_path) in note_of(opened("x.safetensors"))


def test_hint_distinguishes_link_directory_and_file(model: Path) -> None:
    link = model.parent / "link.safetensors"
    link.symlink_to(model.parent / "gone")
    assert f"link to {model.parent / 'gone'}, which does not exist" in note_of(opened(link))
    assert f"is a directory. Pass the path of a file. It has {link.name!r}" in note_of(opened(model.parent))
    assert f"{model} exists. Pass this path" in note_of(opened(f"{model}/"))
    assert note_of(opened("")) == "penstock: the path is empty."


def test_truncated_file_hint_names_commands(model: Path) -> None:
    os.truncate(model, model.stat().st_size - 5)
    note = note_of(lambda: safetensors.torch.load_file(model))
    assert "its header describes" in note and "copy it again" in note
    assert f"`penstock inspect {model}`" in note and f"`penstock verify {model}`" in note


def test_truncated_cached_file_hint_downloads_again(model: Path) -> None:
    cached = model.parent / "hub" / "models--org--some-name" / "snapshots" / "0123abcd" / "model.safetensors"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(model.read_bytes()[:-5])
    options = f"--revision 0123abcd --cache-dir {model.parent / 'hub'} --force-download"
    assert f"`hf download org/some-name model.safetensors {options}`" in note_of(opened(cached))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "at least 8"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
        (b"PK\x03\x04\0\0\x08\x08" + bytes(100), "begins with b'PK"),
        ((1 << 20).to_bytes(8, "little") + b"{}", "header of 1048576 bytes in a file of 10"),
    ],
)
def test_other_content_hint_tells_fault(content: bytes, expected: str, model: Path) -> None:
    model.write_bytes(content)
    assert expected in note_of(opened(model))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"framework": "troch"}, '"pt"'),
        ({"framework": None}, '"pt"'),
        ({"device": "nonsense"}, '"cuda:1"'),
        ({"device": "cuda"}, 'only "cpu"'),
        ({"backend": "nonsense"}, '"pread"'),
    ],
)
def test_wrong_argument_hint_lists_accepted_values(options: dict[str, Any], expected: str, model: Path) -> None:
    assert expected in note_of(opened(model, **options))


def test_absent_tensor_hint_names_closest(model: Path) -> None:
    note = note_of(lambda: read(model, "embed.wieght"))
    assert "2 tensors" in note and "'embed.weight'" in note
    assert "Closest" not in note_of(lambda: read(model, "q"))


def test_closest_name_is_found_among_thousands(tmp_path: Path) -> None:
    names = [f"layers.{layer}.mlp.experts.{expert}.up_proj" for layer in range(40) for expert in range(100)]
    path = tmp_path / "experts.safetensors"
    safetensors.numpy.save_file({name: np.zeros(1) for name in names}, path)
    assert "'layers.37.mlp.experts.41.up_proj'" in note_of(lambda: read(path, "model.layers.37.mlp.experts.41.up_proj"))


def test_nested_files_hint_is_of_file_without_tensor(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    safetensors.numpy.save_file({"other.weight": np.ones(3)}, other)

    def copy_all() -> None:
        with safetensors.safe_open(model, "np") as outer, safetensors.safe_open(other, "np") as inner:
            for name in inner.keys():  # noqa: SIM118 - the file is no mapping
                outer.get_tensor(name)

    assert "2 tensors" in note_of(copy_all)


def test_missing_cuda_device_hint_names_cpu(model: Path) -> None:
    def read_first() -> None:
        with safetensors.safe_open(model, "pt", "cuda") as file:
            file.get_tensor("norm.weight")

    for call in (read_first, lambda: safetensors.torch.load_file(model, device=0)):
        assert 'finds no CUDA device on this host. Pass device="cpu"' in note_of(call)


def test_program_errors_have_no_hint(model: Path) -> None:
    def own(error: Exception) -> None:
        with safetensors.safe_open(model, "pt"):
            raise error

    def to_gpu() -> None:
        with safetensors.safe_open(model, "pt") as file:
            file.get_tensor("norm.weight").to("cuda")

    with installed():
        for call in (lambda: own(KeyError("x")), lambda: own(RuntimeError("CUDA")), to_gpu):
            assert not hasattr(error_of(call), "__notes__")


def test_caught_error_keeps_frames_of_program(model: Path) -> None:
    call = lambda: read(model, "absent")  # noqa: E731
    theirs = traceback.extract_tb(error_of(call).__traceback__)
    with installed():
        error = error_of(call)
    assert traceback.extract_tb(error.__traceback__)[1:] == theirs[1:]
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - made here
    assert (str(again), again.__notes__) == (str(error), error.__notes__)
    assert "penstock: the file has 2 tensors" in "".join(traceback.format_exception(error))


def test_failing_hint_leaves_original_error(tmp_path: Path) -> None:
    class Vanishing(os.PathLike[str]):
        """A path that only the choice of the reader and the reader can read."""

        def __init__(self, num_reads: int) -> None:
            self.left = num_reads

        def __fspath__(self) -> str:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("vanished")
            return str(tmp_path / "none.safetensors")

    assert isinstance(error_of(opened(Vanishing(1))), FileNotFoundError)
    with installed():
        error = error_of(opened(Vanishing(2)))
        assert getattr(error_of(opened(Vanishing(3))), "__notes__", None)
    assert isinstance(error, FileNotFoundError) and error.__context__ is None
    assert not hasattr(error, "__notes__")


def test_uninstalled_reader_adds_no_hint(model: Path) -> None:
    with installed():
        kept = safetensors.safe_open
        file = kept(model, "np")
    with pytest.raises(safetensors.SafetensorError) as caught, file:
        file.get_tensor("absent")
    assert not hasattr(caught.value, "__notes__")
    assert not hasattr(error_of(lambda: kept(f"{model}.none", "np")), "__notes__")

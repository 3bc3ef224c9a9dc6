"""Every way to load weights refuses bad input with the original's exception type, and says what to do.

The original runs on the same files in the same test. Where the original reads the file itself, as for local files
after `install()`, the error is the original's own, and Penstock's hint is a note.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runai_model_streamer
import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import transformers
from tests.support.users import STRANGER, run_as
from torch.distributed.checkpoint import HuggingFaceStorageReader

import penstock
from penstock.errors import PenstockError
from penstock.testing.checkpoints import write_llama
from penstock.types import MIB
from penstock_dcp import CheckpointReader
from penstock_hf import runai_streamer
from penstock_hf.patched_libraries import patched_libraries
from penstock_hf.safetensors import installed
from penstock_hf.transformers import from_pretrained

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FILE = "model-00001-of-00002.safetensors"
INDEX = "model.safetensors.index.json"

Call = Callable[..., object]


def _replace_by_folder(place: Path) -> None:
    (place / FILE).unlink()
    (place / FILE).mkdir()


def _shorten_tensor(place: Path) -> None:
    tensors = safetensors.torch.load_file(place / FILE)
    name = sorted(tensors)[0]
    tensors[name] = tensors[name][:-1].clone()
    safetensors.torch.save_file(tensors, place / FILE, {"format": "pt"})


FILE_FAULTS: dict[str, Callable[[Path], object]] = {
    "missing": lambda place: shutil.rmtree(place),
    "folder instead of file": _replace_by_folder,
    "empty": lambda place: (place / FILE).write_bytes(b""),
    "truncated": lambda place: os.truncate(place / FILE, os.path.getsize(place / FILE) - 5),
    "garbage in the header": lambda place: (place / FILE).write_bytes((64).to_bytes(8, "little") + b"\xfe" * 64),
    "header longer than the file": lambda place: (place / FILE).write_bytes(MIB.to_bytes(8, "little") + b"{}"),
}
MODEL_FAULTS = FILE_FAULTS | {
    "index names a missing shard": lambda place: (place / FILE).unlink(),
    "malformed index": lambda place: (place / INDEX).write_text("{"),
    "malformed config": lambda place: (place / "config.json").write_text("{"),
    "no config": lambda place: (place / "config.json").unlink(),
    "no weights": lambda place: [path.unlink() for path in place.glob("*.safetensors*")],
    "other shape than the model's": _shorten_tensor,
}


def _load_file(place: Path, **options: Any) -> object:
    return safetensors.torch.load_file(place / FILE, **options)


def _all_tensors(place: Path, framework: str = "pt", device: Any = "cpu", name: str | None = None) -> object:
    with safetensors.safe_open(place / FILE, framework=framework, device=device) as file:
        return [file.get_tensor(each) for each in ([name] if name else file.keys())]


def _our_tensors(place: Path, framework: str = "pt", device: Any = "cpu", name: str | None = None) -> object:
    with penstock.safe_open(place / FILE, framework=framework, device=device) as file:
        return [file.get_tensor(each) for each in ([name] if name else file.keys())]


def _after_install(call: Call) -> Call:
    def door(place: Path, **options: Any) -> object:
        with installed():
            return call(place, **options)

    return door


def _streamed(module: Any) -> Call:
    def door(place: Path, **options: Any) -> object:
        with module.SafetensorsStreamer() as streamer:
            streamer.stream_files([str(place / FILE)], **options)
            return dict(streamer.get_tensors())

    return door


def _transformers(place: Path, **options: Any) -> object:
    return transformers.AutoModelForCausalLM.from_pretrained(str(place), **options)


def _our_from_pretrained(place: Path, **options: Any) -> object:
    return from_pretrained(transformers.AutoModelForCausalLM, str(place), progress=False, **options)


def _patched(place: Path, **options: Any) -> object:
    with patched_libraries():
        return _transformers(place, **options)


def _dcp(reader: Callable[[str], Any]) -> Call:
    def door(place: Path, shape: int = 64, extra: str = "") -> object:
        state = {"model.norm.weight": torch.empty(shape, dtype=torch.bfloat16)}
        state |= {extra: torch.empty(1)} if extra else {}
        dcp.load(state, storage_reader=reader(str(place)), no_dist=True)
        return state

    return door


FILE_DOORS: dict[str, tuple[Call, Call]] = {
    "load_file": (_load_file, lambda place, **options: penstock.load_file(place / FILE, **options)),
    "safe_open": (_all_tensors, _our_tensors),
    "load_file after install()": (_load_file, _after_install(_load_file)),
    "safe_open after install()": (_all_tensors, _after_install(_all_tensors)),
    "Run:ai": (_streamed(runai_model_streamer), _streamed(runai_streamer)),
}
MODEL_DOORS: dict[str, tuple[Call, Call]] = {
    "from_pretrained": (_transformers, _our_from_pretrained),
    "patched_libraries()": (_transformers, _patched),
}
BY_ORIGINAL = {"load_file after install()", "safe_open after install()", "patched_libraries()"}
"""Doors in which the original library reads local files, and raises the error itself."""
BY_READER = {*FILE_FAULTS, "index names a missing shard"} - {"missing"}
"""Faults of a model that safetensors finds, and not transformers."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("good") / "llama"
    write_llama(place, num_layers=2, hidden=64, vocab=256, fp8=False, shards=2)
    return place


def damaged(good: Path, tmp_path: Path, damage: Callable[[Path], object]) -> Path:
    """Return a damaged copy of the checkpoint."""
    place = tmp_path / "llama"
    shutil.copytree(good, place)
    damage(place)
    return place


def error_of(call: Call, *arguments: Any, **options: Any) -> BaseException:
    """Return the error that a call raises. DCP's is not an Exception."""
    with pytest.raises((Exception, dcp.CheckpointException)) as caught:
        call(*arguments, **options)
    return caught.value


def notes_of(error: BaseException) -> list[str]:
    """Return Penstock's notes of an error."""
    return [note for note in getattr(error, "__notes__", []) if note.startswith("penstock: ")]


def assert_refused_alike(original: Call, ours: Call, place: Path, *, has_hint: bool = True, **options: Any) -> None:
    """Check that both calls raise, ours as an instance of the original's class, and with a hint if it is our error."""
    theirs, error = error_of(original, place, **options), error_of(ours, place, **options)
    assert isinstance(error, type(theirs)), (theirs, error)
    if isinstance(error, PenstockError) and has_hint:
        assert error.hint and error.hint in str(error), error


def assert_same_with_note(theirs: BaseException, error: BaseException, *, has_note: bool = True) -> None:
    """Check that an error equals the original's in all but Penstock's note."""
    assert (type(error), error.args, str(error)) == (type(theirs), theirs.args, str(theirs))
    assert len(notes_of(error)) == has_note


@pytest.mark.parametrize("fault", FILE_FAULTS)
@pytest.mark.parametrize("door", FILE_DOORS)
def test_faulty_file_raises_original_type(door: str, fault: str, good: Path, tmp_path: Path) -> None:
    original, ours = FILE_DOORS[door]
    place = damaged(good, tmp_path, FILE_FAULTS[fault])
    assert_refused_alike(original, ours, place)
    error = error_of(ours, place)
    assert (door in BY_ORIGINAL) is not isinstance(error, PenstockError)
    if door in BY_ORIGINAL:
        assert_same_with_note(error_of(original, place), error)


@pytest.mark.parametrize("fault", MODEL_FAULTS)
@pytest.mark.parametrize("door", MODEL_DOORS)
def test_faulty_model_raises_original_type(door: str, fault: str, good: Path, tmp_path: Path) -> None:
    original, ours = MODEL_DOORS[door]
    place = damaged(good, tmp_path, MODEL_FAULTS[fault])
    assert_refused_alike(original, ours, place)
    if door in BY_ORIGINAL:
        # transformers itself raises the other errors, before it opens a file or after it has read the files.
        assert_same_with_note(error_of(original, place), error_of(ours, place), has_note=fault in BY_READER)


WRONG_ARGUMENTS: list[tuple[str, dict[str, Any]]] = [
    *((door, {"device": "nonsense"}) for door in ("load_file", "load_file after install()", "Run:ai")),
    *(
        (door, options)
        for door in ("safe_open", "safe_open after install()")
        for options in (
            {"framework": "nonsense"},
            {"framework": None},
            {"device": "nonsense"},
            {"device": 3.5},
            {"framework": "np", "device": "cuda"},
            {"name": "absent"},
        )
    ),
    *((door, options) for door in MODEL_DOORS for options in ({"dtype": "nonsense"}, {"device_map": {"": "nonsense"}})),
]


@pytest.mark.parametrize(("door", "options"), WRONG_ARGUMENTS)
def test_wrong_argument_raises_original_type(door: str, options: dict[str, Any], good: Path) -> None:
    original, ours = (FILE_DOORS | MODEL_DOORS)[door]
    assert_refused_alike(original, ours, good, **options)
    if door in BY_ORIGINAL & FILE_DOORS.keys():
        assert_same_with_note(error_of(original, good, **options), error_of(ours, good, **options))


@pytest.mark.skipif(os.geteuid() != 0, reason="changes the user, which needs root")
@pytest.mark.parametrize("door", ["load_file", "safe_open", "load_file after install()", "Run:ai", "load"])
def test_unreadable_file_raises_original_type(door: str, good: Path, tmp_path: Path) -> None:
    own = (_load_file, lambda place: penstock.load(place / FILE))
    original, ours = own if door == "load" else FILE_DOORS[door]
    place = damaged(good, tmp_path, lambda place: (place / FILE).chmod(0))
    for folder in (place, *place.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)

    def attempt() -> list[Any]:
        theirs, error = error_of(original, place), error_of(ours, place)
        # safetensors 0.8 reports an unreadable file as absent. Python's own class for it is more precise.
        expected = (PermissionError, type(theirs)) if isinstance(theirs, OSError) else type(theirs)
        return [isinstance(error, expected), getattr(error, "hint", notes_of(error)), repr((theirs, error))]

    is_same, hint, text = run_as(STRANGER, attempt)
    assert is_same and hint, text


@pytest.mark.parametrize("fault", MODEL_FAULTS)
def test_faulty_model_raises_checkpoint_exception(fault: str, good: Path, tmp_path: Path) -> None:
    place = damaged(good, tmp_path, MODEL_FAULTS[fault])
    if fault in {"malformed config", "no config", "other shape than the model's"}:
        assert _dcp(CheckpointReader)(place)
        return
    error = error_of(_dcp(CheckpointReader), place)
    # Torch's reader ignores the index.
    if "index" not in fault:
        assert isinstance(error, type(error_of(_dcp(HuggingFaceStorageReader), place)))
    assert isinstance(error, dcp.CheckpointException)
    (failure, _) = error.failures[0]
    assert isinstance(failure, PenstockError) and failure.hint, failure


@pytest.mark.parametrize("options", [{"shape": 7}, {"extra": "absent"}])
def test_state_unlike_checkpoint_raises_original_type(options: dict[str, Any], good: Path) -> None:
    theirs = error_of(_dcp(HuggingFaceStorageReader), good, **options)
    error = error_of(_dcp(CheckpointReader), good, **options)
    assert isinstance(error, dcp.CheckpointException) and isinstance(theirs, dcp.CheckpointException)
    assert isinstance(error.failures[0][0], type(theirs.failures[0][0]))


OWN_FAULTS: dict[str, tuple[type[Exception], type[Exception] | None]] = {
    "missing": (penstock.errors.NotFound, FileNotFoundError),
    "folder instead of file": (penstock.errors.SourceUnavailable, None),
    "empty": (penstock.errors.FormatError, None),
    "truncated": (penstock.errors.SourceTruncated, None),
    "garbage in the header": (penstock.errors.FormatError, None),
    "header longer than the file": (penstock.errors.FormatError, None),
    "index names a missing shard": (penstock.errors.NotFound, FileNotFoundError),
    "malformed index": (penstock.errors.FormatError, None),
    "no weights": (penstock.errors.NotFound, FileNotFoundError),
}
"""The documented class, and the built-in class that a program may catch, of verbs that have no original."""


@pytest.mark.parametrize("fault", OWN_FAULTS)
def test_faulty_model_raises_documented_type(
    fault: str, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path))
    place = damaged(good, tmp_path, MODEL_FAULTS[fault])
    module = torch.nn.Linear(1, 1)
    with penstock.join("llama") as fleet:
        for call in (
            lambda: penstock.load(place),
            lambda: penstock.load_into(module, place),
            lambda: list(penstock.stream(place)),
            lambda: fleet.fetch({}, fallback=str(place)),
        ):
            error = error_of(call)
            documented, built_in = OWN_FAULTS[fault]
            assert isinstance(error, documented) and isinstance(error, built_in or Exception), error
            assert isinstance(error, PenstockError) and error.hint, error


@pytest.mark.parametrize(
    "options", [{"device": "nonsense"}, {"names": "absent"}, {"settings": SimpleNamespace()}, {"verify": "yes"}]
)
def test_wrong_argument_of_load_raises_hint(options: dict[str, Any], good: Path) -> None:
    error = error_of(lambda: penstock.load(good, **options))
    assert isinstance(error, penstock.errors.ConfigError | penstock.errors.PlanError)
    assert isinstance(error, ValueError) or "names" in options
    assert error.hint, error


def test_absent_cached_model_raises_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path))
    error = error_of(lambda: penstock.cache.attach("absent", timeout_s=0))
    assert isinstance(error, FileNotFoundError) and isinstance(error, PenstockError)
    assert error.hint


PROGRAM = """
import json, sys
from safetensors import safe_open
from safetensors.torch import load_file
def read_absent(place):
    with safe_open(place, framework="pt") as file:
        file.get_tensor("absent")
found = {}
for place in sys.argv[1:]:
    for call in (load_file, read_absent):
        try:
            call(place)
        except Exception as error:
            found[f"{call.__name__} {place}"] = [type(error).__module__, type(error).__qualname__, list(error.args),
                str(error), getattr(error, "__notes__", [])]
print(json.dumps(found))
"""


def test_program_under_penstock_run_gets_original_errors(good: Path, tmp_path: Path) -> None:
    files = [str(good / FILE)]
    for number, damage in enumerate(FILE_FAULTS.values()):
        files.append(str(damaged(good, tmp_path / str(number), damage) / FILE))
    command = [sys.executable, "-c", PROGRAM, *files]
    answers = [
        subprocess.run([*prefix, *command], capture_output=True, text=True, timeout=200, check=True).stdout
        for prefix in ([], [sys.executable, "-m", "penstock", "run", "--"])
    ]
    theirs, ours = map(json.loads, answers)
    assert len(theirs) == 2 * len(files) - 1
    for call in theirs.keys() | ours.keys():
        (*stock, no_notes), (*same, notes) = theirs[call], ours[call]
        assert same == stock and no_notes == []
        assert len(notes) == 1 and notes[0].startswith("penstock: ")

"""Run:ai Model Streamer's own tests, run against `penstock_hf.runai_streamer`.

The tests come from the wheel of runai-model-streamer and are copied to a temporary directory.
"""

import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.errors import FormatError, SourceTruncated
from penstock_hf.runai_streamer import FileChunks, FileStreamer, SafetensorsStreamer

VERSION = "0.17.0"

FILES = ("test_safetensors_streamer.py", "test_metadata_ordering.py")
ABOUT_THE_RING = (
    "test_the_ring_is_reported_once_per_load_with_the_rank",
    "test_ring_info_is_none_for_a_rank_whose_partition_is_empty",
)
"""Tests of the log line and the internals of the original's ring of buffers, which does not exist here."""
PASSED = 33

CONFTEST = "from penstock_hf import runai_streamer\n\nrunai_streamer.install()\n"


def suite() -> Path:
    """Return the directory of the tests in the installed wheel."""
    try:
        found = distribution("runai-model-streamer")
    except PackageNotFoundError:
        pytest.skip("runai-model-streamer is not installed: pip install --no-deps runai-model-streamer==0.17.0")
    if found.version != VERSION:
        pytest.skip(f"runai-model-streamer {found.version} is installed; the tests of {VERSION} are run")
    return Path(str(found.locate_file("runai_model_streamer/safetensors_streamer/tests")))


def test_original_streamer_test_suite_passes(tmp_path: Path) -> None:
    for name in FILES:
        shutil.copy(suite() / name, tmp_path / name)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    # The wheel lacks the file that some of its tests read.
    (tmp_path / "test_files").mkdir()
    save_file({"a": torch.arange(10.0), "b": torch.ones(3)}, tmp_path / "test_files" / "test.safetensors")
    left_out = " and ".join(f"not {name}" for name in ABOUT_THE_RING)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    command += ["--import-mode=importlib", "-k", left_out, "-c", "/dev/null", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert f"{PASSED} passed, {len(ABOUT_THE_RING)} deselected" in done.stdout, done.stdout[-4000:] + done.stderr


def test_streamed_tensor_with_owned_false_is_overwritten(tmp_path: Path) -> None:
    true = {f"w{i}": torch.full((256,), float(i)) for i in range(4)}
    save_file(true, tmp_path / "model.safetensors")
    seen, addresses, lent = {}, set(), []
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(tmp_path / "model.safetensors"), owned=False)
        for name, tensor in streamer.get_tensors():
            seen[name] = tensor.clone()
            lent.append(tensor)
            addresses.add(tensor.data_ptr())
    assert all(torch.equal(seen[name], true[name]) for name in true)
    assert len(addresses) == 1
    assert torch.equal(lent[0], lent[-1])


def test_streamed_ranges_with_owned_false_reuse_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNAI_STREAMER_MEMORY_LIMIT", "2000")
    data = bytes(i % 251 for i in range(10_000))
    (tmp_path / "data").write_bytes(data)
    addresses = set()
    with FileStreamer() as streamer:
        for owned in (False, True):
            chunks = FileChunks.contiguous(0, str(tmp_path / "data"), 0, [1000] * 10)
            streamer.stream_files([chunks], owned=owned)
            kept = {}
            for _, index, tensor in streamer.get_chunks():
                assert tensor.numpy().tobytes() == data[index * 1000 : (index + 1) * 1000]
                kept[index] = tensor
                if not owned:
                    addresses.add(tensor.data_ptr())
        assert all(t.numpy().tobytes() == data[i * 1000 : (i + 1) * 1000] for i, t in kept.items())
    assert len(addresses) <= 3


def test_streamer_errors_contain_original_wording_and_path(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    whole = path.read_bytes()
    for data, kind, words in (
        (whole[:-8], SourceTruncated, "truncated: header declares"),
        (whole + b"12345", FormatError, "5 extra trailing bytes"),
        (whole.replace(b'"F32"', b'"F99"'), FormatError, "Unsupported dtype 'F99'"),
    ):
        path.write_bytes(data)
        with SafetensorsStreamer() as streamer, pytest.raises(ValueError, match=words) as caught:
            streamer.stream_file(str(path))
        assert isinstance(caught.value, kind)
        assert str(path) in str(caught.value)
        assert streamer.files_to_tensors_metadata == {}

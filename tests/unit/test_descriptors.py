"""A load with more files than descriptors raises the soft limit, and errors name a hard limit that is too low."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import penstock as ps
from penstock import descriptors
from penstock.errors import ConfigError
from penstock.storage.download import download
from penstock.storage.write import new_file

NUM_FILES = 200


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of many small shards."""
    directory = tmp_path_factory.mktemp("many")
    names = {f"t{i}": f"model-{i + 1:05}-of-{NUM_FILES:05}.safetensors" for i in range(NUM_FILES)}
    for i, (name, file) in enumerate(names.items()):
        save_file({name: np.full(4, i, np.float32)}, str(directory / file))
    index = {"metadata": {}, "weight_map": names}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """Set a soft limit with few descriptors. The hard limit stays."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = len(os.listdir("/proc/self/fd")) + 60
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    yield soft
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_more_files_than_soft_descriptor_limit_are_opened(many: Path, few_descriptors: int) -> None:
    assert len(ps.inspect(many).manifest.tensors.names) == NUM_FILES
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > few_descriptors


def test_opening_many_files_increases_descriptor_limit(many: Path, few_descriptors: int) -> None:
    pytest.importorskip("torch")
    files = [ps.safe_open(str(path), "np") for path in sorted(many.glob("*.safetensors"))]
    assert sum(float(file.get_tensor(file.keys()[0])[0]) for file in files) == sum(range(NUM_FILES))


def test_more_files_than_soft_descriptor_limit_are_copied(many: Path, few_descriptors: int, tmp_path: Path) -> None:
    files = {str(path): tmp_path / path.name for path in many.iterdir()}
    assert len(download(files, settings=ps.config.Settings()).compared) == 0
    assert len(list(tmp_path.iterdir())) == NUM_FILES + 1


def test_opening_few_files_keeps_descriptor_limit(many: Path, few_descriptors: int) -> None:
    ps.inspect(next(many.glob("*.safetensors")))
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == few_descriptors


_LOW = """
import resource, sys
import penstock as ps
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 120))
for verb in (ps.inspect, ps.verify, ps.manifest):
    try:
        verb(sys.argv[1])
    except ps.PenstockError as error:
        print(type(error).__name__, error.blame, error.mutated, error.hint)
"""


def test_too_low_hard_limit_error_suggests_ulimit(many: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _LOW, str(many)], capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stderr
    for line in lines:
        assert line.startswith("ConfigError config False") and "`ulimit -n " in line, line
        # The limit allows all files, each opened up to three times.
        assert int(line.partition("`ulimit -n ")[2].partition("`")[0]) >= 3 * NUM_FILES


@pytest.mark.parametrize(("code", "word"), [(errno.EMFILE, "ulimit -n"), (errno.ENFILE, "fs.file-max")])
def test_descriptor_shortage_error_names_setting(code: int, word: str, tmp_path: Path, monkeypatch) -> None:
    def fail(*arguments: object, **options: object) -> int:
        raise OSError(code, os.strerror(code))

    limit = descriptors.limit()
    monkeypatch.setattr(descriptors, "raise_limit", lambda needed=None: limit)
    with pytest.raises(ConfigError, match=word):
        descriptors.opened(fail, "a file")
    with pytest.raises(OSError, match=os.strerror(code)):
        descriptors.retried(fail)
    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(ConfigError, match=word), new_file(tmp_path / "file"):
        pass

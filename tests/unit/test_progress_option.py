"""`progress=` works alike in every long verb: a function is called with the finished and the total amount."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import penstock as ps
from penstock.fetcher.to_files import fetch_to_files

NBYTES = 8 * 4096


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file({f"w{number}": torch.full((1024,), float(number)) for number in range(8)}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def fetch(file: Path, progress: object) -> None:
    with ps.join("m", connection=ps.ConnectionSettings(transports=["loopback"])) as fleet:
        fleet.fetch({}, fallback=file, progress=progress)


def fetched_to_files(file: Path, progress: object) -> None:
    with ps.join("m", connection=ps.ConnectionSettings(transports=["loopback"])) as fleet:
        fetch_to_files(fleet, to=file.parent / "fetched", fallback=file, progress=progress)


def verify(file: Path, progress: object) -> None:
    ps.manifest(file, progress=False)
    ps.verify(file, progress=progress)


def update(file: Path, progress: object) -> None:
    published = {"w": torch.arange(NBYTES // 4, dtype=torch.float32)}
    target = {"w": torch.zeros(NBYTES // 4)}
    only = ps.ConnectionSettings(transports=["http"])
    with (
        ps.publisher("s", published, mode="snapshot", snapshot_device="device", connection=only) as publisher,
        ps.subscriber("s", target, connection=only) as subscriber,
    ):
        publisher.publish(0)
        subscriber.update(progress=progress)
    assert torch.equal(target["w"], published["w"])


VERBS: dict[str, Callable[[Path, object], object]] = {
    "load": lambda file, progress: ps.load(file, progress=progress, settings=ps.ReadSettings(copy=True)),
    "load_into": lambda file, progress: ps.load_into({"w0": torch.zeros(1024)}, file, strict=False, progress=progress),
    "manifest": lambda file, progress: ps.manifest(file, progress=progress),
    "verify": verify,
    "fetch": fetch,
    "fetch to files": fetched_to_files,
    "update": update,
    "convert": lambda file, progress: ps.convert(
        file, file.parent / "out", devices="cpu", workers=1, progress=progress
    ),
}


@pytest.mark.parametrize("verb", VERBS)
def test_progress_function_is_called_on_completion(verb: str, file: Path) -> None:
    calls: list[tuple[int, int]] = []
    VERBS[verb](file, lambda done, total: calls.append((done, total)))
    done, total = calls[-1]
    assert done == total > 0
    assert total == {"load_into": 4096, "convert": total}.get(verb, NBYTES)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


@pytest.mark.parametrize("verb", VERBS)
def test_progress_false_draws_no_progress_bar(verb: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    VERBS[verb](file, False)
    assert capsys.readouterr().err == ""


def test_progress_bar_shows_file_name(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ps.manifest(file, progress=True)
    assert "m.safetensors" in capsys.readouterr().err


def test_progress_function_error_aborts_call(file: Path) -> None:
    def fail(done: int, total: int) -> None:
        raise RuntimeError("no more")

    for verb in ("load", "manifest", "fetch"):
        with pytest.raises(RuntimeError, match="no more"):
            VERBS[verb](file, fail)


def test_invalid_progress_value_raises_config_error(file: Path) -> None:
    with pytest.raises(ps.ConfigError, match="progress is 'yes'"):
        ps.load(file, progress="yes")

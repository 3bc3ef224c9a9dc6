"""The record of a process's start: phases of journeys and of the engine, their bytes, failures, and readiness."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

import penstock as ps
from penstock import phases
from penstock.errors import Cancelled, ConfigError, SourceTruncated
from penstock.phases import Boot, BootRecord, Phases


@pytest.fixture(autouse=True)
def record(monkeypatch: pytest.MonkeyPatch) -> Iterator[BootRecord]:
    fresh = BootRecord()
    monkeypatch.setattr(phases, "_record", fresh)
    yield fresh


def boot() -> Boot:
    value = phases.boot_record().snapshot()
    assert value is not None
    return value


def names(value: Boot) -> list[tuple[str, str]]:
    return [(one.name, one.state) for one in value.phases]


def test_process_without_startup_phases_has_no_record(record: BootRecord) -> None:
    Phases("open").stop()
    assert record.snapshot() is None


def test_startup_record_contains_all_phases() -> None:
    with Phases("discover", journey="fetch", model="llama") as watch:
        watch.enter("move", lambda: (3, 10))
        now = boot()
        assert (now.state, now.phase, now.ready) == ("starting", "move", False)
        assert [(one.done_bytes, one.nbytes) for one in now.phases] == [(0, 0), (3, 10)]
        watch.enter("commit")
        seconds = watch.stop()
    now = boot()
    assert now.ready and now.phase == "" and now.error is None
    assert names(now) == [("discover", "done"), ("move", "done"), ("commit", "done")]
    assert {one.name: one.seconds for one in now.phases} == pytest.approx(seconds, abs=1e-3)
    # The phases are adjacent, so their sum is the total.
    assert sum(seconds.values()) == pytest.approx(now.seconds, abs=1e-3)
    assert now.started_at == pytest.approx(time.time(), abs=5)
    assert {one.model for one in now.phases} == {"llama"}


def test_process_is_unready_during_start_phase() -> None:
    with ps.telemetry.phase("start"):
        with Phases("find", journey="attach"):
            pass
        assert (boot().state, boot().phase) == ("starting", "start")
        with ps.telemetry.phase("warm up"):
            assert boot().phase == "warm up"
    assert boot().ready
    assert names(boot()) == [("start", "done"), ("find", "done"), ("warm up", "done")]


def test_startup_failure_is_shown_until_next_attempt() -> None:
    secret = "https://host/model.safetensors?sig=SECRET"
    error = SourceTruncated(f"cut short: {secret}", hint="fetch it again")
    with pytest.raises(SourceTruncated), ps.telemetry.phase("start"), Phases("move", journey="load", model=secret):
        raise error
    now = boot()
    assert (now.state, now.phase, now.ready) == ("failed", "move", False)
    assert now.error is not None
    assert (now.error.blame, now.error.hint) == ("source", "fetch it again")
    assert "cut short" in now.error.error and "SECRET" not in str(now)
    with Phases("move", journey="load"):
        assert (boot().state, boot().error) == ("starting", None)
    assert boot().ready


def test_engine_error_is_recorded_as_failure() -> None:
    with pytest.raises(RuntimeError), ps.telemetry.phase("warm up"):
        raise RuntimeError("no kernel")
    assert boot().error == phases.BootError(error="RuntimeError: no kernel")


@pytest.mark.parametrize("error", [Cancelled("enough"), KeyboardInterrupt(), GeneratorExit()])
def test_cancelled_operation_leaves_process_in_starting_state(error: BaseException) -> None:
    with pytest.raises(type(error)), Phases("move", journey="load"):
        raise error
    assert (boot().state, names(boot())) == ("starting", [("move", "cancelled")])


def test_reentered_phase_is_recorded_once() -> None:
    with Phases("find", journey="attach") as watch:
        for _ in range(100):
            watch.enter("lease")
            watch.enter("find")
    assert sorted(names(boot())) == [("find", "done"), ("lease", "done")]


def test_startup_record_is_limited_in_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(phases.MAX_PHASES + 10):
        Phases("open", journey="load").stop()
    assert len(boot().phases) == phases.MAX_PHASES
    monkeypatch.setattr(phases, "NEW_BOOT_S", -1.0)
    with Phases("find", journey="attach"):
        assert names(boot()) == [("find", "running")]


def test_phase_change_wakes_waiting_thread(record: BootRecord) -> None:
    record.wait(before := record.serial, 0.0)
    assert record.serial == before
    waiter = threading.Thread(target=record.wait, args=(before, 60.0))
    waiter.start()
    with Phases("find", journey="attach"):
        assert record.serial == before + 1
    waiter.join(10.0)
    assert not waiter.is_alive()


def test_finished_phase_releases_byte_counter() -> None:
    import weakref

    class Weights:
        def look(self) -> tuple[int, int]:
            return 7, 7

    weights = Weights()
    gone = weakref.ref(weights)
    with Phases("discover", journey="fetch") as watch:
        watch.enter("move", weights.look)
        del weights
        assert gone() is not None
        watch.enter("commit")
        assert gone() is None
    assert boot().phases[1].done_bytes == 7


def test_forked_child_has_empty_startup_record() -> None:
    Phases("open", journey="load").stop()
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, b"none" if phases.boot_record().snapshot() is None else b"some")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 4) == b"none"


@pytest.mark.parametrize("name", ["", "x" * 65, 3])
def test_invalid_phase_name_is_refused(name: object) -> None:
    with pytest.raises(ConfigError, match="name"):
        ps.telemetry.phase(name)  # type: ignore[arg-type]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file({f"w{number}": torch.full((64, 64), float(number)) for number in range(8)}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def into(file: Path) -> dict[str, float]:
    targets = {name: torch.empty_like(tensor) for name, tensor in ps.load(file).items()}
    phases.boot_record()._spans.clear()
    return dict(ps.load_into(targets, file).phases)


def streamed(file: Path) -> dict[str, float]:
    with ps.stream(file) as stream:
        for _ in stream:
            assert not boot().ready
        return dict(stream.report.phases)


@pytest.mark.parametrize(
    "verb", [lambda file: dict(ps.load(file, settings=ps.ReadSettings(copy=True)).report.phases), into, streamed]
)
def test_recorded_load_phases_match_load_report(verb: Callable[[Path], dict[str, float]], file: Path) -> None:
    reported = verb(file)
    now = boot()
    assert now.ready and {one.journey for one in now.phases} == {"load"}
    assert {one.name: one.seconds for one in now.phases} == pytest.approx(reported, abs=1e-3)
    (move,) = [one for one in now.phases if one.name == "move"]
    assert move.done_bytes == move.nbytes == 8 * 64 * 64 * 4
    assert {one.model for one in now.phases} == {str(file)}


def test_failed_load_records_error(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ps.NotFound):
        ps.load(tmp_path / "nothing.safetensors")
    now = boot()
    assert (now.state, now.phase) == ("failed", "open")
    assert now.error is not None and now.error.blame == "source"
    assert now.error.error == f"there is no such file in {tmp_path / 'nothing.safetensors'}"
    with pytest.raises(ps.NotFound):
        ps.load(file, verify=True)
    assert boot().phase == "plan"


def test_refused_load_does_not_block_next_load(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        ps.load(file, settings=ps.ReadSettings(trace=tmp_path / "no such directory" / "trace.json"))
    assert boot().state == "failed"
    ps.load(file)
    assert boot().ready


def test_undecodable_file_name_is_reportable(tmp_path: Path) -> None:
    """A heartbeat that cannot be encoded would stop the thread that sends heartbeats."""
    from penstock.peer.member import _report_of
    from penstock.telemetry.journey import recent_failures

    with pytest.raises(ps.NotFound):
        ps.load(tmp_path / os.fsdecode(b"\xff.safetensors"))
    assert b"?.safetensors" in msgspec.json.encode(boot())
    assert b"no such file in " in (report := msgspec.json.encode(_report_of(recent_failures()[-1])))
    assert rb"\udcff.safetensors" in report


def test_abandoned_stream_is_cancelled(file: Path) -> None:
    stream = ps.stream(file)
    next(stream)
    stream.close()
    assert boot().state == "starting"
    assert boot().phases[-1].state == "cancelled"

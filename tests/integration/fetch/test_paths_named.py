"""No silent fallback: report, `status` and `why` name the path of every byte and the reason for it."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch")
pytest.importorskip("starlette")

import penstock as ps  # noqa: E402
from penstock.cli.main import app  # noqa: E402
from penstock.testing.checkpoints import write_llama  # noqa: E402
from penstock.types import MIB  # noqa: E402


@pytest.fixture
def runtime(monkeypatch) -> Iterator[None]:
    """Use a separate hub in a directory whose name is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="ps-") as directory:
        monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", directory)
        yield


def said(*command: str) -> str:
    done = CliRunner().invoke(app, list(command), env={"COLUMNS": "400"})
    assert done.exit_code == 0, done.output
    return done.stdout


def wait_until_whole(count: int) -> None:
    """Wait until a heartbeat has told the hub that the member is complete."""
    deadline = time.monotonic() + 30
    while json.dumps(json.loads(said("status", "m", "--format", "json"))).count('"whole"') < count:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_fetch_report_explains_each_path(runtime, tmp_path: Path) -> None:
    uri = str(tmp_path / "llama")
    write_llama(uri, total_bytes=4 * MIB, shards=2)
    with (
        ps.join("m") as first,
        ps.join("m", connection=ps.ConnectionSettings(transports=["http"])) as second,
        ps.join("m", variant=ps.Variant(dtype="other")) as odd,
    ):
        reports = [fleet.fetch({}, fallback=uri) for fleet in (first, second, odd)]
        wait_until_whole(3)

        for report in reports:
            assert sum(report.nbytes_by_path.values()) == report.nbytes
            for path in report.nbytes_by_path:
                assert report.why[path], path
                assert f"{path} (because {report.why[path]})" in report.summary()
        (to_storage,), (to_peer,), _ = (list(report.nbytes_by_path) for report in reports)
        assert to_storage == f"storage {uri}"
        assert "no member had" in reports[0].why[to_storage]
        assert to_peer == f"http <- {first.member.id[:8]}"
        assert "shm" in reports[1].why[to_peer]

        rows = {one["member"]: one for one in json.loads(said("status", "m", "--format", "json"))["members"]}
        for fleet, path in ((first, to_storage), (second, to_peer)):
            (holding,) = rows[fleet.member.id]["holdings"]
            assert holding["path"] == f"100% {path}"
            assert holding["why"].startswith(f"{path.partition(' ')[0]}: ")
        table = said("status", "m")
        assert to_peer in table
        assert first.member.id[:8] in table

        lines = said("why", "m")
        assert f"path of its bytes: 100% {to_peer} (http: " in lines
        assert "the identities differ: dtype: '' is not 'other'" in lines or "dtype: 'other' is not ''" in lines

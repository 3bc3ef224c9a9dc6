"""The emulation of a ring's workers and of a device's link."""

from __future__ import annotations

import re

import pytest

from benchmarks import bench_ring


def test_reads_take_at_least_the_time_of_the_link(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench_ring", "--runs", "1", "--reads", "200", "--link-us", "500", "--stall-every-ms", "0"]
    monkeypatch.setattr("sys.argv", command)
    assert bench_ring.main() == 0
    found = re.match(r"([\d.]+) us .* workers busy (\d+)%", capsys.readouterr().out)
    assert found is not None and float(found[1]) >= 500 and 0 < int(found[2]) <= 100

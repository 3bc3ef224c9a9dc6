"""The trace is Chrome-trace JSON from any thread, and always counts busy seconds."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from penstock.engine.trace import Trace, open_trace
from penstock.errors import ConfigError, DestinationError


def test_trace_spans_become_complete_events(tmp_path: Path) -> None:
    trace = Trace(enabled=True)
    at = trace.origin
    trace.add("fetch", "read 0", at + 1.0, at + 1.5, 100)
    trace.add("place", 'place "0"\n', at + 2.0, at + 2.25, 50)
    threads = [threading.Thread(target=trace.add, args=("fetch", "r", at, at + 1, 1)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace.save(tmp_path / "t.json")
    found = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    rows = {event["args"]["name"]: event["pid"] for event in found["traceEvents"] if event["ph"] == "M"}
    spans = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert sorted(rows) == ["fetch", "place"]
    assert len(spans) == 6
    first = next(span for span in spans if span["name"] == "read 0")
    assert first["pid"] == rows["fetch"] and first["args"] == {"bytes": 100}
    assert (first["ts"], first["dur"]) == pytest.approx((1e6, 5e5))
    assert {span["pid"] for span in spans} == set(rows.values())
    assert trace.busy_s() == pytest.approx({"fetch": 4.5, "place": 0.25})


def test_trace_stages_do_not_count_as_busy_time(tmp_path: Path) -> None:
    trace = Trace(enabled=True)
    with trace.stage("plan"), pytest.raises(ZeroDivisionError), trace.stage("fails"):
        1 / 0
    trace.save(tmp_path / "t.json")
    found = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    assert [(one["ph"], one["name"]) for one in found["traceEvents"] if one["ph"] != "M"] == [
        ("B", "fails"),
        ("E", "fails"),
        ("B", "plan"),
        ("E", "plan"),
    ]
    assert found["otherData"]["origin_s"] == trace.origin
    assert trace.busy_s() == {}


def test_disabled_trace_counts_busy_seconds_only(tmp_path: Path) -> None:
    trace = Trace(enabled=False)
    trace.add("fetch", "read 0", 1.0, 3.0, 100)
    with trace.stage("plan"):
        pass
    assert trace.busy_s() == {"fetch": 2.0}
    trace.save(tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))["traceEvents"] == []


def test_unwritable_trace_path_raises_before_loading(tmp_path: Path) -> None:
    assert not open_trace(None).enabled
    assert open_trace(tmp_path / "t.json").enabled
    with pytest.raises(ConfigError, match="cannot write the trace"):
        open_trace(tmp_path / "nowhere" / "t.json")
    with pytest.raises(DestinationError, match="cannot write"):
        Trace(enabled=True).save(tmp_path)

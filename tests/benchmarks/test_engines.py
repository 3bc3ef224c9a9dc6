"""The benchmark of engines takes turns, and its page has each way's times and each failure's reason."""

from __future__ import annotations

from typing import Any

from benchmarks.bench_engines import in_turns, outside, page

HEAD = {"kind": "machine", "engine": "vllm", "command": "COMMAND", "GPU": "none"}


def test_ways_take_turns_in_both_orders() -> None:
    assert in_turns(["a", "b", "c"], 2) == ["a", "b", "c", "c", "b", "a"]


def test_page_has_median_spread_and_failures() -> None:
    rows: list[dict[str, Any]] = [HEAD | {"suite": "load"}, {"kind": "model", "gb": 5.8}]
    for load_s in (0.3, 0.5, 0.4):
        row = {"kind": "engine", "way": "penstock", "import_s": 1.0, "start_s": 2.0, "first_token_s": 3.0}
        rows.append(row | {"load_s": load_s})
    rows.append({"kind": "failed", "way": "instanttensor", "why": "many lines\nNo module named 'instanttensor'"})
    lines = page(rows).splitlines()
    assert "5.8 GB of a Llama in BF16, eager mode." in lines
    (found,) = (line for line in lines if line.startswith("| penstock |"))
    assert "0.400 (0.300-0.500), n = 3" in found
    assert lines[-1] == "Failed: instanttensor: No module named 'instanttensor'"


def test_sleep_page_has_time_outside_allocator() -> None:
    row = {"kind": "engine", "way": "alone", "sleep_s": [7.0, 0.5], "sleep_inside_s": [6.5, 0.25]}
    row |= {"wake_s": [0.5], "wake_inside_s": [0.5]}
    assert outside(row, "sleep") == [0.5, 0.25]
    limits = {"kind": "limits", "gb": 9.0, "pin_gb_per_s": 2.0, "d2h_gb_per_s": [50.0], "h2d_gb_per_s": [51.0]}
    text = page([HEAD | {"suite": "sleep"}, row, limits])
    assert "| alone | 7.000 (7.000-7.000), n = 1 | 0.500" in text
    assert "| 9.0 | 2.00 | 50.000" in text

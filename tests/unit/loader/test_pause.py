"""Settings of the process that a load holds: put back when the last load ends, whoever ends first."""

from __future__ import annotations

import gc
import sys

import pytest

from penstock.lifecycle import HANDOVER_S, paused_gc, quick_handover


def test_the_switch_interval_is_short_inside_and_put_back() -> None:
    before = sys.getswitchinterval()
    with pytest.raises(KeyError), quick_handover():
        assert sys.getswitchinterval() == pytest.approx(HANDOVER_S)
        raise KeyError
    assert sys.getswitchinterval() == before


def test_loads_that_overlap_put_it_back_once() -> None:
    before = sys.getswitchinterval()
    first, second = quick_handover(), quick_handover()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(HANDOVER_S)
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == before


def test_an_interval_that_is_shorter_already_stays() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with quick_handover():
            assert sys.getswitchinterval() == pytest.approx(1e-5)
    finally:
        sys.setswitchinterval(before)


def test_the_collector_rests_inside_only() -> None:
    assert gc.isenabled()
    with paused_gc(), paused_gc():
        assert not gc.isenabled()
    assert gc.isenabled()

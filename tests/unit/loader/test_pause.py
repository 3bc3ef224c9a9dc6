"""Process-wide settings during a load are restored when the last load ends."""

from __future__ import annotations

import gc
import os
import sys
import threading

import pytest

from penstock.lifecycle import HANDOVER_S, paused_gc, quick_handover


def test_switch_interval_is_shortened_and_restored() -> None:
    before = sys.getswitchinterval()
    with pytest.raises(KeyError), quick_handover():
        assert sys.getswitchinterval() == pytest.approx(HANDOVER_S)
        raise KeyError
    assert sys.getswitchinterval() == before


def test_switch_interval_is_restored_after_last_overlapping_load() -> None:
    before = sys.getswitchinterval()
    first, second = quick_handover(), quick_handover()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(HANDOVER_S)
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == before


def test_shorter_switch_interval_is_not_changed() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with quick_handover():
            assert sys.getswitchinterval() == pytest.approx(1e-5)
    finally:
        sys.setswitchinterval(before)


def test_garbage_collector_is_paused_only_inside_block() -> None:
    assert gc.isenabled()
    with paused_gc(), paused_gc():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_child_forked_while_other_thread_pauses_collects_garbage() -> None:
    paused, may_end = threading.Event(), threading.Event()

    def pause() -> None:
        with paused_gc():
            paused.set()
            may_end.wait(30)

    thread = threading.Thread(target=pause)
    thread.start()
    assert paused.wait(30)
    child = os.fork()
    if child == 0:
        os._exit(0 if gc.isenabled() else 1)
    _, status = os.waitpid(child, 0)
    may_end.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0
    assert gc.isenabled()

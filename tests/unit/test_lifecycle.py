"""The switch interval of the GIL inside `quick_handover`."""

from __future__ import annotations

import os
import sys

import pytest

from penstock import lifecycle


def test_switch_interval_is_restored_after_block() -> None:
    before = sys.getswitchinterval()
    with pytest.raises(OSError), lifecycle.quick_handover(), lifecycle.quick_handover():
        assert sys.getswitchinterval() == pytest.approx(lifecycle.HANDOVER_S)
        raise OSError
    assert sys.getswitchinterval() == before


def test_forked_child_has_original_switch_interval() -> None:
    before = sys.getswitchinterval()
    with lifecycle.quick_handover():
        child = os.fork()
        if not child:
            os._exit(0 if sys.getswitchinterval() == before else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert sys.getswitchinterval() == pytest.approx(lifecycle.HANDOVER_S)
    assert sys.getswitchinterval() == before

"""The switch interval of the GIL inside `quick_handover`."""

from __future__ import annotations

import os
import sys

import pytest

from penstock import lifecycle


def test_the_interval_is_short_inside_and_as_before_outside() -> None:
    before = sys.getswitchinterval()
    with pytest.raises(OSError), lifecycle.quick_handover(), lifecycle.quick_handover():
        assert sys.getswitchinterval() == pytest.approx(lifecycle.HANDOVER_S)
        raise OSError
    assert sys.getswitchinterval() == before


def test_a_forked_child_has_the_interval_of_before() -> None:
    before = sys.getswitchinterval()
    with lifecycle.quick_handover():
        child = os.fork()
        if not child:
            os._exit(0 if sys.getswitchinterval() == before else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert sys.getswitchinterval() == pytest.approx(lifecycle.HANDOVER_S)
    assert sys.getswitchinterval() == before

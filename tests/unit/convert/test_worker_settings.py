"""`WorkerSettings`: what `convert` takes as `workers=`, and wrong values, each reported where it is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.support.jobs import ForkLauncher

import penstock as ps
import penstock_convert

WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "no workers": (lambda: penstock_convert.WorkerSettings(num_workers=0), "num_workers=0"),
    "a text as a number": (lambda: penstock_convert.WorkerSettings(num_workers="2"), "num_workers"),
    "a bool as a number": (lambda: penstock_convert.WorkerSettings(num_workers=True), "num_workers"),
    "memory that is no size": (lambda: penstock_convert.WorkerSettings(memory_bytes="much"), "much"),
    "memory as a float": (lambda: penstock_convert.WorkerSettings(memory_bytes=1.5e9), "float"),
    "a number as a directory": (lambda: penstock_convert.WorkerSettings(scratch=3), "scratch"),
    "a number as a cluster": (lambda: penstock_convert.WorkerSettings(ray=3), "ray"),
    "two ways to start workers": (
        lambda: penstock_convert.WorkerSettings(ray="auto", launcher=ForkLauncher()),
        "both ray= and launcher=",
    ),
    "a text as a launcher": (lambda: penstock_convert.WorkerSettings(launcher="slurm"), "launcher"),
    "a text as rates": (lambda: penstock_convert.WorkerSettings(rates="h200"), "rates"),
    "a text as workers": (lambda: penstock_convert.WorkerSettings.of("2"), "workers"),
    "a bool as workers": (lambda: penstock_convert.WorkerSettings.of(True), "workers"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_worker_setting_raises_config_error(case: str) -> None:
    make, text = WRONG[case]
    with pytest.raises(ps.ConfigError, match=text):
        make()


def test_worker_settings_accept_number_or_none() -> None:
    assert penstock_convert.WorkerSettings.of(3) == penstock_convert.WorkerSettings(num_workers=3)
    assert penstock_convert.WorkerSettings.of(None) == penstock_convert.WorkerSettings()
    settings = penstock_convert.WorkerSettings(memory_bytes="2G", scratch="/tmp")
    assert penstock_convert.WorkerSettings.of(settings) is settings

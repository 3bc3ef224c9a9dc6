"""Machine model for the simulations of a fetch and a sync, in addition to `penstock_convert.plan.cluster`."""

from __future__ import annotations

import math

import msgspec

from penstock.errors import ConfigError
from penstock_convert.plan.cluster import Rates

SHORT_RUN_BYTES = 256 << 10
"""Minimum size in bytes of a run that is a separate copy. Source: `transport.cuda_ipc.SHORT_BYTES`."""
SLAB_BYTES = 1 << 30
"""Number of bytes that the kernels digest in one launch. Source: `digest.cuda.Tuning`."""
STORAGE_GB_PER_S = 3.4
"""Rate in GB/s at which a node reads from storage if the cluster does not specify a rate. Source:
benchmarks/results/h200x1_202611/load-history.md, 14 GB from a cold disk in 4.1 s."""

PYTHON_COSTS = (
    "step_s",
    "slab_s",
    "post_s",
    "run_s",
    "short_run_s",
    "near_post_s",
    "copy_s",
    "gather_s",
    "answer_s",
    "hop_s",
)
"""Names of the costs that depend on the host's processor: Python calls that queue work for a device or send
requests."""


def slowed(rates: Rates, times: float) -> Rates:
    """Return the rates of the same machine with Python running slower by the factor `times`. See `PYTHON_COSTS`.

    A factor that is not a finite number above 0 raises ConfigError.
    """
    if not 0 < times < math.inf:
        raise ConfigError(f"Python slowdown {times} is not a finite number above 0", hint="use 2 for half the speed")
    if times == 1:
        return rates
    how = f"Python {times:.3g} times slower"
    source = tuple((name, f"{text}; {how}" if name in PYTHON_COSTS else text) for name, text in rates.source)
    costs = {name: times * getattr(rates, name) for name in PYTHON_COSTS}
    # A saved prediction must show the slowdown too.
    return msgspec.structs.replace(rates, name=f"{rates.name}, {how}", source=source, **costs)

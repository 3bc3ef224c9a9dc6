"""Prediction of a job's duration on this machine.

In: tasks, the devices of workers, rates. Out: seconds by the simulation and their basis; or why there are none.
Not here: the simulation (`plan.simulate_convert`), measuring rates (`penstock doctor --calibrate`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence, Set
from pathlib import Path

import msgspec
import numpy as np

from penstock.jobs.job import Job
from penstock.plan.cluster import CLUSTERS, Cluster, Rates
from penstock.plan.placement import depth_of
from penstock.plan.simulate_convert import simulate_convert
from penstock.storage import is_remote

_MODELS = {"H200": "h200", "H100": "h100"}
"""Part of a GPU's name -> the cluster description with that GPU."""
GPUS = Path("/proc/driver/nvidia/gpus")
"""A directory for each GPU. Source: README of NVIDIA's Linux driver, "The /proc Interface"."""


Predicted = tuple[float | None, str]
"""Seconds from the first worker's readiness to the last task's end, and their basis; or None and the reason."""


def predict(job: Job, kept: Set[int], uris: Iterable[str], devices: Sequence[str], rates: Rates | None) -> Predicted:
    """Predict a run.

    Args:
        job: the planned job.
        kept: tasks that are done already.
        uris: of the sources and of the destination.
        devices: the device of each worker, if they are on this host; else none.
        rates: of this machine's stages; None: the known rates of its GPUs.
    """
    rows = np.array([task for task in range(len(job.tasks)) if task not in kept], np.int64)
    if not len(rows):
        return None, "nothing was left to do"
    # A store's rate depends on the network and on its other users: a guess would look like a measurement.
    if away := next((uri for uri in uris if is_remote(uri)), None):
        return None, f"no rate is known of {away}"
    machine = _machine(devices, rates) if devices else "no rates are known of other hosts"
    if isinstance(machine, str):
        return None, machine
    read_bytes, depth = job.read_bytes[rows].sum(axis=1), depth_of(devices)
    simulated = simulate_convert(read_bytes, job.tasks.out_bytes[rows], *machine, depth=depth)
    return simulated.predicted_s, f"the rates of {machine[1].name}, a disk that keeps up"


def _machine(devices: Sequence[str], rates: Rates | None) -> tuple[Cluster, Rates] | str:
    """Return this host as a cluster with one GPU for each worker, and its rates; or why they are not known."""
    count = len(devices)
    if all(device == "cpu" for device in devices):
        if rates is None:
            return "no rates are known of this processor: measure it with `penstock doctor --calibrate FILE`"
        # Bytes are copied out of the page cache and into it; workers beyond the cores share them.
        share = min(1.0, len(os.sched_getaffinity(0)) / count)
        alone = msgspec.structs.replace(rates, quantise_gb_per_s=rates.quantise_gb_per_s * share)
        return _host(CLUSTERS["cpu-pair"][0], count, rates.device_copy_gb_per_s * share), alone
    models = _gpus()
    known = {cluster for part, cluster in _MODELS.items() for model in models if part in model}
    if len(models) != 1 or len(known) != 1 or "cpu" in devices:
        return f"no rates are known of {', '.join(sorted(models)) or 'these devices'}"
    cluster, built_in = CLUSTERS[known.pop()]
    return _host(cluster, count, cluster.pcie_gb_per_s * len(set(devices)) / count), rates or built_in


def _host(cluster: Cluster, num_workers: int, pcie_gb_per_s: float) -> Cluster:
    return msgspec.structs.replace(cluster, num_nodes=1, gpus_per_node=num_workers, pcie_gb_per_s=pcie_gb_per_s)


def _gpus() -> set[str]:
    """Return the models of this host's NVIDIA GPUs from /proc: initialising CUDA for it would take seconds."""
    models = set()
    for path in GPUS.glob("*/information"):
        facts = dict(line.partition(":")[::2] for line in path.read_text(encoding="utf-8").splitlines())
        models.add(facts.get("Model", "").strip())
    return models

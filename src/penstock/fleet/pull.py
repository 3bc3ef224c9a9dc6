"""The verb behind `penstock pull`: a model from the fleet into files, or to a device to see how it gets there.

In: a model's name. Out: a directory of shards with index and manifest, whole or not there; a `FetchReport`.
Not here: fetching (`join`), the format (`storage.safetensors`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from penstock.config import Settings
from penstock.digest.leaf import num_leaves, revision, take_leaves
from penstock.errors import ConfigError, DestinationError, IntegrityError
from penstock.fleet.holding import Holding
from penstock.fleet.join import Fleet
from penstock.fleet.report import FetchReport
from penstock.storage.manifest import Uris, encode, open_weights, sidecar_uri
from penstock.storage.output import write_file
from penstock.types import GB, DType, Manifest

SHARD_BYTES = 5 * GB
"""Of a shard, at most, but for a tensor that is larger. Source: the default of transformers' `save_pretrained`."""


def pull(
    fleet: Fleet,
    *,
    to: str | os.PathLike[str] | None = None,
    device: str | int | torch.device = "cpu",
    fallback: Uris | None = None,
    wait_s: float | None = None,
) -> FetchReport:
    """Fetch the fleet's model; write it to a directory, or only see how it gets to a device.

    Args:
        fleet: a member, as of `join`.
        to: a directory that is not there, or empty; it appears whole, with its manifest. None: nothing is written.
        device: where it is fetched to; the host, where it is written.
        fallback, wait_s: see `Fleet.fetch`.

    Returns:
        The fetch's report; with `to`, `phases` has `write` too.

    Raises:
        ConfigError: the directory is there and has something in it; nothing was fetched.
        DiskFull, DestinationError: it cannot be written; nothing is left of it.
        PenstockError: see `Fleet.fetch`.

    Cost: with `to`, all of the weights in host memory.
    """
    target = None if to is None else Path(to)
    if target is not None:
        _check_empty(target)
    tensors: dict[str, torch.Tensor] = {}
    report = fleet.fetch(tensors, fallback=fallback, device="cpu" if target else device, wait_s=wait_s)
    if target is None:
        return report
    begun = time.perf_counter()
    holding = next(one for one in fleet.member.holdings if one.key == report.key)
    _write(target, holding)
    phases = {**report.phases, "write": time.perf_counter() - begun}
    return replace(report, phases=phases, wall_s=sum(phases.values()))


def _check_empty(target: Path) -> None:
    try:
        is_taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
    except OSError as error:
        raise DestinationError(f"cannot look into it: {error.strerror}", uri=str(target)) from error
    if is_taken:
        raise ConfigError("there is something there already", uri=str(target), hint="give a directory that is empty")


def _write(target: Path, holding: Holding) -> None:
    """Everything into a directory beside the target, then renamed to it."""
    target = target.absolute()
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        try:
            _write_shards(partial, holding)
            # The names, shapes and places are read back from what was written; the digests are those of the fetch.
            with open_weights(str(partial), settings=Settings.read()) as weights:
                (partial / Path(sidecar_uri(str(partial))).name).write_bytes(
                    encode(_digested(weights.manifest, holding))
                )
            partial.rename(target)
        finally:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(partial)
    except OSError as error:
        raise DestinationError(f"cannot write: {error.strerror}", uri=str(target)) from error


def _write_shards(directory: Path, holding: Holding) -> None:
    table = holding.line.table
    shards: list[list[int]] = []
    room = 0
    for row, nbytes in enumerate(table.nbytes.tolist()):
        if not shards or nbytes > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(row)
        room -= nbytes
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    names = ["model.safetensors"] if len(shards) <= 1 else names
    for name, rows in zip(names, shards or [[]], strict=True):
        write_file(directory / name, _shard(holding, rows), {"format": "pt"})
    if len(shards) > 1:
        weight_map = {table.names[row]: name for name, rows in zip(names, shards, strict=True) for row in rows}
        index = {"metadata": {"total_size": holding.line.nbytes}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _shard(holding: Holding, rows: Sequence[int]) -> dict[str, tuple[DType, Sequence[int], memoryview]]:
    table = holding.line.table
    return {
        table.names[row]: (table.dtypes[row], table.shapes[row], memoryview(holding.rows[row].numpy().data))
        for row in rows
    }


def _digested(written: Manifest, holding: Holding) -> Manifest:
    """The manifest of what was written, with the digests that were verified when it came."""
    line = holding.line
    row_of = {name: row for row, name in enumerate(line.table.names)}
    rows = np.array([row_of[name] for name in written.tensors.names], np.int64)
    counts = num_leaves(line.table.nbytes, line.chunks.leaf_bytes)
    if len(rows) != len(line.table):
        raise IntegrityError(f"{len(rows)} tensors were written of {len(line.table)}")
    return replace(
        written,
        leaf_bytes=line.chunks.leaf_bytes,
        leaves=take_leaves(holding.leaves, counts, rows),
        revision=revision(line.table, line.chunks.leaf_bytes, holding.leaves),
    )

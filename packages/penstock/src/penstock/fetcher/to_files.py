"""The implementation of `penstock fetch`: fetches a model from the fleet into files, or to a device as a test."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import shutil
from pathlib import Path

import msgspec
import numpy as np
import torch

from penstock.arguments import formerly
from penstock.config import ConnectionSettings, Settings
from penstock.digest.leaf import num_leaves, take_leaves
from penstock.errors import IntegrityError, SourceError
from penstock.fetcher.discover import PlacedTarget
from penstock.fetcher.join import Fleet, join
from penstock.fetcher.report import NO_MEMBER, FetchReport
from penstock.holding.weight_layout import WeightLayout
from penstock.loader.progress import ProgressOption
from penstock.peer.local_weights import LocalWeights
from penstock.phases import Phases
from penstock.storage.locate import texts_of
from penstock.storage.output import OutputSet
from penstock.storage.place import DestinationClaim, OutputPlace, remove_dead
from penstock.storage.weight_set import Uris, encode, open_weights, sidecar_uri
from penstock.storage.write import typed
from penstock.types import GB, Manifest, TensorTable

SHARD_BYTES = 5 * GB
"""Size limit of a shard in bytes. Only a shard with one larger tensor exceeds it. Source: the default of transformers'
`save_pretrained`."""
_TOKEN = "fetch-"
_EXPLAIN_S = 2.0
"""Maximum wait for the hub's explanation of why storage was read, in seconds. The fetch is already done."""


def fetch_to_files(
    fleet: Fleet,
    *,
    to: str | os.PathLike[str] | None = None,
    device: str | int | torch.device = "cpu",
    fallback: Uris | None = None,
    timeout_s: float | None = None,
    replace: bool = False,
    progress: ProgressOption = None,
) -> FetchReport:
    """Fetch the fleet's model and write it to a directory, or only to a device.

    If `to` is set, bytes are received into the pages of the files, and so use only reclaimable memory.

    Args:
        fleet: a member, from `join`.
        to: a directory that does not exist or is empty, and that appears only once complete, or None to write nothing.
        device: device that receives the tensors, which must be the host if `to` is set.
        fallback, timeout_s, progress: see `Fleet.fetch`.
        replace: replace an existing weight set at `to` once the new set is complete.

    Returns:
        The fetch's report, whose `phases` include `write` if `to` is set.

    Raises:
        ConfigError: the directory exists and is not empty, contains the fallback, or contains files that Penstock did
            not write. Nothing was fetched.
        DiskFull, DestinationError: the directory cannot be written, or another process writes to it. Nothing remains.
        PenstockError: see `Fleet.fetch`.
    """
    if to is None:
        return fleet.fetch({}, fallback=fallback, device=device, timeout_s=timeout_s, progress=progress)
    place = OutputPlace.at(to)
    place.require_free(replace=replace, sources=[] if fallback is None else texts_of(fallback))
    remove_dead(place, _TOKEN)
    # Stage on the file system of the target, so that one rename publishes it.
    staging = place.staging(f"{_TOKEN}{secrets.token_hex(4)}")
    with DestinationClaim.open(place.path, staging):
        files = _MappedFiles(staging)
        try:
            report = fleet.fetch(files, fallback=fallback, timeout_s=timeout_s, progress=progress)
            with Phases("write", journey="fetch", model=fleet.identity.model) as writing:
                weights = next(shown for shown in fleet.member.weights if shown.key == report.key)
                files.publish(place.path, weights, replace)
        finally:
            files.close()
    phases = {**report.phases, **writing.seconds}
    return msgspec.structs.replace(report, phases=phases, wall_s=sum(phases.values()))


@formerly(wait_s="timeout_s")
def fetch_model(
    model: str,
    *,
    connection: ConnectionSettings,
    revision: str = "",
    to: str | os.PathLike[str] | None = None,
    device: str | int | torch.device = "cpu",
    fallback: str | None = None,
    timeout_s: float | None = None,
    replace: bool = False,
) -> FetchReport:
    """Join the fleet of a model and fetch the model as `fetch_to_files` does. If no hub responds, read the fallback."""
    before = None if to is None else _directory_at(OutputPlace.at(to).path)
    # Without a fallback the hub is required, and the error from `join` describes the hub's problem best.
    needs_hub = fallback is None
    try:
        with join(model, connection=connection, revision=revision, timeout_s=timeout_s, needs_hub=needs_hub) as fleet:
            report = fetch_to_files(
                fleet, to=to, device=device, fallback=fallback, timeout_s=timeout_s, replace=replace
            )
            return report if needs_hub or fleet.member.registration.away is not None else _explained(fleet, report)
    except KeyboardInterrupt as interrupt:
        # The interrupt may arrive after the files are published, during the wait for readers.
        if to is not None and _directory_at(to) != before:
            interrupt.add_note(f"{to} is complete. Penstock only waited for readers of this process. To fetch again:")
        else:
            state = "nothing was written"
            if to is not None:
                state = f"{to} is unchanged, because all files appear there at once"
            interrupt.add_note(f"the fetch of {model} was not complete; {state}. To start it again:")
        raise


def _directory_at(path: str | os.PathLike[str]) -> int | None:
    with contextlib.suppress(OSError):
        return os.stat(path).st_ino
    return None


def _explained(fleet: Fleet, report: FetchReport) -> FetchReport:
    mine = next((weights.identity for weights in fleet.member.weights if weights.key == report.key), None)
    if mine is None or set(report.why.values()) != {NO_MEMBER}:
        return report
    # The fetch is done, so an error from the hub must not fail it.
    with contextlib.suppress(SourceError):
        for member in fleet.member.hub.status(report.model, within_s=_EXPLAIN_S).members:
            whole = [state.identity for state in member.holdings if state.state == "whole"]
            differences = mine.differences(whole[0]) if whole else {}
            if member.member == fleet.member.id or not differences:
                continue
            words = [f"{name} {theirs!r}, not {ours!r}" for name, (ours, theirs) in differences.items()]
            why = f"member {member.member[:8]} is complete under a different key: {', '.join(words)}"
            if "revision" in differences and mine.revision.startswith("h1-"):
                why += "; storage has no manifest, so its revision is not a root of digests: run `penstock manifest`"
            return msgspec.structs.replace(report, why=dict.fromkeys(report.why, why))
    return report


class _MappedFiles(PlacedTarget):
    """A target whose tensors are mappings of the output files, so that the kernel writes the bytes as they arrive."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._output: OutputSet | None = None

    def place(self, layout: WeightLayout) -> list[torch.Tensor]:
        placed, body_nbytes = _places(layout.table)
        output = self._output = OutputSet(self._directory, placed, body_nbytes, {"format": "pt"}, stem=layout.stem)
        output.create()
        output.open()
        whole = [_mapped(self._directory / name) for name in output.names]
        starts = placed.offset + np.array(output.data_offset, np.int64)[placed.file_index]
        runs = zip(placed.file_index.tolist(), starts.tolist(), placed.nbytes.tolist(), strict=True)
        return [whole[file][start : start + nbytes] for file, start, nbytes in runs]

    def publish(self, target: Path, weights: LocalWeights, replace: bool) -> None:
        assert self._output is not None
        # Read names, shapes and offsets back from the files. The fetch verified the digests of the same pages.
        with open_weights(
            [str(self._directory / name) for name in self._output.names], settings=Settings.read()
        ) as written:
            manifest = encode(_digested(written.manifest, weights))
        self._output.publish(target, {Path(sidecar_uri(str(target))).name: manifest}, replace=replace)

    def close(self) -> None:
        if self._output is not None:
            self._output.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def _places(table: TensorTable) -> tuple[TensorTable, list[int]]:
    nbytes = table.nbytes.tolist()
    file_index, offset = np.zeros(len(table), np.int64), np.zeros(len(table), np.int64)
    bodies = [0]
    for row, length in enumerate(nbytes):
        if bodies[-1] and bodies[-1] + length > SHARD_BYTES:
            bodies.append(0)
        file_index[row] = len(bodies) - 1
        bodies[-1] += length
    filled = [0] * len(bodies)
    # Place wide dtypes first, so that each tensor starts at a multiple of its element size, for readers that map it.
    for row in sorted(range(len(table)), key=lambda row: -table.dtypes[row].bits):
        offset[row] = filled[file_index[row]]
        filled[file_index[row]] += nbytes[row]
    return msgspec.structs.replace(table, file_index=file_index, offset=offset), bodies


def _mapped(path: Path) -> torch.Tensor:
    with typed(path), open(path, "r+b") as file:
        return torch.from_numpy(np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8))


def _digested(written: Manifest, weights: LocalWeights) -> Manifest:
    layout = weights.layout
    row_of = {name: row for row, name in enumerate(layout.table.names)}
    rows = np.array([row_of[name] for name in written.tensors.names], np.int64)
    counts = num_leaves(layout.table.nbytes, layout.chunks.leaf_bytes)
    if len(rows) != len(layout.table):
        raise IntegrityError(f"the files have {len(rows)} tensors, but the fetched model has {len(layout.table)}")
    return msgspec.structs.replace(
        written,
        leaf_bytes=layout.chunks.leaf_bytes,
        leaves=take_leaves(weights.verified.leaves, counts, rows),
        revision=weights.verified.root(),
    )

"""Sidecar files of a result: manifests, configuration and tokenizer, and files that an operation adds.

In: a job, the manifest of all its outputs, small files of a source. Out: small files of the result, by path.
Not here: the index (`storage.output`), which source's small files (`small_from`), writing them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np

from penstock.digest.leaf import num_leaves, revision, take_leaves
from penstock.jobs.job import Job
from penstock.storage.locate import SIDECAR
from penstock.storage.manifest import encode
from penstock.types import Manifest


@runtime_checkable
class Attested(Protocol):
    """An operation that adds files to its result, or that knows the result's revision beforehand.

    Attributes:
        small_from: the source whose configuration and tokenizer the result has.
    """

    small_from: int

    def files(self) -> Mapping[str, bytes]:
        """Return additional small files of the result."""
        ...

    def check(self, manifest: Manifest) -> None:
        """Raise IntegrityError if the result is not the expected one; nothing is published then."""
        ...


def small_from(job: Job) -> int:
    """Return the source whose configuration and tokenizer the result has."""
    return job.operation.small_from if isinstance(job.operation, Attested) else 0


def sidecar_files(job: Job, manifest: Manifest, small: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return all sidecar files, after the operation has checked the result.

    A result of several weight sets has small files and a manifest in the directory of each. If several sets share one
    directory, each file has its own manifest, and the directory has the small files. The manifest of all sets, by
    paths, is at the root too: it shows that the result is complete.
    """
    in_each_set = dict(small)
    if isinstance(job.operation, Attested):
        job.operation.check(manifest)
        in_each_set |= job.operation.files()
    groups = dict.fromkeys(group for group in job.files.groups if group)
    sidecars = {} if groups and not any("*" in group for group in groups) else dict(in_each_set)
    for group in groups:
        files = [i for i, of_file in enumerate(job.files.groups) if of_file == group]
        if "*" in group:
            sidecars |= {f"{manifest.files[i].name}.{SIDECAR}": encode(_part(manifest, [i], group, "")) for i in files}
        else:
            sidecars |= {f"{group}/{name}": data for name, data in in_each_set.items()}
            sidecars[f"{group}/{SIDECAR}"] = encode(_part(manifest, files, group, f"{group}/"))
    return sidecars | {SIDECAR: encode(manifest)}


def _part(manifest: Manifest, files: list[int], group: str, place: str) -> Manifest:
    """Return the manifest of some files, whose tensors' names are without their group."""
    assert manifest.leaves is not None
    table = manifest.tensors
    rows = np.flatnonzero(np.isin(table.file_index, files))
    taken = table.take(rows.tolist())
    number = {file: i for i, file in enumerate(files)}
    tensors = replace(
        taken,
        names=tuple(name[len(group) + 1 :] for name in taken.names),
        file_index=np.array([number[file] for file in taken.file_index.tolist()], np.int64),
    )
    leaves = take_leaves(manifest.leaves, num_leaves(table.nbytes, manifest.leaf_bytes), rows)
    return Manifest(
        files=tuple(replace(manifest.files[i], name=manifest.files[i].name.removeprefix(place)) for i in files),
        tensors=tensors,
        leaf_bytes=manifest.leaf_bytes,
        leaves=leaves,
        revision=revision(tensors, manifest.leaf_bytes, leaves),
    )

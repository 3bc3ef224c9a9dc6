"""Size of a read: one chunk at first, more chunks if reads are fast, and many at once if memory is only mapped."""

from __future__ import annotations

import pytest
import torch
from tests.support.compare import assert_same

import penstock as ps
from penstock.segments import Segments
from penstock.transport.http import HttpTransport
from penstock.transport.protocol import Descriptor, Handle, PendingRead
from penstock.types import MIB

CHUNK_BYTES = 256 << 10


class Mapped(HttpTransport):
    """A transport that claims to map peers' memory."""

    def reach(self, into: Handle, source: Descriptor) -> None:
        """Do nothing, because there is nothing to map."""


@pytest.mark.parametrize("is_mapped", [True, False])
def test_first_read_of_mapped_memory_exceeds_one_chunk(
    is_mapped: bool, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
    monkeypatch.setattr("penstock.holding.weight_layout.CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr("penstock.fetcher.upstream.MAPPED_STEP_CHUNKS", 8)
    first, honest = list[int](), HttpTransport.post_read

    def post_read(self: HttpTransport, into: Handle, source: Descriptor, segments: Segments) -> PendingRead:
        first.append(int(segments.nbytes.sum()))
        return honest(self, into, source, segments)

    monkeypatch.setattr(HttpTransport, "post_read", post_read)
    ours = {"t": torch.arange(8 * MIB, dtype=torch.int64).to(torch.uint8)}
    found: dict[str, torch.Tensor] = {}
    with (
        ps.join("m", connection=ps.ConnectionSettings(transports=["http"])) as holder,
        ps.join("m", connection=ps.ConnectionSettings(transports=["http"])) as reader,
    ):
        if is_mapped:
            reader.member.links.transports["http"].__class__ = Mapped
        holder.offer(ours)
        reader.fetch(found)
    assert_same(found, ours)
    assert first[0] == (8 * CHUNK_BYTES if is_mapped else CHUNK_BYTES)

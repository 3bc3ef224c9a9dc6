"""Peers' host memory of this host, mapped and pinned here, so that a device's copy engine reads it itself.

In: a peer's arena as `shm` shows it. Out: its bytes on our device, at the speed of the device's link.
Not here: reads of what is read once (`staged`), mapping (`shm`), devices' memory (`cuda_ipc`).

    claim --> map, pin, once --> segments, queued in turns --> event --> claim again
                                 (many short runs: pitched copies, or a kernel of our device, `lay_out_rectangles`)

Pinning takes three times as long as a copy (0.053 s a GB, copies 55 GB/s: benchmarks/results/h200x4_202611/sync.md), so
this is for memory that is read again and again. Of what a publisher pinned already it takes no more.
"""

from __future__ import annotations

from penstock.cuda.driver import CudaDriver, ordinal
from penstock.errors import PeerLost, StaleDescriptor
from penstock.segments import Rectangles, Segments
from penstock.transport.host_endpoint import Claim, IntoHandle, Mappings
from penstock.transport.protocol import DeferredRead, Descriptor, Handle, Pending, Striding, Transport
from penstock.transport.shm import MappedMemory, ShmTransport
from penstock.transport.staged import IntoDevice, batches
from penstock.types import MIB

TURN_BYTES = 256 * MIB
"""Copied between two looks at the fence: 5 ms at 55 GB/s."""

SHORT_BYTES = 64 << 10
"""Runs shorter than this are short: starting a copy of its own takes 0.7 us, in which the link moves 38 KB."""

MANY = 64
"""So many short runs of a read are laid out as rectangles, which costs about 0.2 ms."""


class _Pinned:
    """A peer's mapped memory, page-locked until this object is collected; then it is unmapped."""

    def __init__(self, driver: CudaDriver, device: int, mapped: MappedMemory) -> None:
        self._driver, self._device = driver, device
        # Set only after the pin: a failed pin must not be undone in `__del__`.
        self._mapped: MappedMemory | None = None
        with driver.entered(device):
            driver.pin(mapped.address, mapped.array.nbytes, is_read_only=True)
        self._mapped = mapped

    def __del__(self) -> None:
        if self._mapped is not None:
            with self._driver.entered(self._device):
                self._driver.unpin(self._mapped.address)


class PinnedRead(DeferredRead[IntoHandle, Claim, _Pinned, int]):
    """See `Pending`."""

    def __init__(
        self,
        transport: PinnedTransport,
        into: IntoHandle,
        claim: Claim,
        source: _Pinned,
        base: int,
        rows: Segments,
        short: Rectangles | None = None,
    ) -> None:
        self._transport, self._rows, self._short = transport, rows, short
        nbytes = int(rows.nbytes.sum()) + (0 if short is None else int(short.nbytes.sum()))
        super().__init__(nbytes, into, claim, source, base)

    def _carry(self, stall_s: float, into: IntoHandle, claim: Claim, source: _Pinned, base: int) -> None:
        for turn in batches(self._rows, TURN_BYTES):
            into.check_open()
            claim.check()
            self._transport.copy(into, base, turn, stall_s, keep=source)
            self.moved_bytes += int(turn.nbytes.sum())
        for some in () if self._short is None else self._short.addressed(into.memory.address, base, TURN_BYTES):
            into.check_open()
            claim.check()
            self._transport.gather(into, some, stall_s, keep=source)
            self.moved_bytes += int(some.nbytes.sum())
        into.check_open()
        claim.check()  # after the last byte: a holder fences before it changes one


class PinnedTransport(IntoDevice):
    """See `IntoDevice`.

    Args:
        shm: maps peers' memory; stays its owner's.
        driver: stands in for the CUDA driver, in tests.

    Raises:
        ConfigError: no CUDA driver.
    """

    name = "pinned_shm"
    nap_s = 0.0002

    def __init__(self, shm: ShmTransport, driver: CudaDriver | None = None) -> None:
        super().__init__(self.name, shm.name, driver)
        self._shm = shm
        self._kept: Mappings[_Pinned] = Mappings()

    def reach(self, into: Handle, source: Descriptor) -> None:
        """Map and pin a peer's memory now, so that the first read does not wait for it. Raises as `post_read`."""
        self._reached(self._check(into, source), source)

    def post_read(self, into: Handle, source: Descriptor, segments: Segments) -> PinnedRead:
        """See `Transport.post_read`; the descriptor is of `shm`. The first read of a peer's memory pins it.

        Raises:
            DestinationError: it cannot be pinned.
        """
        mine = self._check(into, source)
        segments.check(src_nbytes=source.nbytes, dst_nbytes=mine.memory.nbytes)
        claim, pinned, base = self._reached(mine, source)
        return PinnedRead(self, mine, claim, pinned, base, segments.joined())

    def post_rectangles(self, into: Handle, source: Descriptor, rectangles: Rectangles) -> PinnedRead:
        """See `Striding`. Raises as `post_read`."""
        mine = self._check(into, source)
        rectangles.check(src_nbytes=source.nbytes, dst_nbytes=mine.memory.nbytes)
        if not self._driver.sees_host(ordinal(mine.memory.device)):
            return self.post_read(into, source, rectangles.segments())
        claim, pinned, base = self._reached(mine, source)
        return PinnedRead(self, mine, claim, pinned, base, *rectangles.apart(SHORT_BYTES, MANY))

    def gather(self, into: IntoHandle, rows: Rectangles, stall_s: float, *, keep: object) -> None:
        """As `copy`: rectangles whose `src` and `dst` are addresses."""
        driver = self._driver
        self.queued(into, lambda *at: driver.lay_out_rectangles(rows, *at)(), stall_s, keep=keep)

    def _reached(self, into: IntoHandle, source: Descriptor) -> tuple[Claim, _Pinned, int]:
        """The promise, the memory, and where the registration is in our address space."""
        claim, mapped, base = self._shm.view(source)
        device = ordinal(into.memory.device)
        with self._lock:
            pinned = self._kept.get(claim, device)
            if pinned is None:
                self._endpoint.check_open()
                pinned = _Pinned(self._driver, device, mapped)
                self._kept.put(claim, pinned, device)
        return claim, pinned, base

    def wait(self, pending: Pending, *, stall_s: float) -> None:
        """See `Transport.wait`. DestinationError: the device failed, or copied nothing for `stall_s`."""
        assert isinstance(pending, PinnedRead)
        try:
            pending.run(stall_s)
        except (StaleDescriptor, PeerLost):
            self.sweep()
            self._shm.sweep()
            raise

    def sweep(self) -> None:
        """Let go of memory of peers that are gone or gave it up."""
        with self._lock:
            self._kept.sweep()

    def close(self) -> None:
        """See `Transport.close`."""
        if not self._endpoint.page.is_mine:
            return
        self._endpoint.close()
        with self._lock:
            self._kept.clear()
        self._close_lanes()


_fits: type[Transport] = PinnedTransport
_strides: type[Striding] = PinnedTransport

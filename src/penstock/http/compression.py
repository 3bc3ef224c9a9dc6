"""Decide whether compressing a link's bytes pays: measured raw, tried if promising, kept if it was faster.

In: bytes as they arrive, the clock. Out: raw or coded for the next request, and why in words.
Not here: the code (`byte_planes`), the connections (`transport.http_reader`).

    raw: sample --> time --> ratio x link, codec > link?  --yes--> coded: time --> more than raw? --yes--> coded
                                     `--no--> raw                                       `--no--> raw; watched on
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np

from penstock.http.byte_planes import Planes
from penstock.types import GB, MIB

SKIP_BYTES = 24 * MIB
"""After a change, before the clock counts: what was in flight, what filled sockets while samples were coded (6 MiB each
is the kernel's own bound), a shaper's burst."""
TIMED_BYTES = 32 * MIB
"""What a rate is measured over: 0.27 s of a 1 Gb/s link, 14 ms of 20 Gb/s."""
PIECE_BYTES, REQUEST_BYTES = MIB, 8 * MIB
"""Taken in one call, asked for in one request, while the clock counts: its ends are sharp, and a trial is soon over."""
SAMPLE_BYTES, NUM_SAMPLES = MIB // 4, 8
"""Coded and decoded here, of what came raw: 2 ms in all."""
MARGIN = 1.1
"""What coding must promise over raw. Reason: for less the processors have better to do."""
KEPT = 1.05
"""What it must be over raw once it is used."""
AGAIN_S = 60.0
"""A link may be another after this long: it is measured anew, for 56 MiB raw."""


@dataclass(slots=True)
class _Sampled:
    """The result of compressing samples."""

    count: int = 0
    nbytes: int = 0
    coded_bytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0

    @property
    def ratio(self) -> float:
        return self.nbytes / self.coded_bytes if self.coded_bytes else 1.0

    @property
    def bytes_per_s(self) -> float:
        """Return the rate of the slower end."""
        return self.nbytes / max(self.encode_s, self.decode_s, 1e-9)


class Choice:
    """The decision for one link. Used by all connections to one peer.

    Args:
        always: True: coded from the first byte on; False: raw; None: as measured.
    """

    def __init__(self, always: bool | None = None) -> None:
        self._always, self._lock = always, threading.Lock()
        self._active = [0, 0]
        self._at = self._decided_at = time.monotonic()
        self._num_bytes = self._wire_bytes = 0
        self._why = {None: "too little was read to tell", True: "asked for", False: "not allowed"}[always]
        self._raw, self._sampled = 0.0, _Sampled()
        self._restart(is_coded=bool(always))

    def _restart(self, *, is_coded: bool) -> None:
        self.is_coded, self._is_open = is_coded, self._always is None
        self._seen = self._timed = 0
        self._busy_s = 0.0
        if not is_coded:
            self._sampled = _Sampled()

    def begin(self) -> bool:
        """Count a request that is about to be sent; return whether to request it compressed. Call `end` after it."""
        with self._lock:
            now = time.monotonic()
            # The time between requests is not the link's: measure from the first one after a pause.
            if not any(self._active):
                self._at = now
            if self._always is None and not self._is_open and now - self._decided_at > AGAIN_S:
                self._restart(is_coded=False)
            self._active[self.is_coded] += 1
            return self.is_coded

    def end(self, is_coded: bool) -> None:
        """Count a request of `begin` as ended, whether its answer came or not."""
        with self._lock:
            self._active[is_coded] -= 1

    def declined(self) -> None:
        """Note that the peer does not compress."""
        with self._lock:
            if self.is_coded:
                self._decide(is_coded=False, why="the peer does not compress")

    @property
    def is_open(self) -> bool:
        """Return whether the link is being measured, or about to be."""
        return self._is_open

    def sample(self, piece: memoryview, planes: Planes) -> None:
        """Compress a sample of raw bytes, to learn the codec's ratio and speed on them."""
        # The lock is given up while the codec runs: other connections receive meanwhile.
        with self._lock:
            is_wanted = self._is_open and not self.is_coded and self._sampled.count < NUM_SAMPLES
            if not is_wanted or len(piece) < SAMPLE_BYTES:
                return
            self._sampled.count += 1
        block = np.frombuffer(piece[:SAMPLE_BYTES], np.uint8)
        # Processor time of this thread, not wall time: the trial with compressed requests shows the effect of others
        # that use the processors.
        began = time.thread_time()
        frame = memoryview(b"".join(planes.encode(block)))
        encoded = time.thread_time()
        planes.decode(frame, np.empty_like(block))
        decoded = time.thread_time()
        with self._lock:
            self._sampled.nbytes += len(block)
            self._sampled.coded_bytes += len(frame)
            self._sampled.encode_s += encoded - began
            self._sampled.decode_s += decoded - encoded

    def got(self, nbytes: int, wire_bytes: int, *, is_coded: bool) -> None:
        """Note `nbytes` that are in place, and the `wire_bytes` that crossed the link for them."""
        with self._lock:
            now = time.monotonic()
            if is_coded:
                self._num_bytes += nbytes
                self._wire_bytes += wire_bytes
            is_watched = self._always is None and (self._is_open or is_coded)
            # While requests of both kinds are under way, the rate belongs to neither: do not measure it.
            if not is_watched or is_coded != self.is_coded or self._active[not is_coded]:
                self._at = now
                return
            self._seen += nbytes
            # The first bytes after a change were sent before it, see `SKIP_BYTES`: they are of the other way.
            if self._seen > SKIP_BYTES:
                self._timed += nbytes
                self._busy_s += now - self._at
            self._at = now
            if self._timed >= TIMED_BYTES:
                self._measured(self._timed / max(self._busy_s, 1e-9))

    def _measured(self, rate: float) -> None:
        """Decide by the measured rate of the present way, raw or compressed."""
        sampled = self._sampled
        if not self.is_coded:
            self._raw = rate
            promised = min(rate * sampled.ratio, sampled.bytes_per_s)
            measured = f"the link gives {rate / GB:.2f} GB/s, the codec {sampled.ratio:.2f}x at "
            self._why = f"{measured}{sampled.bytes_per_s / GB:.2f} GB/s"
            if promised > rate * MARGIN:
                self._restart(is_coded=True)
            else:
                self._decide(is_coded=False, why=self._why)
        elif rate < self._raw * KEPT:
            measured = f"compressed gave {rate / GB:.2f} GB/s, raw {self._raw / GB:.2f}"
            self._decide(is_coded=False, why=measured)
        else:
            if self._is_open:
                self._decide(is_coded=True, why=f"{rate / GB:.2f} GB/s, raw {self._raw / GB:.2f}")
            # Other work may take the processors later: keep measuring, to go back to raw when compression gets slow.
            self._timed, self._busy_s = 0, 0.0

    def _decide(self, *, is_coded: bool, why: str) -> None:
        self.is_coded, self._is_open, self._why, self._decided_at = is_coded, False, why, time.monotonic()

    def decision(self) -> tuple[bool, str]:
        """Return whether the next request is compressed, and why."""
        with self._lock:
            if self.is_coded:
                ratio = self._num_bytes / self._wire_bytes if self._wire_bytes else self._sampled.ratio
                return True, f"{ratio:.2f}x by byte planes: {self._why}"
            return False, f"not compressed: {self._why}"

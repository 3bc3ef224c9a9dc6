"""The conformance suite for `storage.Source`. Subclass `SourceTests`, implement `make(data)`, and run pytest."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from penstock.errors import SourceTruncated
from penstock.storage import Source

_NBYTES = 3_000_017
"""Size of the test object in bytes: several pages, and not a multiple of any block size."""


def sample(nbytes: int, seed: int = 7) -> bytes:
    """Return pseudo-random bytes without repeated patterns. The same seed gives the same bytes."""
    return random.Random(seed).randbytes(nbytes)


def read(source: Source, offset: int, lengths: Sequence[int]) -> tuple[bytes, str]:
    """Return the joined bytes that `readv` scatters over buffers of `lengths`, and the path that it reports."""
    buffers = [memoryview(bytearray(nbytes)) for nbytes in lengths]
    path = source.readv(offset, buffers)
    return b"".join(buffers), path


class SourceTests:
    """Conformance tests of a `Source`. Subclass it and implement `make`."""

    def make(self, data: bytes) -> Source:
        """Return a new source with exactly `data`. The suite closes it."""
        raise NotImplementedError("implement make() to return the source under test")

    def test_source_reports_correct_size_and_uri(self) -> None:
        """Check that `nbytes` is the size and `uri` is not empty."""
        with closing(self.make(sample(1000))) as source:
            assert source.nbytes == 1000
            assert source.uri
            assert isinstance(source.identity, str)

    def test_reading_whole_source_returns_all_bytes(self) -> None:
        """Check that a single buffer receives all bytes."""
        data = sample(_NBYTES)
        with closing(self.make(data)) as source:
            got, path = read(source, 0, [_NBYTES])
            assert got == data
            assert path

    def test_scattered_read_fills_buffers_in_order(self) -> None:
        """Check that several buffers are filled in order from unaligned offsets. Some buffers are empty."""
        data = sample(_NBYTES)
        with closing(self.make(data)) as source:
            for offset, lengths in [
                (0, [1, 0, 4095, 1, 70_001]),
                (1, [4096] * 9),
                (4095, [0, 2, 0]),
                (123_457, [1 << 20, 3, 1 << 19]),
                (_NBYTES - 5, [5]),
                (17, [1] * 3000),
            ]:
                assert read(source, offset, lengths)[0] == data[offset : offset + sum(lengths)]

    def test_read_leaves_bytes_outside_buffers_unchanged(self) -> None:
        """Check that bytes outside the buffers stay unchanged."""
        data = sample(100_000)
        with closing(self.make(data)) as source:
            memory = bytearray(b"\xaa" * 50_000)
            source.readv(33, [memoryview(memory)[100:20_100], memoryview(memory)[30_000:30_001]])
            assert memory[100:20_100] == data[33:20_033]
            assert memory[30_000] == data[20_033]
            assert set(memory[:100] + memory[20_100:30_000] + memory[30_001:]) == {0xAA}

    def test_empty_read_succeeds(self) -> None:
        """Check that a read may have no buffers, or empty buffers at any offset up to the end."""
        with closing(self.make(sample(100))) as source:
            for offset, buffers in [(0, []), (100, [memoryview(bytearray())])]:
                assert isinstance(source.readv(offset, buffers), str)

    def test_empty_object_is_readable(self) -> None:
        """Check that an empty object can be opened and has no bytes."""
        with closing(self.make(b"")) as source:
            assert source.nbytes == 0
            source.readv(0, [])
            _expect_truncated(source, 0, 1)

    def test_read_past_end_raises_source_truncated(self) -> None:
        """Check that a read past the end raises SourceTruncated with the source's name, and the source stays usable."""
        data = sample(5000)
        with closing(self.make(data)) as source:
            for offset, nbytes in [(0, 5001), (4999, 2), (5000, 1), (10**12, 1)]:
                _expect_truncated(source, offset, nbytes)
            assert read(source, 0, [5000])[0] == data

    def test_concurrent_reads_return_correct_bytes(self) -> None:
        """Check that eight threads can read random ranges of one source."""
        data = sample(_NBYTES)
        wrong: list[tuple[int, int]] = []

        def work(seed: int) -> None:
            chance = random.Random(seed)
            for _ in range(20):
                offset = chance.randrange(_NBYTES)
                nbytes = min(chance.randrange(1 << 18), _NBYTES - offset)
                if read(source, offset, [nbytes // 2, nbytes - nbytes // 2])[0] != data[offset : offset + nbytes]:
                    wrong.append((offset, nbytes))

        with closing(self.make(data)) as source, ThreadPoolExecutor(8) as threads:
            list(threads.map(work, range(8)))
        assert not wrong

    def test_close_is_idempotent(self) -> None:
        """Check that a second close is allowed."""
        data = sample(10)
        source = self.make(data)
        found = read(source, 0, [10])[0]
        source.close()
        source.close()
        assert found == data


def _expect_truncated(source: Source, offset: int, nbytes: int) -> None:
    try:
        source.readv(offset, [memoryview(bytearray(nbytes))])
    except SourceTruncated as error:
        assert error.uri == source.uri
        assert error.blame == "source"
    else:
        raise AssertionError(f"{nbytes} bytes at {offset} of {source.nbytes} were read")

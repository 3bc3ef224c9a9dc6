"""The conformance suite for `hub.store.Store`. Subclass `StoreTests`, implement `make()`, and run pytest."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from penstock_hub.store import ABSENT, ANY, Store


class StoreTests:
    """Conformance tests of a `Store`. Subclass it with `make`."""

    def make(self) -> Store:
        """Return a store. Other tests may have used it before."""
        raise NotImplementedError("implement make() to return the store under test")

    def num_names(self, store: Store) -> int:
        """Return the number of names that the store holds in memory, including expired names."""
        raise NotImplementedError("implement num_names() to count the names that the store keeps")

    @contextmanager
    def store(self) -> Iterator[tuple[Store, str]]:
        """Yield a store, which is closed afterwards, and a folder in it that no other test uses."""
        made = self.make()
        try:
            yield made, f"test/{secrets.token_hex(8)}/"
        finally:
            made.close()

    def test_read_returns_written_value(self) -> None:
        """Check that any bytes can be read back, including empty values."""
        with self.store() as (store, at):
            for value in (b"", b"\x00\xff" * 1000, bytes(range(256))):
                assert store.write(f"{at}a", value)
                entry = store.read(f"{at}a")
                assert entry is not None and entry.value == value

    def test_reading_missing_name_returns_none(self) -> None:
        """Check that `read` and `scan` do not find a missing name. Deleting it is not an error."""
        with self.store() as (store, at):
            assert store.read(f"{at}a") is None
            assert store.scan(at) == {}
            assert store.write(f"{at}a", None)

    def test_reading_deleted_name_returns_none(self) -> None:
        """Check that a deleted value is absent, and that a write that expects its absence succeeds."""
        with self.store() as (store, at):
            store.write(f"{at}a", b"1")
            assert store.write(f"{at}a", None)
            assert store.read(f"{at}a") is None
            assert store.scan(at) == {}
            assert store.write(f"{at}a", b"2", expected=ABSENT)

    def test_write_changes_version(self) -> None:
        """Check that a write changes the version even if the value stays the same."""
        with self.store() as (store, at):
            store.write(f"{at}a", b"1")
            before = store.read(f"{at}a")
            store.write(f"{at}a", b"1")
            after = store.read(f"{at}a")
            assert before is not None and after is not None and before.version != after.version
            assert {before.version, after.version}.isdisjoint({ANY, ABSENT})

    def test_compare_and_set_requires_current_version(self) -> None:
        """Check that a write succeeds only with the current version."""
        with self.store() as (store, at):
            assert store.write(f"{at}a", b"1", expected=ABSENT)
            assert not store.write(f"{at}a", b"2", expected=ABSENT)
            first = store.read(f"{at}a")
            assert first is not None and first.value == b"1"
            assert store.write(f"{at}a", b"2", expected=first.version)
            assert not store.write(f"{at}a", b"3", expected=first.version)
            assert not store.write(f"{at}a", None, expected=first.version)
            second = store.read(f"{at}a")
            assert second is not None and second.value == b"2"
            assert store.write(f"{at}a", None, expected=second.version)
            assert not store.write(f"{at}a", b"4", expected=second.version)

    def test_scan_finds_names_with_prefix(self) -> None:
        """Check that a scan returns the rest of each name, including subfolders but not sibling folders."""
        with self.store() as (store, at):
            for name in ("x/a", "x/b", "x/c/d", "xy", "y/a"):
                store.write(at + name, name.encode())
            assert {name: entry.value for name, entry in store.scan(f"{at}x/").items()} == {
                "a": b"x/a",
                "b": b"x/b",
                "c/d": b"x/c/d",
            }
            assert set(store.scan(f"{at}x")) == {"/a", "/b", "/c/d", "y"}
            assert set(store.scan(at)) == {"x/a", "x/b", "x/c/d", "xy", "y/a"}

    def test_scan_and_read_return_same_version(self) -> None:
        """Check that a write accepts the version from a scan."""
        with self.store() as (store, at):
            store.write(f"{at}a", b"1")
            assert store.scan(at)["a"] == store.read(f"{at}a")
            assert store.write(f"{at}a", b"2", expected=store.scan(at)["a"].version)

    def test_value_with_time_to_live_expires(self) -> None:
        """Check that a value expires after its time to live. A later write extends or removes the limit."""
        with self.store() as (store, at):
            for name in "abc":
                store.write(at + name, b"1", ttl_s=1.0)
            store.write(f"{at}b", b"2")
            store.write(f"{at}c", b"2", ttl_s=60)
            assert store.read(f"{at}a") is not None
            time.sleep(1.1)
            assert store.read(f"{at}a") is None
            assert set(store.scan(at)) == {"b", "c"}
            assert store.write(f"{at}a", b"3", expected=ABSENT)

    def test_expired_names_are_removed(self) -> None:
        """Check that later writes remove expired names, so that a store of short-lived names does not grow."""
        with self.store() as (store, at):
            before = self.num_names(store)
            for number in range(2_000):
                store.write(f"{at}gone/{number}", b"1", ttl_s=3.0)
            assert self.num_names(store) >= before + 1_000
            deadline = time.monotonic() + 30
            while self.num_names(store) > before + 1 and time.monotonic() < deadline:
                store.write(f"{at}renewed", b"1", ttl_s=5.0)
            assert self.num_names(store) <= before + 1
            assert store.read(f"{at}renewed") is not None

    def test_clock_is_shared_and_monotonic(self) -> None:
        """Check that two users of one store agree on the time, whatever the clocks of their hosts show."""
        with self.store() as (store, _):
            times = [store.now() for _ in range(1_000)]
            assert times == sorted(times)
            assert store.now() - times[0] < 10

    def test_concurrent_compare_and_set_has_one_winner(self) -> None:
        """Check that increments of a counter in eight threads are not lost."""
        with self.store() as (store, at):
            store.write(f"{at}n", b"0")

            def raise_it() -> None:
                for _ in range(25):
                    while True:
                        entry = store.read(f"{at}n")
                        assert entry is not None
                        if store.write(f"{at}n", str(int(entry.value) + 1).encode(), expected=entry.version):
                            break

            threads = [threading.Thread(target=raise_it) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            entry = store.read(f"{at}n")
            assert entry is not None and entry.value == b"200"

    def test_close_is_idempotent(self) -> None:
        """Check that a second close is allowed."""
        with self.store() as (store, _):
            store.close()

"""The conformance suite of `hub.store.Store`: subclass it, say how to make one, run pytest.

In: `make()`. Out: tests. Not here: a server that dies, which needs its own tests.

    class TestMine(StoreTests):
        def make(self) -> Store: ...
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.hub.store import ABSENT, ANY, Store


class StoreTests:
    """Conformance tests of a `Store`. Subclass it with `make`."""

    def make(self) -> Store:
        """Return a store, which may be one that other tests have used."""
        raise NotImplementedError("say how to make the store under test")

    def num_names(self, store: Store) -> int:
        """Return how many names the store keeps in memory, expired ones included."""
        raise NotImplementedError("say how to count the names that the store under test keeps")

    @contextmanager
    def store(self) -> Iterator[tuple[Store, str]]:
        """A store, closed afterwards, and a folder in it that no other test uses."""
        made = self.make()
        try:
            yield made, f"test/{secrets.token_hex(8)}/"
        finally:
            made.close()

    def test_written_value_is_read(self) -> None:
        """Bytes of any kind, and none."""
        with self.store() as (store, at):
            for value in (b"", b"\x00\xff" * 1000, bytes(range(256))):
                assert store.write(f"{at}a", value)
                entry = store.read(f"{at}a")
                assert entry is not None and entry.value == value

    def test_missing_name_reads_none(self) -> None:
        """Neither in `read` nor in `scan`; deleting it is no fault."""
        with self.store() as (store, at):
            assert store.read(f"{at}a") is None
            assert store.scan(at) == {}
            assert store.write(f"{at}a", None)

    def test_deleted_name_is_gone(self) -> None:
        """Find a deleted value absent, also by a write that expects so."""
        with self.store() as (store, at):
            store.write(f"{at}a", b"1")
            assert store.write(f"{at}a", None)
            assert store.read(f"{at}a") is None
            assert store.scan(at) == {}
            assert store.write(f"{at}a", b"2", expected=ABSENT)

    def test_write_changes_version(self) -> None:
        """Even one of the same value."""
        with self.store() as (store, at):
            store.write(f"{at}a", b"1")
            before = store.read(f"{at}a")
            store.write(f"{at}a", b"1")
            after = store.read(f"{at}a")
            assert before is not None and after is not None and before.version != after.version
            assert {before.version, after.version}.isdisjoint({ANY, ABSENT})

    def test_compare_and_set_requires_current_version(self) -> None:
        """Only over the version that was read; else nothing happens."""
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
        """By the rest of the name, folders below included, neighbours not."""
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
        """So that what was scanned can be changed."""
        with self.store() as (store, at):
            store.write(f"{at}a", b"1")
            assert store.scan(at)["a"] == store.read(f"{at}a")
            assert store.write(f"{at}a", b"2", expected=store.scan(at)["a"].version)

    def test_value_with_time_to_live_expires(self) -> None:
        """Find a value absent after its time to live; a write renews it, or makes it stay."""
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
        """Later writes of other names remove them: a store of short-lived names does not grow."""
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
        """Two users of one store agree on the time, whatever the clocks of their hosts say."""
        with self.store() as (store, _):
            times = [store.now() for _ in range(1_000)]
            assert times == sorted(times)
            assert store.now() - times[0] < 10

    def test_concurrent_compare_and_set_has_one_winner(self) -> None:
        """A counter that eight threads raise is as high as they raised it."""
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
        """Idempotent."""
        with self.store() as (store, _):
            store.close()

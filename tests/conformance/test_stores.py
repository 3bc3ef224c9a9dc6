"""Every `Store` passes the conformance suite."""

from __future__ import annotations

import pytest
from tests.support import redis_server
from tests.support.store_suite import StoreTests

from penstock_hub.store import MemoryStore, RedisStore, Store


class TestMemory(StoreTests):
    def make(self) -> Store:
        return MemoryStore()

    def num_names(self, store: Store) -> int:
        assert isinstance(store, MemoryStore)
        return sum(map(len, store._folders.values()))

    def test_renewing_entry_leaves_only_one_expiry_record(self) -> None:
        store = MemoryStore()
        for _ in range(1_000):
            store.write("a/renewed", b"1", ttl_s=86_400.0)
            store.write("a/renewed", None)
        assert len(store._expiries) == 1


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory):
    pytest.importorskip("redis")
    if redis_server.missing():
        pytest.skip(str(redis_server.missing()))
    with redis_server.RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


class TestRedis(StoreTests):
    @pytest.fixture(autouse=True)
    def running(self, redis_url: str) -> None:
        self.url = redis_url

    def make(self) -> Store:
        return RedisStore(self.url)

    def num_names(self, store: Store) -> int:
        assert isinstance(store, RedisStore)
        names, expiries = store._client.zcard(store._names), store._client.zcard(store._expiries)
        assert expiries <= names
        return int(names)

    def test_stores_with_different_clocks_return_same_time(self) -> None:
        first, second = self.make(), self.make()
        try:
            assert abs(first.now() - second.now()) < 1.0
        finally:
            first.close(), second.close()

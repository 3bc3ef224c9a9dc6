"""Every `Store` passes the one suite."""

from __future__ import annotations

import pytest

from penstock.fleet.store import MemoryStore, Store
from penstock.fleet.store_redis import RedisStore
from penstock.testing import redis_server
from penstock.testing.store_suite import StoreTests


class TestMemory(StoreTests):
    def make(self) -> Store:
        return MemoryStore()


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

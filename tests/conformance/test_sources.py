"""Every `Source` passes the one suite: memory, local file, HTTP ranges, the cache cold and warm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.config import Settings
from penstock.storage import MemorySource, Source
from penstock.storage.cache import CachedSource, open_cached
from penstock.storage.files import FileSource
from penstock.storage.objects import open_object
from penstock.testing.http_server import Faults, RangeServer
from penstock.testing.source_suite import SourceTests, read

SETTINGS = Settings(stall_s=20.0)


class TestMemory(SourceTests):
    def make(self, data: bytes) -> Source:
        return MemorySource(data)


class TestFile(SourceTests):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "object.bin"

    def make(self, data: bytes) -> Source:
        self.path.write_bytes(data)
        return FileSource(str(self.path), settings=SETTINGS)


class TestHttp(SourceTests):
    faults = Faults()

    @pytest.fixture(autouse=True)
    def _server(self) -> Iterator[None]:
        with RangeServer({}, faults=self.faults) as self.server:
            yield

    def make(self, data: bytes) -> Source:
        self.server.replace("object.bin", data)
        return open_object(f"{self.server.url}/object.bin", settings=SETTINGS)


class TestHttpChunked(TestHttp):
    faults = Faults(chunked=True)


class TestHttpWeakEtag(TestHttp):
    faults = Faults(weak_etag=True)


class TestHttpDateOnly(TestHttp):
    faults = Faults(no_etag=True)


class TestHttpWithoutConditions(TestHttp):
    faults = Faults(no_validators=True, ignore_if_match=True)


class TestCacheCold(TestHttp):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.settings = Settings(stall_s=20.0, cache_dir=tmp_path)

    def make(self, data: bytes) -> Source:
        return open_cached(super().make(data), settings=self.settings)


class TestCacheWarm(TestCacheCold):
    def make(self, data: bytes) -> Source:
        first = super().make(data)
        if data:
            read(first, 0, [len(data)])
        first.close()
        source = open_cached(open_object(f"{self.server.url}/object.bin", settings=SETTINGS), settings=self.settings)
        if data:
            assert isinstance(source, CachedSource)
            assert read(source, 0, [1])[1] == "cache"
        return source


class TestCacheReadOnlyByFile(TestCacheCold):
    """The cache's directory cannot be made: everything comes from the source."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        self.settings = Settings(stall_s=20.0, cache_dir=tmp_path / "file")

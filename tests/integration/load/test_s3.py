"""Objects in real S3 servers are read, listed, written and changed. radosgw runs only if it is installed."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
import torch
from safetensors.torch import save
from tests.support.servers.s3 import RadosgwServer, S3Server, SwiftServer, Unavailable

import penstock as ps
from penstock.config import Settings
from penstock.errors import (
    ConfigError,
    MissingExtra,
    NotFound,
    PenstockError,
    PermissionDenied,
    SourceChanged,
    SourceError,
    SourceUnavailable,
)
from penstock.storage import Source, list_uris, objects, open_source
from penstock.storage.objects import StoreSource, list_objects, open_object, read_small, write_small
from penstock.testing.source_suite import SourceTests, read, sample

SETTINGS = Settings(stall_s=30.0, retries=3)
NUM_MANY = 1050


@pytest.fixture(scope="module", params=[SwiftServer, RadosgwServer], ids=["swift", "radosgw"])
def server(request: pytest.FixtureRequest) -> Iterator[S3Server]:
    kind: type[S3Server] = request.param
    try:
        kind.check()
    except Unavailable as why:
        pytest.skip(str(why))
    # Ceph's sockets need a short path, which tmp_path is not.
    folder = Path(tempfile.mkdtemp(prefix="ps-s3-"))
    try:
        with kind(folder) as running:
            running.make_bucket("weights")
            yield running
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def options(server: S3Server) -> dict[str, str]:
    return server.storage_options


def put(server: S3Server, key: str, data: bytes) -> str:
    server.store("weights").put(key, data)
    return f"s3://weights/{key}"


class TestS3(SourceTests):
    @pytest.fixture(autouse=True)
    def _server(self, server: S3Server) -> None:
        self.server = server

    def make(self, data: bytes) -> Source:
        uri = put(self.server, "suite/object.bin", data)
        return open_object(uri, settings=SETTINGS, storage_options=self.server.storage_options)


class TestS3ThroughStore(TestS3):
    """Stores whose URLs cannot be signed are read with obstore."""

    def make(self, data: bytes) -> Source:
        uri = put(self.server, "suite/object.bin", data)
        place = objects.locate_object(uri, settings=SETTINGS, options=self.server.storage_options)
        return StoreSource(place, obstore.head(place.store, place.key), settings=SETTINGS, why="asked for")


def test_s3_object_reports_path_and_identity(server: S3Server, options: dict[str, str]) -> None:
    data = sample(300_000)
    source = open_object(put(server, "one.bin", data), settings=SETTINGS, storage_options=options)
    try:
        assert (source.uri, source.nbytes) == ("s3://weights/one.bin", len(data))
        assert source.identity.startswith('"')
        assert read(source, 12_345, [70_000, 1])[1] == "http"
    finally:
        source.close()


def test_credentials_are_read_from_environment(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = put(server, "env.bin", b"by the environment")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
    monkeypatch.setenv("AWS_REGION", server.region)
    assert read_small(uri, settings=SETTINGS) == b"by the environment"
    source = open_source(uri, settings=SETTINGS)
    assert source.nbytes == 18
    source.close()


@pytest.mark.parametrize(
    "key", ["a b+c.bin", "d=1&e/f,g;h.bin", "na\u00efve/\u6743.bin", "p%20q%2F.bin", "x~(1)'!*.bin"]
)
def test_keys_with_special_characters_are_read(server: S3Server, options: dict[str, str], key: str) -> None:
    uri = put(server, f"odd/{key}", key.encode())
    assert read_small(uri, settings=SETTINGS, storage_options=options) == key.encode()
    assert uri in list_objects("s3://weights/odd/**", settings=SETTINGS, storage_options=options)


def test_object_changed_between_ranges_raises_source_changed(server: S3Server, options: dict[str, str]) -> None:
    data = sample(500_000)
    source = open_object(put(server, "changing.bin", data), settings=SETTINGS, storage_options=options)
    try:
        assert read(source, 0, [1000])[0] == data[:1000]
        put(server, "changing.bin", data[::-1])
        with pytest.raises(SourceChanged) as caught:
            read(source, 1000, [1000])
        assert caught.value.uri == "s3://weights/changing.bin"
        assert caught.value.byte_range == (1000, 2000)
    finally:
        source.close()


def test_object_deleted_between_ranges_raises(server: S3Server, options: dict[str, str]) -> None:
    source = open_object(put(server, "gone.bin", b"x" * 100), settings=SETTINGS, storage_options=options)
    try:
        server.store("weights").delete("gone.bin")
        with pytest.raises((NotFound, SourceChanged)):
            read(source, 0, [100])
    finally:
        source.close()


def test_missing_object_or_bucket_raises_not_found(options: dict[str, str]) -> None:
    for uri in ("s3://weights/none.bin", "s3://no-such-bucket/none.bin", "s3://weights/", "s3://weights/folder/"):
        with pytest.raises(NotFound) as caught:
            open_object(uri, settings=SETTINGS, storage_options=options)
        assert caught.value.uri == uri
    assert read_small("s3://weights/none.json", settings=SETTINGS, storage_options=options) is None


@pytest.mark.parametrize(
    "wrong", [{"secret_access_key": "wrong"}, {"access_key_id": "nobody"}, {"skip_signature": "true"}], ids=str
)
def test_wrong_credentials_raise_permission_denied(
    server: S3Server, options: dict[str, str], wrong: dict[str, str]
) -> None:
    uri = put(server, "secret.bin", b"x")
    with pytest.raises(PermissionDenied) as caught:
        open_object(uri, settings=SETTINGS, storage_options=options | wrong)
    assert caught.value.uri == uri
    assert caught.value.hint
    with pytest.raises(SourceError if "skip_signature" in wrong else PermissionDenied):  # Swift says 412 to strangers
        list_objects("s3://weights/", settings=SETTINGS, storage_options=options | wrong)


def test_credentials_revoked_during_read_raise(
    server: S3Server, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rejected signed URL is renewed once. The second rejection is raised without the signature."""
    source = open_object(put(server, "revoked.bin", b"x" * 10), settings=SETTINGS, storage_options=options)
    try:
        real, signed = obstore.sign, []

        def sign(*args: object) -> str:
            signed.append(real(*args).replace("Signature=", "Signature=0"))  # type: ignore[call-overload]
            return signed[-1]

        monkeypatch.setattr(obstore, "sign", sign)
        with pytest.raises(PermissionDenied) as caught:
            read(source, 0, [10])
        assert len(signed) == 2
        assert "X-Amz" not in str(caught.value)
        monkeypatch.undo()
        assert read(source, 0, [10])[0] == b"x" * 10
    finally:
        source.close()


def test_listing_returns_keys_matching_prefix_and_glob(server: S3Server, options: dict[str, str]) -> None:
    names = ["m/a-1.safetensors", "m/a-2.safetensors", "m/config.json", "m/sub/b.safetensors", "m2/c.safetensors"]
    for name in names:
        put(server, name, b"x")

    def found(uri: str) -> list[str]:
        uris = list_uris(uri, settings=SETTINGS, storage_options=options)
        assert uris == sorted(uris)
        return [each.removeprefix("s3://weights/") for each in uris]

    assert found("s3://weights/m") == found("s3://weights/m/") == names[:3]
    assert found("s3://weights/m/a-2.safetensors") == [names[1]]
    assert found("s3://weights/m/*.safetensors") == names[:2]
    assert found("s3://weights/m/**/*.safetensors") == [names[0], names[1], names[3]]
    assert found("s3://weights/m*/?.safetensors") == [names[4]]
    assert found("s3://weights/m/a-[2-9].*") == [names[1]]
    for nothing in ("s3://weights/nothing/", "s3://weights/m/*.bin", "s3://weights/m/a-"):
        with pytest.raises(NotFound):
            found(nothing)


def test_listing_continues_after_first_page(server: S3Server, options: dict[str, str]) -> None:
    if isinstance(server, SwiftServer) and os.environ.get("DRILLS") != "all":
        pytest.skip("takes long: run with DRILLS=all")
    store = server.store("weights")

    def work(start: int) -> None:
        for number in range(start, NUM_MANY, 8):
            store.put(f"many/{number:05d}", b"")

    threads = [threading.Thread(target=work, args=(start,)) for start in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [f"s3://weights/many/{number:05d}" for number in range(NUM_MANY)]
    assert list_objects("s3://weights/many/", settings=SETTINGS, storage_options=options) == expected
    assert list_objects("s3://weights/many/**", settings=SETTINGS, storage_options=options) == expected


def test_small_object_is_written_and_replaced(options: dict[str, str]) -> None:
    uri = "s3://weights/written/manifest"
    for data in (b"first", b"", sample(2_000_000)):
        write_small(uri, data, settings=SETTINGS, storage_options=options)
        assert read_small(uri, settings=SETTINGS, storage_options=options) == data
    with pytest.raises(PermissionDenied):
        write_small(uri, b"x", settings=SETTINGS, storage_options=options | {"secret_access_key": "wrong"})


def test_multipart_object_is_read(server: S3Server, options: dict[str, str]) -> None:
    """The ETag of a multipart object is no MD5, but the object reads like any other."""
    data = sample(12_000_000)
    obstore.put(server.store("weights"), "parts.bin", data, use_multipart=True, chunk_size=5 << 20)
    source = open_object("s3://weights/parts.bin", settings=SETTINGS, storage_options=options)
    try:
        assert read(source, 0, [len(data)])[0] == data
        assert read(source, (5 << 20) - 3, [7])[0] == data[(5 << 20) - 3 :][:7]
    finally:
        source.close()


def test_unsigned_reads_use_url_without_signature(server: S3Server, options: dict[str, str]) -> None:
    """The bucket is not public, so the test only checks the URL."""
    unsigned = options | {"skip_signature": "true"}
    place = objects.locate_object("s3://weights/some key.bin", settings=SETTINGS, options=unsigned)
    origin, _ = objects._origin(place, settings=SETTINGS, options=unsigned)
    assert origin is not None
    assert origin.url().geturl() == f"{server.endpoint}/weights/some%20key.bin"


def test_requester_pays_bucket_is_read_through_obstore(server: S3Server, options: dict[str, str]) -> None:
    uri = put(server, "payer.bin", b"0123456789")
    source = open_object(uri, settings=SETTINGS, storage_options=options | {"request_payer": "true"})
    assert isinstance(source, StoreSource)
    assert "request_payer" in source.why
    assert read(source, 3, [4]) == (b"3456", "obstore")
    put(server, "payer.bin", b"9876543210")
    with pytest.raises(SourceChanged):
        read(source, 0, [4])


@pytest.mark.parametrize(
    ("uri", "options", "error"),
    [
        ("s3://", {}, ConfigError),
        ("s3://b//k", {"access_key_id": "a", "secret_access_key": "b", "endpoint": "http://127.0.0.1:9"}, ConfigError),
        ("s3://b/k", {"acces_key": "typo"}, ConfigError),
        ("az://container/k", {}, ConfigError),
        (
            "s3://b/k",
            {"endpoint": "http://127.0.0.1:9", "access_key_id": "a", "secret_access_key": "b"},
            SourceUnavailable,
        ),
    ],
)
def test_invalid_s3_uri_or_option_raises(uri: str, options: dict[str, str], error: type[PenstockError]) -> None:
    with pytest.raises(error) as caught:
        open_object(uri, settings=Settings(retries=1, stall_s=5.0), storage_options=options)
    assert caught.value.uri == uri


def test_aws_profile_requires_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_PROFILE", "team")
    monkeypatch.setitem(__import__("sys").modules, "boto3", None)
    with pytest.raises(MissingExtra, match="pip install 'boto3"):
        open_object("s3://bucket/key", settings=SETTINGS)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 warns of what is tested here
def test_forked_child_reads_open_object(server: S3Server, options: dict[str, str]) -> None:
    """Open sources keep reading in a forked child. The child cannot open more, because obstore would hang."""
    data = sample(100_000)
    source = open_object(put(server, "forked.bin", data), settings=SETTINGS, storage_options=options)
    try:
        read(source, 0, [10])
        child = os.fork()
        if child == 0:  # no pytest in the child: only an exit status
            right = read(source, 10, [1000])[0] == data[10:1010]
            try:
                open_object(source.uri, settings=SETTINGS, storage_options=options)
            except ConfigError as error:
                os._exit(0 if right and error.hint else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        assert read(source, 20, [10])[0] == data[20:30]
    finally:
        source.close()


def test_brackets_in_object_names_match_literally(server: S3Server, options: dict[str, str]) -> None:
    one, other, third = (save({name: torch.ones(2)}) for name in ("one", "other", "third"))
    put(server, "brackets/model[1]/model.safetensors", one)
    put(server, "brackets/model1/model.safetensors", other)
    put(server, "brackets/file[1].safetensors", third)
    prefix = "s3://weights/brackets"
    for uri, name in (
        (f"{prefix}/model[1]/", "one"),
        (f"{prefix}/model[1]", "one"),
        (f"{prefix}/model[1]/model.safetensors", "one"),
        (f"{prefix}/file[1].safetensors", "third"),
        (f"{prefix}/model1/*.safetensors", "other"),
    ):
        assert list(ps.load(uri, settings=ps.ReadSettings(storage_options=options))) == [name]

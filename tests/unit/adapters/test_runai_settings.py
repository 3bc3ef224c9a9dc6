"""Environment variables of the Run:ai Model Streamer as Penstock settings."""

import pytest

from penstock.errors import ConfigError
from penstock.types import GIB, MIB
from penstock_hf.runai_streamer.settings import runai_settings


def test_empty_environment_keeps_default_settings() -> None:
    found = runai_settings({})
    assert (found.fetch_threads, found.chunk_bytes, found.memory_bytes) == (None, None, None)
    assert found.distributed == "auto"
    assert found.storage_options == {}


def test_every_streamer_variable_sets_its_option() -> None:
    found = runai_settings(
        {
            "RUNAI_STREAMER_CONCURRENCY": "12",
            "RUNAI_STREAMER_CHUNK_BYTESIZE": str(4 * MIB),
            "RUNAI_STREAMER_MEMORY_LIMIT": str(64 * MIB),
            "RUNAI_STREAMER_DIST": "1",
            "RUNAI_STREAMER_S3_ENDPOINT": "http://127.0.0.1:9000",
            "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
            "RUNAI_STREAMER_S3_UNSIGNED": "1",
        }
    )
    assert (found.fetch_threads, found.chunk_bytes, found.memory_bytes) == (12, 4 * MIB, 64 * MIB)
    assert found.distributed == "on"
    assert found.storage_options == {
        "endpoint": "http://127.0.0.1:9000",
        "virtual_hosted_style_request": "false",
        "skip_signature": "true",
    }


@pytest.mark.parametrize("limit", ["-1", "0", str(40 * GIB)])
def test_unlimited_zero_or_excessive_memory_limit_is_ignored(limit: str) -> None:
    assert runai_settings({"RUNAI_STREAMER_MEMORY_LIMIT": limit}).memory_bytes is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("RUNAI_STREAMER_CONCURRENCY", "many"),
        ("RUNAI_STREAMER_CONCURRENCY", "0"),
        ("RUNAI_STREAMER_CHUNK_BYTESIZE", "0"),
        ("RUNAI_STREAMER_MEMORY_LIMIT", "-2"),
        ("RUNAI_STREAMER_DIST", "2"),
        ("RUNAI_STREAMER_S3_UNSIGNED", "perhaps"),
    ],
)
def test_unparsable_variable_is_refused(name: str, text: str) -> None:
    with pytest.raises(ConfigError):
        runai_settings({name: text})

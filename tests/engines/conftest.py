"""Tiny models with random weights in the files that engines load, and an S3 server for them."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.engines.device import ON_GPU
from tests.engines.vllm_engines import LONG_PROMPT, NUM_TOKENS, Answer, EngineProcess
from tests.support.fork_server import ForkServer
from tests.support.ports import free_ports

from penstock_convert.workers import launch as launcher


def write_llama(directory: Path, *, tied: bool = False, max_shard_size: str = "1GB", seed: int = 0) -> Path:
    """Save a two-layer Llama with random weights with transformers."""
    # Import here, because these tests are collected without transformers too.
    from tests.support.tiny_models import save_llama

    sizes = {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 128, "max_position_embeddings": 256}
    # Use large values, so that a wrong weight changes the tokens.
    return save_llama(
        directory,
        max_shard_size=max_shard_size,
        seed=seed,
        std=0.3,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=319,
        **sizes,
    )


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer() as fork_server:
        yield fork_server


@pytest.fixture
def launcher_fork_servers(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the workers of conversions from one process that has imported torch, which saves seconds each time."""
    monkeypatch.setattr(launcher, "ForkServer", SimpleNamespace(start=lambda imports: fork_server.graft()))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def sharded_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_llama(tmp_path_factory.mktemp("sharded"), max_shard_size="200KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    return directory


@pytest.fixture(scope="session")
def tied_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def make_llama() -> Callable[..., Path]:
    return write_llama


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes a model of a kind in BF16: `compiled` is dense, `experts`, or `fp8`."""

    def write(kind: str) -> Path:
        from tests.engines import tiny

        from penstock_convert.convert import convert

        directory = tmp_path_factory.mktemp(kind)
        source = tiny.write("qwen3_moe" if kind == "experts" else "llama", directory / "source")
        if kind != "fp8":
            return source
        # vLLM has no CPU kernel for blocks.
        convert(source, directory / "fp8", to="fp8-block128" if ON_GPU else "fp8-channel", devices="cpu", workers=1)
        return directory / "fp8"

    return write


@pytest.fixture(scope="session")
def fresh(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Answer]:
    """Return, for each version, the answer of a vLLM engine that was started with it."""
    from tests.engines.vllm_trainers import weights

    directory = tmp_path_factory.mktemp("fresh")
    found = {}
    with EngineProcess(directory) as engines:
        for version in (1, 2, 4):
            model = directory / str(version)
            weights(llama, version).save_pretrained(model)
            found[version] = engines.start(LONG_PROMPT, model=str(model), max_model_len=192)
            assert len(found[version].tokens) == NUM_TOKENS, found[version].error
    assert len({answer.tokens for answer in found.values()}) == 3
    return found


@pytest.fixture(scope="session")
def prompt() -> list[int]:
    return [1, 5, 9, 200, 17, 33, 2, 8]


@pytest.fixture(scope="session")
def s3_options() -> Iterator[dict[str, str]]:
    """Run an S3 server in a separate process, and yield the `storage_options` for it."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if time.monotonic() > deadline or server.poll() is not None:
                    raise
                time.sleep(0.1)
        yield {
            "endpoint": f"http://127.0.0.1:{port}",
            "access_key_id": "key",
            "secret_access_key": "secret",
            "region": "us-east-1",
        }
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="session")
def s3_llama(llama: Path, s3_options: dict[str, str]) -> str:
    """Return the URI of the Llama in a bucket."""
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=s3_options["endpoint"],
        aws_access_key_id=s3_options["access_key_id"],
        aws_secret_access_key=s3_options["secret_access_key"],
        region_name=s3_options["region"],
    )
    client.create_bucket(Bucket="models")
    for file in llama.iterdir():
        client.upload_file(str(file), "models", f"llama/{file.name}")
    return "s3://models/llama"


@pytest.fixture
def s3_environment(s3_options: dict[str, str]) -> dict[str, str]:
    """Return the environment of a process that finds the server through the ecosystem's own variables."""
    return {
        **os.environ,
        "AWS_ENDPOINT_URL": s3_options["endpoint"],
        "AWS_ACCESS_KEY_ID": s3_options["access_key_id"],
        "AWS_SECRET_ACCESS_KEY": s3_options["secret_access_key"],
        "AWS_REGION": s3_options["region"],
    }


@pytest.fixture(scope="module")
def runtime() -> Iterator[str]:
    """Yield a directory for the hub. Its name is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="ps-") as directory:
        yield directory

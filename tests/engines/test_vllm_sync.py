"""vLLM takes new weights from a publisher through its own HTTP routes, and then generates a new engine's tokens.

The updated engine has two workers, each with half of the heads. The new engines have one worker. Trainers publish with
`penstock.publisher`, or through vLLM's own interface for trainers.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.vllm_server import Server, serving

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

PROMPT = [1, *range(7, 300, 4)]
"""The prompt covers more than two blocks of the cache, so a wrong reuse of keys and values would be noticed."""
NUM_TOKENS = 24

WEIGHTS = """
import torch, transformers

def weights(directory, version):
    model = transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    change(model, version)
    return model

def change(model, version):
    torch.manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
"""

FRESH = (
    WEIGHTS
    + """
import json, sys, tempfile

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    directory, prompt, num_tokens, versions = json.loads(sys.argv[1])
    greedy = SamplingParams(temperature=0, max_tokens=num_tokens, detokenize=False)
    for version in versions:
        with tempfile.TemporaryDirectory() as changed:
            weights(directory, version).save_pretrained(changed)
            llm = LLM(
                model=changed, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=192, seed=0
            )
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], greedy)
        print("TOKENS", version, json.dumps(list(answer.outputs[0].token_ids)), flush=True)
        del llm
"""
)

TRAINER = (
    WEIGHTS
    + """
import os, signal, sys

import penstock as ps
from penstock.sync.local_version import LocalVersion

if __name__ == "__main__":
    model = weights(sys.argv[1], 0)
    with ps.publisher("policy", model, mode="live", connection=ps.ConnectionSettings(stall_s=10.0)) as publisher:
        print("LATEST", publisher.latest, flush=True)
        for line in sys.stdin:
            verb, version = line.split()
            if verb == "die":  # when a receiver has read, and asks what it should have read
                LocalVersion.digests = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
            change(model, int(version))
            print(verb, publisher.publish(int(version)).summary(), flush=True)
"""
)


SHARDED = (
    WEIGHTS
    + """
import sys

import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import ModuleSource, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

from penstock_vllm.trainer import PenstockTrainerInitInfo


class Export(WeightSource):
    # As a framework's exporter: it gives whole tensors, and has no module.
    def __init__(self, model):
        self._held = ModuleSource(model)

    def metadata(self):
        return self._held.metadata()

    def __iter__(self):
        return iter(self._held)


if __name__ == "__main__":
    directory, url, mode, gather = sys.argv[1:]
    dist.init_process_group("gloo")
    rank, whole = dist.get_rank(), weights(directory, 0)
    model = weights(directory, 0)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    info = PenstockTrainerInitInfo(
        name=f"sharded-{mode}-{gather}", rank=rank, world_size=2, mode=mode, gather=gather == "gather", stall_s=10.0
    )

    source = Export(model) if gather == "gather" else ModuleSource(model)
    engine = WeightTransferTrainerFactory.trainer_init(info, client=HTTPVLLMWeightSyncClient(url), source=source)
    while True:
        words = [sys.stdin.readline().split() if rank == 0 else None]
        dist.broadcast_object_list(words)
        if not words[0]:
            break
        verb, version = words[0][0], int(words[0][1])
        change(whole, version)
        with torch.no_grad():
            for mine, new in zip(model.parameters(), whole.parameters(), strict=True):
                mine.copy_(distribute_tensor(new, mine.device_mesh, mine.placements))
        said = "sent"
        try:
            engine.stage(version) if verb == "stage" else engine.send_weights(version)
        except Exception as error:
            said = f"{type(error).__name__} {error} {getattr(error, '__notes__', [])}".replace(chr(10), " ")
        if rank == 0:
            print(verb, version, said, flush=True)
    engine.shutdown()
    dist.destroy_process_group()
"""
)


@pytest.fixture(scope="module")
def fresh(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[int]]:
    """Return, for each version, the tokens of an engine that was started with it."""
    directory = tmp_path_factory.mktemp("fresh")
    script = directory / "fresh.py"
    script.write_text(FRESH)
    arguments = json.dumps([str(llama), PROMPT, NUM_TOKENS, [1, 2, 4]])
    environ = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(directory / "cache"),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    done = subprocess.run(
        [sys.executable, str(script), arguments], env=environ, capture_output=True, text=True, timeout=600
    )
    said = [line.split(maxsplit=2) for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    assert len(said) == 3, done.stderr[-4000:]
    return {int(version): json.loads(tokens) for _, version, tokens in said}


@pytest.fixture(scope="module")
def server(
    llama: Path, runtime: str, fresh: dict[int, list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Start the server after `fresh`, so that only one engine runs at a time."""
    with serving(llama, runtime, tmp_path_factory.mktemp("server"), num_workers=2) as server:
        yield server


class Trainer:
    """A process that publishes a transformers model, or ranks under torchrun. Torchrun passes their lines on."""

    def __init__(self, script: str, runtime: str, directory: Path, *arguments: str, num_ranks: int = 1) -> None:
        path, self.log = directory / "trainer.py", directory / "trainer.log"
        path.write_text(script)
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        with self.log.open("wb") as written:
            self.process = subprocess.Popen(
                [sys.executable, *(ranks if num_ranks > 1 else []), str(path), *arguments],
                env={**os.environ, "PENSTOCK_RUNTIME_DIR": runtime, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=written,
                text=True,
                start_new_session=True,
            )

    def send(self, verb: str, version: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{verb} {version}\n")
        self.process.stdin.flush()

    def answer(self, verb: str) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith(verb), (line, self.log.read_text()[-4000:])
        return line.removeprefix(verb).strip()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@contextlib.contextmanager
def trainer(script: str, runtime: str, directory: Path, *arguments: str, num_ranks: int = 1) -> Iterator[Trainer]:
    made = Trainer(script, runtime, directory, *arguments, num_ranks=num_ranks)
    try:
        yield made
    finally:
        made.close()


def test_tokens_change_only_after_weight_update(
    server: Server, llama: Path, runtime: str, fresh: dict[int, list[int]], tmp_path: Path
) -> None:
    assert len({tuple(tokens) for tokens in fresh.values()}) == 3
    old = server.tokens(PROMPT, NUM_TOKENS)
    assert old not in fresh.values()
    status, said = server.ask("/start_weight_update")
    assert (status, "not subscribed to a sync" in said) == (500, True), said
    server.post("/init_weight_transfer_engine", init_info={"name": "policy", "stall_s": 10.0})

    with trainer(TRAINER, runtime, tmp_path, str(llama)) as first:
        first.answer("LATEST")
        first.send("publish", 1)
        server.post("/start_weight_update")
        server.post("/update_weights", update_info={"version": 1})
        assert "2 committed" in first.answer("publish")
        assert server.tokens(PROMPT, NUM_TOKENS) == old  # received, but not installed
        server.post("/pause")
        server.post("/finish_weight_update", weight_version="1")
        server.post("/resume")
        assert server.tokens(PROMPT, NUM_TOKENS) == fresh[1]
        assert server.get("/weight_info") == {"weight_version": "1"}

        # The next version arrives while the old one serves. Requests and their cached blocks survive the pause.
        first.send("publish", 2)
        server.post("/start_weight_update")
        server.post("/update_weights", update_info={"version": 2, "background": True})
        assert server.tokens(PROMPT, NUM_TOKENS) == fresh[1]
        server.post("/pause?mode=keep&clear_cache=false")
        server.post("/update_weights", update_info={"version": 2})
        server.post("/finish_weight_update", weight_version="2")
        server.post("/resume")
        assert server.tokens(PROMPT, NUM_TOKENS) == fresh[2]
        assert "2 committed" in first.answer("publish")

        # A version fails. The route reports it, and the old weights stay.
        first.send("die", 3)
        server.post("/start_weight_update")
        status, said = server.ask("/update_weights", update_info={"version": 3})
        assert (status, "blame: source; destination" in said) == (500, True), said
        assert first.process.wait(timeout=60) == -signal.SIGKILL
        assert server.tokens(PROMPT, NUM_TOKENS) == fresh[2]
        assert server.get("/weight_info") == {"weight_version": "2"}
        assert server.ask("/finish_weight_update", weight_version="3")[0] == 500
        assert server.get("/weight_info") == {"weight_version": "2"}

    with trainer(TRAINER, runtime, tmp_path, str(llama)) as second:
        assert int(second.answer("LATEST")) >= 2
        # The trainer is running, so a new subscriber prepares, and receives even its first version in the background.
        server.post("/init_weight_transfer_engine", init_info={"name": "policy", "stall_s": 10.0, "prepare_s": 60.0})
        assert server.log.read_text().count("policy is prepared") == 2
        server.post("/start_weight_update")
        server.post("/update_weights", update_info={"version": 4, "background": True})
        second.send("publish", 4)
        server.post("/update_weights", update_info={"version": 4})
        server.post("/pause?mode=wait")
        server.post("/finish_weight_update", weight_version="4")
        server.post("/resume")
        assert server.tokens(PROMPT, NUM_TOKENS) == fresh[4]
        assert "2 committed" in second.answer("publish")
    server.post("/shutdown_weight_transfer_engine")
    assert server.tokens(PROMPT, NUM_TOKENS) == fresh[4]


def test_route_error_names_invalid_argument(server: Server) -> None:
    wrong = [({}, "'name'"), ({"name": ""}, "'name'"), ({"name": "policy", "memory": "disk"}, "'disk'")]
    wrong.append(({"name": "policy", "prepare_s": -1}, "'prepare_s'"))
    for body, named in (*wrong, ({"name": "policy", "sped": 1}, "'sped'")):
        status, said = server.ask("/init_weight_transfer_engine", init_info=body)
        assert (status, named in said) == (500, True), (body, said)
    assert len(server.tokens(PROMPT, NUM_TOKENS)) == NUM_TOKENS


def test_two_trainer_ranks_update_engine_through_vllm_interface(
    server: Server, llama: Path, runtime: str, fresh: dict[int, list[int]], tmp_path: Path
) -> None:
    with trainer(SHARDED, runtime, tmp_path, str(llama), server.url, "snapshot", "shards", num_ranks=2) as ranks:
        ranks.send("send", 1)
        assert ranks.answer("send") == "1 sent"
        assert server.tokens(PROMPT, NUM_TOKENS) == fresh[1]
        assert server.get("/weight_info") == {"weight_version": "1"}
        ranks.send("stage", 2)
        assert ranks.answer("stage") == "2 sent"
        assert server.tokens(PROMPT, NUM_TOKENS) == fresh[1]  # received, but not installed
        ranks.send("send", 4)
        assert ranks.answer("send") == "4 sent"
        assert server.tokens(PROMPT, NUM_TOKENS) == fresh[4]
        ranks.send("send", 3)
        assert "is not above 4" in ranks.answer("send")
        assert server.tokens(PROMPT, NUM_TOKENS) == fresh[4]
        # A worker cannot receive. The trainer's error has the reason, and the next version is sent as usual.
        server.post("/shutdown_weight_transfer_engine")
        ranks.send("send", 5)
        assert "not subscribed to a sync" in ranks.answer("send")
        assert server.tokens(PROMPT, NUM_TOKENS) == fresh[4]


@pytest.mark.parametrize(("mode", "gather"), [("live", "shards"), ("snapshot", "gather")])
def test_single_worker_engine_receives_weights_in_every_mode(
    mode: str, gather: str, llama: Path, runtime: str, fresh: dict[int, list[int]], tmp_path: Path
) -> None:
    with (
        serving(llama, runtime, tmp_path, num_workers=1) as single,
        trainer(SHARDED, runtime, tmp_path, str(llama), single.url, mode, gather, num_ranks=2) as ranks,
    ):
        for version in (1, 2):
            ranks.send("send", version)
            assert ranks.answer("send") == f"{version} sent"
            assert single.tokens(PROMPT, NUM_TOKENS) == fresh[version]

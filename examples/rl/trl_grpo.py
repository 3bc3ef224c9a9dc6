"""GRPO of a tiny language model with TRL's AsyncGRPOTrainer. A vLLM server samples, and Penstock sends it the weights.

    torchrun --nproc-per-node 2 examples/rl/trl_grpo.py --url http://127.0.0.1:8000 --work DIRECTORY

`run.py trl_grpo` starts the server and these ranks. TRL's trainer, rollout worker, checkpoints and resume are
unchanged, with FSDP2. `train_on_cpu` replaces what TRL 1.16 and accelerate 1.15 can do only on accelerators. For each
step, the first rank prints a line for `run.py` with log-probabilities from the server and from the trainer.

TRL saves a checkpoint after every step. If a rank dies, start any number of ranks again, and they continue from it. If
the server dies, start it again. It gets the newest version, and no sample from its other weights is used.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    import aiohttp
    import torch
    from accelerate import PartialState
    from accelerate.utils import DistributedType, broadcast
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing
    from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, _AsyncRolloutLoop

    from penstock_rl.trl import PenstockWeightTransfer
    from penstock_vllm.trainer import PenstockTrainerInitInfo
except ImportError as error:
    print(f"skipped: this example needs TRL and vLLM (pip install 'trl==1.16.*' 'vllm==0.32.*'): {error}")
    sys.exit(0)

from safetensors.torch import save_file
from torchrun_grpo import CONFIG, ENGINE_START_S, LEARNING_RATE, ROUNDING, arguments, write_line
from vllm_routes import GONE, Client

SPECIAL = ["<pad>", "<s>", "</s>", "<a>"]
WORDS = [*SPECIAL, *(f"w{number}" for number in range(len(SPECIAL), CONFIG.vocab_size))]

PROMPTS, GROUP, PROMPT_WORDS, NEW_TOKENS = 8, 8, 4, 8
"""Number of prompts in a step, of samples for each prompt, and of words in them."""

PROBES = 16
"""Number of samples that are compared after every version."""


# -- what TRL and accelerate can do only on accelerators


def train_on_cpu() -> None:
    """Let TRL 1.16 and accelerate 1.15 train with FSDP2 on a CPU. Call this after the process group was created."""
    # TRL asks CUDA for the device's name, for a metric of its utilisation.
    async_grpo_trainer.get_peak_flops_per_device = lambda accelerator, dtype: None
    # TRL forwards tokens that samples share only once, with an attention from `kernels`, which is only for CUDA.
    packing._flash_attn = VarlenAttention
    # accelerate looks for FSDP only in the environment of ranks on accelerators, and silently uses DDP for CPU ranks.
    # The type changes nothing else here. The device stays the CPU, and the group uses gloo.
    PartialState().distributed_type = DistributedType.MULTI_GPU


class VarlenAttention:
    """TRL's call of flash-attention, computed as one masked attention over all segments."""

    @staticmethod
    def flash_attn_varlen_func(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        starts_q: torch.Tensor,
        starts_k: torch.Tensor,
        max_q: int,
        max_k: int,
        *,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
    ) -> torch.Tensor:
        """Attend from each segment of `query`, [tokens, heads, width], to that of `key`. Both end at the same token."""
        if not causal or window_size != (-1, -1):
            raise NotImplementedError("this example's model has causal attention without a window")
        lengths_q, lengths_k = starts_q.diff(), starts_k.diff()
        numbers = torch.arange(len(lengths_q))
        segment_q, segment_k = numbers.repeat_interleave(lengths_q), numbers.repeat_interleave(lengths_k)
        # These are distances from the end of a segment, which the last query and the last key share.
        left_q = starts_q[1:][segment_q] - torch.arange(len(segment_q))
        left_k = starts_k[1:][segment_k] - torch.arange(len(segment_k))
        mask = (segment_q[:, None] == segment_k) & (left_k >= left_q[:, None])
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=softmax_scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)


# -- the task


def tokenizer_of() -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token for each word, with a chat template."""
    plain = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )
    messages = "<s>{% for message in messages %} {{ message['content'] }}{% endfor %}"
    tokenizer.chat_template = messages + "{% if add_generation_prompt %} <a>{% endif %}"
    # TRL takes it from a template that it knows otherwise. An answer here is a text without tools.
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<a>",
        "fields": {"content": {"close_pattern": "</s>|$", "content": "text"}},
    }
    return tokenizer


def dataset_of(task: str) -> Dataset:
    """Return prompts of random words, and the parity that their answers should have."""
    draw = random.Random(0)
    prompts, parities = [], []
    for _ in range(1024):
        numbers = [draw.randrange(len(SPECIAL), len(WORDS)) for _ in range(PROMPT_WORDS)]
        prompts.append([{"role": "user", "content": " ".join(WORDS[number] for number in numbers)}])
        parities.append(numbers[-1] % 2 if task == "parity" else 0)
    return Dataset.from_dict({"prompt": prompts, "parity": parities})


def share_of_parity(completion_ids: list[list[int]], parity: list[int], **_: Any) -> list[float]:
    """Reward the tokens that are words of the right parity. An answer that ends early loses the rest."""
    return [
        sum(token >= len(SPECIAL) and token % 2 == wanted for token in tokens) / NEW_TOKENS
        for tokens, wanted in zip(completion_ids, parity, strict=True)
    ]


# -- samples from the trainer's weights only


class RolloutLoop(_AsyncRolloutLoop):
    """TRL's loop of requests, in a process of its own, where the server may be killed at any time."""

    def run(self) -> None:
        """Sample until TRL stops this or has ended. If TRL was killed, this process would otherwise sample for ever."""

        def follow() -> None:
            trainer = multiprocessing.parent_process()
            assert trainer is not None
            trainer.join()
            os._exit(1)

        threading.Thread(target=follow, daemon=True).start()
        super().run()

    async def _post(self, path: str, payload: dict[str, Any], timeout: float, max_retries: int = 3) -> dict[str, Any]:
        """Send a request to the server. A restarted server has other weights until it gets the trainer's."""
        answer: dict[str, Any] = await super()._post(path, payload, timeout, max_retries)
        async with self.session.get(f"{self.vllm_server_url}/weight_info") as response:
            if (await response.json())["weight_version"] == "default":
                # TRL retries after this error.
                raise aiohttp.ClientConnectionError("the server has not received the trainer's weights yet")
        return answer


class RolloutWorker(AsyncRolloutWorker):
    """TRL's rollout worker with the loop above."""

    _loop_cls = RolloutLoop


# -- transfers


class Transfer(PenstockWeightTransfer):
    """Penstock's transfer, and a transfer of files to compare it with. TRL's own transfer uses NCCL and needs CUDA."""

    def __init__(self, client: Client, url: str, files: Path) -> None:
        super().__init__(url, PenstockTrainerInitInfo(name="policy", rank=0, stall_s=30.0), restart_s=ENGINE_START_S)
        self._files, self._routes = files, client
        self._paused_at = self.pause_s = self.sync_s = 0.0

    def pause(self) -> None:
        """Pause the server, and start the clock."""
        self._paused_at = time.perf_counter()
        super().pause()

    def resume(self) -> None:
        """Let the server continue, and stop the clock."""
        super().resume()
        self.pause_s = time.perf_counter() - self._paused_at

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Write a checkpoint into memory, which vLLM reloads. TRL's own step calls this while the server is paused."""
        self._files.mkdir(exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in iterator}, self._files / "model.safetensors")
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(self._files)}}
        self._routes.request("/collective_rpc", call)

    def attach_ways(self, trainer: AsyncGRPOTrainer, transfer: str) -> None:
        """Make a trainer send through Penstock, through files, or alternately."""
        self.attach(trainer)
        attached = trainer._sync_weight_merged

        def sync(started: float) -> Any:
            began = time.perf_counter()
            if self.engine is None or way_of(transfer, trainer.state.global_step) == "penstock":
                marks = attached(started)
            else:
                marks = AsyncGRPOTrainer._sync_weight_merged(trainer, started)
                # Both ways share the version numbers.
                self.engine.version += 1
            self.sync_s = time.perf_counter() - began
            return marks

        trainer._sync_weight_merged = sync


def way_of(transfer: str, step: int) -> str:
    return ("penstock", "stock")[step % 2] if transfer == "alternate" else transfer


# -- the checks


class Checks(TrainerCallback):
    """Compares the server's log-probabilities with the trainer's after every version, and reports the step."""

    def __init__(self, trainer: AsyncGRPOTrainer, transfer: Transfer, client: Client, way: str) -> None:
        self._trainer, self._transfer, self._client, self._way = trainer, transfer, client, way
        self._is_first = trainer.accelerator.is_main_process
        self._facts: dict[str, Any] = {}
        self._num_returns = 0
        self._before: tuple[packing.TreeRow, torch.Tensor] | None = None
        self._ended = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._probe(state.global_step)
        self._say(
            event="started", step=state.global_step, ranks=self._trainer.accelerator.num_processes, **self._version()
        )
        self._ended = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # TRL's callbacks run before this one, so the version is sent.
        self._facts = {"step_s": time.perf_counter() - self._ended, "way": way_of(self._way, state.global_step)}
        self._facts |= {"served_s": self._transfer.sync_s, "pause_s": self._transfer.pause_s}
        self._facts |= self._probe(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "reward" in logs:
            self._facts |= {"reward": logs["reward"]}

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer.accelerator.wait_for_everyone()
        if self._is_first:
            (Path(args.output_dir) / f"checkpoint-{state.global_step}" / "complete").touch()
        self._say(step=state.global_step, **self._facts, **self._version())
        self._ended = time.perf_counter()

    def _say(self, **facts: Any) -> None:
        if self._is_first:
            write_line(facts | {"time": time.time()})

    def _version(self) -> dict[str, int]:
        assert self._transfer.engine is not None
        return {"version": self._transfer.engine.version}

    def _probe(self, step: int) -> dict[str, float]:
        """Sample from the server, and compare its log-probabilities with the trainer's. All ranks call it."""
        generator = torch.Generator().manual_seed(step)
        words = torch.randint(len(SPECIAL), len(WORDS), (PROBES, PROMPT_WORDS), generator=generator)
        ends = torch.tensor([WORDS.index("<s>"), WORDS.index("<a>")]).expand(PROBES, 2)
        prompts = torch.cat([ends[:, :1], words, ends[:, 1:]], 1)
        completions = torch.empty(PROBES, NEW_TOKENS, dtype=torch.long)
        served = torch.empty(PROBES, NEW_TOKENS)
        if self._is_first:
            completions, served = self._sample(prompts)
        completions, served = broadcast(completions), broadcast(served)
        row = packing.TreeRow()
        for sample in torch.cat([prompts, completions], 1):
            mask = torch.arange(len(sample)) >= prompts.shape[1]
            row.add(
                {
                    "input_ids": sample,
                    "completion_mask": mask.long(),
                    "old_log_probs": torch.zeros(len(sample)),
                    "advantage": 0.0,
                    "group_id": 0,
                }
            )
        mine, largest = self._logprobs(row)
        # The last step moved other samples' log-probabilities by this much, so an older version would be noticed.
        moved = 0.0
        if self._before is not None:
            older, logprobs = self._before
            moved = float((self._logprobs(older)[0] - logprobs).abs().max())
        self._before = row, mine
        return {
            "difference": float((mine - served.flatten()).abs().max()),
            "bound": ROUNDING * largest,
            "moved": moved,
        }

    def _sample(self, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        while True:
            try:
                tokens, logprobs = self._client.sample(prompts.tolist(), NEW_TOKENS)
                # The server may have been restarted now or before.
                if not self._transfer.restore():
                    break
            except GONE:
                self._client.wait_up(ENGINE_START_S)
        if self._transfer.num_restored > self._num_returns:
            self._num_returns = self._transfer.num_restored
            newest = str(self._version()["version"])
            self._say(event="engine is back", version=self._client.weight_version(), newest=newest)
        return torch.tensor(tokens), torch.tensor(logprobs)

    def _logprobs(self, row: packing.TreeRow) -> tuple[torch.Tensor, float]:
        """Return log-probabilities of a row's completions, from the forward of TRL's loss, and the largest logit."""
        packed = row.pack()
        with torch.no_grad():
            logits = self._trainer.model(
                input_ids=packed["input_ids"][None],
                position_ids=packed["position_ids"][None],
                tree_kv_index=packed["tree_kv_index"],
                tree_cu_seqlens_q=packed["tree_cu_seqlens_q"],
                tree_cu_seqlens_k=packed["tree_cu_seqlens_k"],
                tree_max_seqlen_q=int(packed["tree_max_seqlens"][0]),
                tree_max_seqlen_k=int(packed["tree_max_seqlens"][1]),
            ).logits[0]
        tokens = packed["shift_labels"][packed["token_index"]]
        return logits.log_softmax(-1)[packed["token_index"], tokens], float(logits.abs().max())


# -- the ranks


def newest_checkpoint(directory: Path) -> Path | None:
    """Return the newest complete checkpoint."""
    saved = sorted(directory.glob("checkpoint-*/complete"), key=lambda path: int(path.parent.name.split("-")[1]))
    return saved[-1].parent if saved else None


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    model, output = args.work / "policy", args.work / "checkpoints"
    world_size = int(os.environ["WORLD_SIZE"])
    config = AsyncGRPOConfig(
        output_dir=str(output),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        fsdp=True,
        fsdp_config={"version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
        max_steps=args.steps,
        learning_rate=LEARNING_RATE,
        per_device_train_batch_size=PROMPTS * GROUP // world_size,
        num_generations=GROUP,
        max_completion_length=NEW_TOKENS,
        # Every rank has a fixed number of samples.
        token_budget=0,
        max_staleness=2,
        vllm_server_base_url=args.url,
        vllm_server_timeout=ENGINE_START_S,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
    )
    state = PartialState()
    is_first = state.is_main_process
    write_line({"event": "rank", "rank": state.process_index, "pid": os.getpid()})
    train_on_cpu()
    if is_first:
        write_policy(model, seed=0)
        # TRL would continue from a checkpoint that a killed rank left incomplete.
        for path in output.glob("checkpoint-*"):
            if not (path / "complete").exists():
                shutil.rmtree(path)
    torch.distributed.barrier()
    resumed = newest_checkpoint(output)

    tokenizer, dataset = tokenizer_of(), dataset_of(args.task)
    client = Client(args.url, "policy")
    transfer = Transfer(client, args.url, args.work / "files")
    worker = None
    if is_first:
        worker = RolloutWorker(
            # This is the server's name of the model. TRL would use the trainer's directory.
            model_name="policy",
            dataset=dataset,
            reward_funcs=[share_of_parity],
            processing_class=tokenizer,
            eos_token_ids=[tokenizer.eos_token_id],
            num_generations=GROUP,
            max_inflight_tasks=2 * PROMPTS * GROUP,
            queue_maxsize=2 * PROMPTS * GROUP,
            vllm_server_url=args.url,
            max_tokens=NEW_TOKENS,
            request_timeout=60,
        )
    trainer = AsyncGRPOTrainer(
        model=str(model),
        reward_funcs=share_of_parity,
        args=config,
        train_dataset=dataset,
        processing_class=tokenizer,
        rollout_worker=worker,
        weight_transfer=transfer,
    )
    transfer.attach_ways(trainer, args.transfer)
    # This prints to the pipe that `run.py` reads.
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Checks(trainer, transfer, client, args.transfer))
    trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
    torch.distributed.destroy_process_group()


def write_policy(directory: Path, seed: int) -> None:
    """Write a model with random weights, and its tokenizer."""
    tokenizer = tokenizer_of()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(CONFIG)
    model.config.bos_token_id = model.generation_config.bos_token_id = tokenizer.bos_token_id
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def main() -> None:
    args = arguments(__doc__, "checkpoints")
    if args.write:
        write_policy(args.write, seed=1)
    else:
        train(args)


if __name__ == "__main__":
    main()

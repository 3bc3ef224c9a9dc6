"""GRPO of a tiny language model with verl on a CPU: verl's trainer with two FSDP2 ranks, and verl's vLLM server.

    python examples/rl/verl_grpo.py                                     200 steps, Penstock sends the weights
    python examples/rl/verl_grpo.py --task even --steps 40 --kill engine@10 trainer@20      restarts killed processes
    python examples/rl/verl_grpo.py --transfer alternate                every second version with verl's own transfer

The program is `verl.trainer.main_ppo` with the settings below, and with the few classes in `verl_parts` that a CPU
needs. The reward is the share of generated tokens with the same parity as the prompt's last token, or with `--task
even` the share of even tokens. The program checks that the reward rises. It also checks in every step that the server's
log-probabilities for its samples equal those of the trainer's weights.

verl saves a checkpoint after every step. If the server or a trainer rank dies, verl ends, and this program restarts it.
It continues from the checkpoint, and repeats the interrupted step.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from checks import check_once, check_steps, print_medians

HERE = Path(__file__).resolve().parent
PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 8, 8, 4, 8
LEARNING_RATE = 3e-3


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """Return the reward of a sample, which is the share of its tokens with the wanted parity. verl calls this."""
    tokens = [int(word.removeprefix("t")) for word in solution_str.split() if word.startswith("t")]
    return sum(token % 2 == int(ground_truth) for token in tokens) / NEW_TOKENS


def write_model(directory: Path) -> None:
    """Write a model with random weights, and a tokenizer whose words are the numbers of its tokens."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig.from_pretrained(HERE / "tiny_llama", pad_token_id=0, bos_token_id=1, eos_token_id=1)
    words = ["<pad>", "<eos>", *(f"t{number}" for number in range(2, config.vocab_size))]
    plain = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", bos_token="<eos>", eos_token="<eos>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def write_prompts(file: Path, task: str, number: int) -> None:
    """Write prompts with random tokens, and the parity that their answers should have."""
    import random

    import pandas

    generator = random.Random(0)
    rows = []
    for index in range(number):
        tokens = [generator.randrange(2, 64) for _ in range(PROMPT_TOKENS)]
        wanted = tokens[-1] % 2 if task == "parity" else 0
        content = " ".join(f"t{token}" for token in tokens)
        rows.append(
            {
                "data_source": "parity",
                "prompt": [{"role": "user", "content": content}],
                "reward_model": {"style": "rule", "ground_truth": str(wanted)},
                "extra_info": {"index": index},
            }
        )
    pandas.DataFrame(rows).to_parquet(file)


def configuration(args: argparse.Namespace) -> Any:
    """Return verl's configuration, in the form that `python -m verl.trainer.main_ppo` takes."""
    from hydra import compose, initialize_config_module

    work = args.work
    # Keep two checkpoints, because verl removes the oldest one before it writes the newest.
    settings = f"""
        algorithm.adv_estimator=grpo
        data.train_files={work}/prompts.parquet
        data.val_files={work}/prompts.parquet
        data.train_batch_size={PROMPTS}
        data.max_prompt_length={PROMPT_TOKENS}
        data.max_response_length={NEW_TOKENS}
        data.dataloader_num_workers=0
        data.filter_overlong_prompts=False
        data.shuffle=False
        reward.num_workers=1
        reward.custom_reward_function.path={HERE}/verl_grpo.py
        actor_rollout_ref.hybrid_engine=False
        actor_rollout_ref.model.path={work}/model
        actor_rollout_ref.model.use_remove_padding=False
        actor_rollout_ref.model.enable_gradient_checkpointing=False
        +actor_rollout_ref.model.override_config.attn_implementation=sdpa
        actor_rollout_ref.actor.strategy=fsdp2
        actor_rollout_ref.actor.fsdp_config.strategy=fsdp2
        actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
        +actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32
        +actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype=fp32
        actor_rollout_ref.actor.use_torch_compile=False
        actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}
        actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={PROMPTS * GROUP // args.ranks}
        actor_rollout_ref.actor.ppo_epochs=2
        actor_rollout_ref.actor.optim.lr={LEARNING_RATE}
        actor_rollout_ref.actor.optim.weight_decay=0.0
        actor_rollout_ref.rollout.name=vllm
        actor_rollout_ref.rollout.nnodes=1
        actor_rollout_ref.rollout.n_gpus_per_node=1
        actor_rollout_ref.rollout.tensor_model_parallel_size=1
        actor_rollout_ref.rollout.n={GROUP}
        actor_rollout_ref.rollout.ignore_eos=True
        actor_rollout_ref.rollout.dtype=float32
        actor_rollout_ref.rollout.load_format=dummy
        actor_rollout_ref.rollout.enforce_eager=True
        actor_rollout_ref.rollout.enable_prefix_caching=False
        +actor_rollout_ref.rollout.enable_sleep_mode=False
        actor_rollout_ref.rollout.free_cache_engine=False
        actor_rollout_ref.rollout.max_model_len=64
        actor_rollout_ref.rollout.max_num_batched_tokens=1024
        actor_rollout_ref.rollout.max_num_seqs={PROMPTS * GROUP}
        actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={PROMPTS * GROUP // args.ranks}
        actor_rollout_ref.rollout.agent.num_workers=1
        +actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=32
        +actor_rollout_ref.rollout.engine_kwargs.vllm.weight_transfer_config.backend=penstock
        actor_rollout_ref.rollout.checkpoint_engine.backend=penstock
        actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=penstock_rl.verl
        actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=16
        +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.penstock.name=policy
        +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.penstock.receive=engine
        +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.penstock.stall_s=60
        trainer.device=cpu
        trainer.nnodes=1
        trainer.n_gpus_per_node={args.ranks}
        trainer.logger=[]
        trainer.val_before_train=False
        trainer.test_freq=-1
        trainer.save_freq=1
        trainer.max_actor_ckpt_to_keep=2
        trainer.default_local_dir={work}/checkpoints
        trainer.total_epochs=1000000
        trainer.total_training_steps={args.steps}
        trainer.v1.trainer_mode=penstock_example
        +trainer.v1.penstock_example.num_warmup_batches=0
        +trainer.v1.penstock_example.parameter_sync_step=1
        trainer.v1.separate_async.num_warmup_batches=0
        trainer.v1.separate_async.parameter_sync_step=1
        trainer.v1.sampler.custom_sampler.path=pkg://verl_parts
        trainer.v1.sampler.custom_sampler.name=Sampler
        transfer_queue.backend.SimpleStorage.num_data_storage_units=1
        ray_kwargs.ray_init.num_cpus=64
        +ray_kwargs.ray_init.num_gpus={args.ranks + 1}
        +ray_kwargs.ray_init.include_dashboard=False
        +penstock_example.transfer={args.transfer}
    """
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [line.strip() for line in settings.split("\n") if line.strip()])


def train(args: argparse.Namespace) -> None:
    """Train until the last step, starting from the newest checkpoint if there is one."""
    import ray
    from verl.trainer.main_ppo import run_ppo
    from verl.utils.config import validate_config
    from verl_parts import TaskRunner

    config = configuration(args)
    validate_config(config=config, use_reference_policy=False, use_critic=False)
    run_ppo(config, task_runner_class=ray.remote(TaskRunner))


# -- the process that starts and restarts verl, and checks the results


ENVIRONMENT = {
    # The CPU's platform, and the name under which verl's FSDP engine is registered.
    "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    # verl 0.9.1 cannot write one INFO message in a trainer without colocated replicas.
    "VERL_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # If a server is killed, its processes end with it.
    "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper": "true",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer's ranks need the cores too
}


class Run:
    """The events from verl's processes, and the planned kills."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._kills = [(what, int(step)) for what, step in (kill.split("@") for kill in args.kill)]
        self._num_kills = len(self._kills)
        self._events, self._log = args.work / "events.jsonl", args.work / "verl.log"
        self._starts: list[dict[str, Any]] = []
        self._steps: list[dict[str, Any]] = []
        self._pids: dict[str, int] = {}
        self._killed: dict[str, Any] | None = None

    def train(self) -> None:
        """Run verl's trainer, and restart it after a kill."""
        self._events.touch()
        while True:
            num_kills = len(self._kills)
            if self._run() == 0:
                return
            if len(self._kills) == num_kills:
                # Nothing was killed after the last start.
                break
        print(f"-- the end of {self._log}\n{self._log.read_text(errors='replace')[-8000:]}", file=sys.stderr)
        sys.exit("verl failed")

    def _run(self) -> int:
        """Run verl's trainer once, and return its exit code."""
        args = self._args
        command = [sys.executable, str(HERE / "verl_grpo.py"), "--train", "--work", str(args.work)]
        command += ["--steps", str(args.steps), "--transfer", args.transfer, "--ranks", str(args.ranks)]
        paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        environ = ENVIRONMENT | {"VLLM_CACHE_ROOT": str(args.work / "vllm")} | os.environ
        environ |= {"PYTHONPATH": os.pathsep.join(paths), "PENSTOCK_EXAMPLE_EVENTS": str(self._events)}
        self._pids.clear()
        with (
            self._log.open("ab") as log,
            self._events.open() as events,
            subprocess.Popen(command, env=environ, stdout=log, stderr=log) as process,
        ):
            events.seek(0, os.SEEK_END)
            while True:
                is_over = process.poll() is not None
                for line in events:
                    self._record(json.loads(line))
                if is_over:
                    return process.returncode
                time.sleep(0.05)

    def _record(self, said: dict[str, Any]) -> None:
        match said.get("event"):
            case "rank":
                self._pids["trainer"] = said["pid"]
            case "engine":
                self._pids["engine"] = said["pid"]
            case "started":
                self._starts.append(said)
                print(f"{said['ranks']} ranks train from step {said['step'] + 1} on", flush=True)
            case _:
                self._record_step(said)

    def _record_step(self, said: dict[str, Any]) -> None:
        self._steps.append(said)
        step = said["step"]
        if self._killed is not None:
            print(
                f"step {step}: {said['time'] - self._killed['time']:.0f} s after the {self._killed['what']} was killed"
            )
            self._killed = None
        if step % self._args.print_every == 0 or step == self._args.steps:
            print(
                f"step {step}: reward {said['reward']:.3f}; log-probabilities differ by {said['difference']:.1e},"
                f" allowed {said['bound']:.1e}; {said['way']}: {said['step_s'] * 1e3:.0f} ms,"
                f" paused {said['pause_s'] * 1e3:.0f} ms",
                flush=True,
            )
        for kill in [kill for kill in self._kills if kill[1] == step + 1]:
            # Kill in the middle of the step that has begun.
            self._kills.remove(kill)
            print(f"step {kill[1]}: killing the {kill[0]}", flush=True)
            kill_tree(self._pids[kill[0]])
            self._killed = {"what": kill[0], "time": time.time()}

    def check(self) -> None:
        """Check the results, and print them.

        Raises:
            AssertionError: A check failed.
        """
        stale = [said for said in self._steps if said["versions"] != [said["step"] - 1]]
        assert not stale, f"samples with other weights than those of the previous step: {stale[:3]}"
        check_steps(self._steps, self._args.steps, self._args.rise)
        check_once(self._steps, self._starts, self._args.steps)
        self._check_restarts()
        print_medians(self._steps, ("step_s", "sample_s", "train_s", "save_s", "pause_s", "publish_s"))

    def _check_restarts(self) -> None:
        assert not self._kills, f"{self._kills} were not reached"
        assert len(self._starts) == 1 + self._num_kills, self._starts
        for start in self._starts[1:]:
            print(f"verl resumed with {start['ranks']} ranks from its checkpoint of step {start['step']}")


def kill_tree(pid: int) -> None:
    """Kill a process and all processes that it started."""
    import psutil

    process = psutil.Process(pid)
    for member in (process, *process.children(recursive=True)):
        os.kill(member.pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--task", choices=["parity", "even"], default="parity")
    parser.add_argument("--transfer", choices=["penstock", "naive", "alternate"], default="penstock")
    parser.add_argument("--ranks", type=int, default=2, help="of the trainer")
    parser.add_argument("--kill", nargs="*", default=[], metavar="WHAT@STEP", help="such as engine@20 trainer@40")
    parser.add_argument("--rise", type=float, default=0.3, help="how much the mean reward must rise")
    parser.add_argument("--print-every", type=int, default=10)
    parser.add_argument("--work", type=Path, help="a directory for logs and checkpoints, instead of a temporary one")
    parser.add_argument("--train", action="store_true", help="only train; without it, this starts itself with it")
    args = parser.parse_args()
    if args.train:
        train(args)
        return
    if args.kill and args.transfer != "penstock":
        parser.error("verl's own transfer waits for ever for a dead process, so use --kill with --transfer penstock")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        args.work = (args.work or Path(temporary)).resolve()
        args.work.mkdir(parents=True, exist_ok=True)
        write_model(args.work / "model")
        write_prompts(args.work / "prompts.parquet", args.task, args.steps * PROMPTS)
        run = Run(args)
        run.train()
        run.check()
    print(f"{args.steps} steps in {time.monotonic() - began:.0f} s with all starts")


if __name__ == "__main__":
    main()

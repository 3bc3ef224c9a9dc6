"""Start a server and a trainer's ranks, restart them when they end, and check the results.

    python examples/rl/run.py torchrun_grpo                               200 steps with vLLM (its CPU build is enough)
    python examples/rl/run.py torchrun_grpo --engine transformers --task even --steps 30         without vLLM
    python examples/rl/run.py torchrun_grpo --kill engine@20 trainer@40 --ranks 2 1              restarts processes
    python examples/rl/run.py torchrun_grpo --transfer alternate          sends every second version as checkpoint files
    python examples/rl/run.py trl_grpo --task even --steps 60             uses TRL's AsyncGRPOTrainer

The reward is the share of generated tokens with the same parity as the prompt's last token, or with `--task even` the
share of even tokens. The program checks that the reward rises. It also checks after every step that the server's
log-probabilities for its samples equal the trainer's. After a kill it checks that no earlier step is lost, and that the
version numbers continue.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from checks import check_once, check_steps, print_medians

HERE = Path(__file__).resolve().parent


class Server:
    """A server in separate processes, which is restarted when they end."""

    def __init__(self, engine: str, model: Path, work: Path, options: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.num_starts = 0
        self.log = work / "server.log"
        self._environ = {
            "VLLM_SERVER_DEV_MODE": "1",  # the routes for updates
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_CACHE_ROOT": str(work / "vllm"),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer's ranks need the cores too
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            **os.environ,
        }
        if engine == "vllm":
            self._command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
            self._command += ["--served-model-name", "policy", str(model), "--host", "127.0.0.1", "--port", str(port)]
            self._command += ["--enforce-eager", "--dtype", "float32", "--max-model-len", "64", "--block-size", "32"]
            self._command += ["--weight-transfer-config", '{"backend": "penstock"}', *options]
        else:
            self._command = [sys.executable, str(HERE / "transformers_server.py"), str(model), "--port", str(port)]
        self._is_over = threading.Event()
        self._start()
        self._watch = threading.Thread(target=self._restart, daemon=True)
        self._watch.start()

    def kill(self) -> None:
        """Kill all processes of the server at the same time."""
        os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        self._is_over.set()
        self._watch.join()
        self._process.terminate()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()

    def _start(self) -> None:
        self.num_starts += 1
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environ, stdout=log, stderr=log, start_new_session=True
            )

    def _restart(self) -> None:
        while not self._is_over.wait(0.1):
            if self._process.poll() is not None:
                self._start()


class Run:
    """The reports from the ranks, and the planned kills."""

    def __init__(self, args: argparse.Namespace, server: Server) -> None:
        self._args, self._server = args, server
        self._kills = [(what, int(step)) for what, step in (kill.split("@") for kill in args.kill)]
        self._num_kills = {what: sum(kill[0] == what for kill in self._kills) for what in ("engine", "trainer")}
        self._steps: list[dict[str, Any]] = []
        self._starts: list[dict[str, Any]] = []
        self._returns: list[dict[str, Any]] = []
        self._pids: dict[int, int] = {}
        self._log = args.work / "ranks.log"

    def train(self) -> None:
        """Run the trainer's ranks, and restart them when one was killed."""
        for start in range(1 + self._num_kills["trainer"]):
            number = self._args.ranks[min(start, len(self._args.ranks) - 1)]
            if self._ranks(number) == 0:
                if not self._steps:
                    sys.exit("the trainer did no step")
                return
        for log in (self._log, self._server.log):
            print(f"-- the end of {log.name}\n{log.read_text(errors='replace')[-6000:]}", file=sys.stderr)
        sys.exit("the trainer failed")

    def _ranks(self, number: int) -> int:
        args = self._args
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]
        command += [str(HERE / f"{args.program}.py"), "--url", self._server.url, "--work", str(args.work)]
        command += ["--steps", str(args.steps), "--task", args.task, "--transfer", args.transfer]
        self._pids.clear()
        with (
            self._log.open("ab") as log,
            subprocess.Popen(
                command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=log, text=True
            ) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    self._hear(json.loads(line))
                else:
                    print(line, end="", flush=True)
        return process.returncode

    def _hear(self, said: dict[str, Any]) -> None:
        match said.get("event"):
            case "rank":
                self._pids[said["rank"]] = said["pid"]
            case "started":
                self._starts.append(said)
                print(f"{said['ranks']} ranks train from step {said['step'] + 1} on", flush=True)
            case "engine is back":
                self._returns.append(said)
                print(f"the engine is back and has version {said['version']}", flush=True)
            case _:
                self._hear_step(said)

    def _hear_step(self, said: dict[str, Any]) -> None:
        self._steps.append(said)
        step = said["step"]
        if step % self._args.print_every == 0 or step == self._args.steps:
            print(
                f"step {step}: reward {said['reward']:.3f}; log-probabilities differ by {said['difference']:.1e},"
                f" allowed {said['bound']:.1e}; {said['way']}: {said['step_s'] * 1e3:.0f} ms,"
                f" paused {said['pause_s'] * 1e3:.1f} ms",
                flush=True,
            )
        for kill in [kill for kill in self._kills if kill[1] == step + 1]:
            # Kill in the middle of the step that has begun.
            self._kills.remove(kill)
            print(f"step {kill[1]}: killing the {kill[0]}", flush=True)
            if kill[0] == "engine":
                self._server.kill()
            else:
                os.kill(self._pids[max(self._pids)], signal.SIGKILL)

    def check(self) -> None:
        """Check the results, and print them.

        Raises:
            AssertionError: A check failed.
        """
        check_steps(self._steps, self._args.steps, self._args.rise)
        check_once(self._steps, self._starts, self._args.steps)
        self._check_restarts()
        print_medians(self._steps, ("step_s", "sample_s", "train_s", "waited_s", "served_s", "pause_s"))

    def _check_restarts(self) -> None:
        assert len(self._starts) == 1 + self._num_kills["trainer"], self._starts
        assert self._server.num_starts == 1 + self._num_kills["engine"] == 1 + len(self._returns), self._returns
        versions = [said["version"] for said in sorted((*self._starts, *self._steps), key=lambda said: said["time"])]
        assert versions == sorted(set(versions)), f"versions did not grow: {versions}"
        for back in self._returns:
            assert back["version"] == back["newest"], back
        for start in self._starts[1:]:
            print(
                f"the trainer resumed with {start['ranks']} ranks after step {start['step']},"
                f" as version {start['version']}"
            )
        for back in self._returns:
            print(f"the engine had the newest version, {back['version']}, after one update")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=["torchrun_grpo", "trl_grpo"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--task", choices=["parity", "even"], default="parity")
    parser.add_argument("--engine", choices=["vllm", "transformers"], default="vllm")
    parser.add_argument("--transfer", choices=["penstock", "stock", "alternate"], default="penstock")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2], help="of each start of the trainer; the last repeats"
    )
    parser.add_argument("--kill", nargs="*", default=[], metavar="WHAT@STEP", help="such as engine@20 trainer@40")
    parser.add_argument("--rise", type=float, default=0.3, help="how much the mean reward must rise")
    parser.add_argument("--print-every", type=int, default=10)
    parser.add_argument("--work", type=Path, help="a directory for logs and checkpoints, instead of a temporary one")
    args = parser.parse_args()
    if args.kill and args.transfer != "penstock":
        parser.error(
            "a reload from files reports no version to a resuming trainer, so use --kill with --transfer penstock"
        )
    began = time.monotonic()
    # Use a file system in memory if there is one, because the way without Penstock writes its files there.
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=in_memory) as temporary:
        args.work = args.work or Path(temporary)
        args.work.mkdir(parents=True, exist_ok=True)
        model = HERE / "tiny_llama"
        if args.engine == "vllm":
            # The server starts with other weights than the trainer's, so it must have received the trainer's.
            model = args.work / "model"
            subprocess.run([sys.executable, str(HERE / f"{args.program}.py"), "--write", str(model)], check=True)
        options = ["--skip-tokenizer-init"] if args.program == "torchrun_grpo" else []
        server = Server(args.engine, model, args.work, options)
        run = Run(args, server)
        try:
            run.train()
        finally:
            server.close()
        run.check()
    print(f"{args.steps} steps in {time.monotonic() - began:.0f} s with all starts")


if __name__ == "__main__":
    main()

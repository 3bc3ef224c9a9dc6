"""A process that runs vLLM engines one after the other. Importing vLLM takes longer than starting a tiny engine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.engines.device import ON_GPU, vllm_environ, vllm_options

ROUNDING = 0.02 if ON_GPU else 0.0
"""Limit for log-probabilities of the same weights. A GPU library may choose another kernel by time."""
PROMPT = [1, 5, 9, 200, 17, 33, 2, 8]
LONG_PROMPT = [1, *range(7, 300, 4)]
"""The prompt covers more than two blocks of the cache, so a wrong reuse of keys and values would be noticed."""
NUM_TOKENS = 24

PROGRAM = """
import gc, json, sys

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from penstock.phases import boot_record


def answer(prompt, num_tokens, sleeps, arguments):
    llm = LLM(**arguments)
    for level in sleeps:
        llm.sleep(level=level)
        llm.wake_up()
    greedy = SamplingParams(temperature=0, max_tokens=num_tokens, logprobs=0, detokenize=False)
    (request,) = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
    (found,) = request.outputs
    tokens = list(found.token_ids)
    boot = boot_record().snapshot()  # None without Penstock's load format
    return {
        "tokens": tokens,
        "log_probs": [step[token].logprob for step, token in zip(found.logprobs, tokens, strict=True)],
        "phases": [[phase.journey, phase.name] for phase in boot.phases] if boot else [],
    }


if __name__ == "__main__":
    for line in sys.stdin:
        try:
            said = answer(*json.loads(line))
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        gc.collect()
        cleanup_dist_env_and_memory()
        print("ANSWER", json.dumps(said), flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an engine generated, or why it did not start."""

    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    phases: tuple[tuple[str, str], ...] = ()
    error: str = ""
    log: str = ""
    """What the process wrote for this engine."""

    def same(self, other: Answer) -> bool:
        """Return whether both answers have the same tokens with the same log-probabilities."""
        if self.error or self.tokens != other.tokens:
            return False
        return all(abs(a - b) <= ROUNDING for a, b in zip(self.log_probs, other.log_probs, strict=True))


class EngineProcess:
    """A process that imports vLLM once. It ends with the context, and with it what its engines serve to others."""

    def __init__(self, directory: Path, **environ: str) -> None:
        directory.mkdir(exist_ok=True)
        script, self._log = directory / "engine.py", directory / "log"
        script.write_text(PROGRAM)
        with self._log.open("wb") as written:
            self._process = subprocess.Popen(
                [sys.executable, str(script)],
                env=vllm_environ(directory, VLLM_ENABLE_V1_MULTIPROCESSING="0", **environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=written,
                text=True,
            )

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def start(
        self, prompt: list[int] | None = None, num_tokens: int = NUM_TOKENS, sleeps: Sequence[int] = (), **options: Any
    ) -> Answer:
        """Start an engine, and return its greedy answer to a prompt. The engine ends with the answer.

        Args:
            sleeps: the levels of sleeps from which the engine wakes before it answers.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        before = self._log.stat().st_size
        asked = [prompt or PROMPT, num_tokens, sleeps, vllm_options(**options)]
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        lines = []
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                break
            lines.append(line)
        else:
            raise AssertionError("".join(lines)[-4000:] + self._log.read_text()[-4000:])
        said = json.loads(line.removeprefix("ANSWER "))
        if "error" in said:
            return Answer(error=said["error"], log=self._logged(before, lines))
        return Answer(
            tokens=tuple(said["tokens"]),
            log_probs=tuple(said["log_probs"]),
            phases=tuple((journey, name) for journey, name in said["phases"]),
            log=self._logged(before, lines),
        )

    def _logged(self, offset: int, lines: list[str]) -> str:
        return "".join(lines) + self._log.read_bytes()[offset:].decode()

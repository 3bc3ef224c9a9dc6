"""From the start of a process to its first token: the engine alone, with Penstock's weights, and with compiled code.

    python -m benchmarks.bench_artifacts --engine transformers --layers 16 --runs 3
    python -m benchmarks.bench_artifacts --device cuda --layers 16 --width 2048 --mode max-autotune-no-cudagraphs
    python -m benchmarks.bench_artifacts --engine vllm --layers 8 --runs 3        vLLM's CPU build

Each run is a fresh process with a fresh home: no compiler's cache but what Penstock restores. `stock` is the engine's
own loader, `weights` Penstock's, `artifacts` Penstock's with the bundle that the first run of `weights` has saved.
`command` (for vLLM) is as `artifacts`, but `penstock compile-cache restore` runs before the engine, and its time is in
the total: vLLM then finds all of its caches, also those that it reads before its plugins can tell it anything.
The model has random weights and is in the page cache; the cases take turns. The prompt is the same in all runs, and so
must be the first token. Phases are the child's own; the total is the parent's clock, from the start of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from penstock_compile_cache.caches import CACHES

CASES = ("stock", "weights", "artifacts")
PROMPT = list(range(1, 17))
_TIMEOUT_S = 900.0


class _Child:
    """What runs in a fresh process; prints its phases and the first token."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked = asked
        self._began_s = time.perf_counter()
        self.phases: dict[str, float] = {}
        self.hits: dict[str, int] = {}
        """What torch found in its caches, and did not."""
        self.spent_s: dict[str, float] = {}
        """Seconds of the stages of torch.compile, which contain each other; those of at least 0.5 s."""

    def phase(self, name: str) -> None:
        """End a phase that began when the one before it ended."""
        now = time.perf_counter()
        self.phases[name], self._began_s = now - self._began_s, now

    def tell(self, token: int) -> None:
        """Print the phases until the first token, and the token."""
        print(
            json.dumps({"phases": self.phases, "token": token, "hits": self.hits, "spent_s": self.spent_s}), flush=True
        )

    def transformers(self) -> None:
        asked = self._asked
        import torch
        import transformers

        self.phase("import")
        restored: Any = None
        if asked.case != "stock":
            import penstock_compile_cache

            restored = penstock_compile_cache.restore(
                asked.model,
                engine="transformers",
                config={"dtype": "bfloat16", "mode": asked.mode},
                device=asked.device,
            )
            print(restored, file=sys.stderr)
            self.phase("restore compiled code")
        options = {"dtype": torch.bfloat16, "device_map": asked.device}
        if asked.case == "stock":
            model = transformers.AutoModelForCausalLM.from_pretrained(asked.model, **options)
        else:
            from penstock_hf.patched_libraries import patched_libraries

            with patched_libraries():
                model = transformers.AutoModelForCausalLM.from_pretrained(asked.model, **options)
        self.phase("weights")
        forward = torch.compile(model, mode=asked.mode)
        with torch.inference_mode():
            prompt = torch.tensor([PROMPT], device=asked.device)
            token = int(forward(input_ids=prompt, use_cache=False).logits[0, -1].argmax())
        self.phase("first token, with compilation")
        counters = torch._dynamo.utils.counters
        found = {**counters["inductor"], **counters["aot_autograd"]}
        self.hits = {name: count for name, count in found.items() if "cache" in name}
        stages = zip(*torch._dynamo.utils.compile_times(repr="csv", aggregate=True), strict=True)
        self.spent_s = {name: round(float(spent), 2) for name, spent in stages if float(spent) >= 0.5}
        self.tell(token)
        if asked.save:
            print(penstock_compile_cache.save(asked.model, restored.key), file=sys.stderr)

    def vllm(self) -> None:
        asked = self._asked
        from vllm import LLM, SamplingParams

        self.phase("import")
        options: dict[str, Any] = {}
        if asked.case != "stock":
            options["load_format"] = "penstock"
            if asked.case == "artifacts" or (asked.save and asked.case != "command"):
                options["model_loader_extra_config"] = {"artifacts": True}
        engine = LLM(
            model=asked.model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=128, seed=0, **options
        )
        self.phase("engine")
        greedy = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        (answer,) = engine.generate([{"prompt_token_ids": PROMPT}], greedy)
        self.phase("first token")
        self.tell(int(answer.outputs[0].token_ids[0]))


def make(directory: Path, layers: int, width: int) -> None:
    """Write a Llama of random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=width,
        intermediate_size=width * 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 128,
        num_key_value_heads=width // 128,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(directory)


def write_keys(directory: Path) -> None:
    """Write a pair of keys, `private.pem` and `public.pem`."""
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (directory / "private.pem").write_bytes(private)
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (directory / "public.pem").write_bytes(public)


def boot(asked: argparse.Namespace, case: str, directory: Path, *, save: bool = False) -> dict[str, Any]:
    """Start a process in a fresh home; return its seconds, phases and token."""
    # Empty in each run, and at one path, as pods of one image have it: torch looks for what it tuned where it wrote it.
    home = directory / "home"
    home.mkdir()
    restores = case in {"artifacts", "command"}
    places = {cache.variable for cache in CACHES}
    environ = {name: text for name, text in os.environ.items() if name not in places}
    environ |= {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"),
        "PENSTOCK_COMPILE_CACHE_KEYS": str(directory / "public.pem") if restores else "",
        "PENSTOCK_COMPILE_CACHE_SIGNING_KEY": str(directory / "private.pem") if save else "",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "benchmarks.bench_artifacts", "--child", "--case", case]
    command += ["--engine", asked.engine, "--device", asked.device, "--mode", asked.mode, "--model", asked.model]
    began_s = time.perf_counter()
    restored: dict[str, Any] = {}
    if case == "command":
        arguments = ["restore", asked.model, "--engine", asked.engine, "--device", asked.device, "--format", "json"]
        restored = json.loads(_penstock(environ, *arguments))
        environ |= restored["variables"]
    with (
        open(home / "errors", "w+", encoding="utf-8") as errors,
        subprocess.Popen(
            [*command, *(["--save"] if save else [])], env=environ, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        result, wall_s = {}, 0.0
        # Until the token: torch waits for its compile workers when the process ends.
        for line in process.stdout:
            if line.startswith('{"phases"'):
                result, wall_s = json.loads(line), time.perf_counter() - began_s
        code = process.wait(_TIMEOUT_S)
        errors.seek(0)
        said = errors.read()
    if save and restored:
        _penstock(environ, "save", asked.model, restored["id"])
    shutil.rmtree(home)
    if code:
        raise SystemExit(f"{case} failed: {said[-3000:]}")
    notes = [line for line in said.splitlines() if "artifacts" in line]
    return {"engine": asked.engine, "case": case, "wall_s": wall_s, **result, "notes": notes[-2:]}


def _penstock(environ: dict[str, str], *words: str) -> str:
    """Run `penstock compile-cache`; return what it prints."""
    command = [sys.executable, "-m", "penstock", "artifacts", *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mode", default="default", help="of torch.compile, for transformers")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cases", default=",".join(CASES), help="with `weights`, which saves the bundle")
    parser.add_argument("--out", help="file for one line of JSON a run")
    for name in ("--child", "--save"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    for name in ("--case", "--model"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child = _Child(asked)
        getattr(child, asked.engine)()
        return
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_keys(directory)
        asked.model = str(directory / "model")
        make(Path(asked.model), asked.layers, asked.width)
        # The first of `weights`, which has nothing restored either: what it saves, it saves after its token.
        results = [boot(asked, "weights", directory, save=True)]
        print(json.dumps(results[0]), flush=True)
        for turn in range(asked.runs):
            for case in asked.cases.split(","):
                if case == "weights" and not turn:
                    continue
                if case == "command" and not turn:
                    boot(asked, case, directory, save=True)
                results.append(boot(asked, case, directory))
                print(json.dumps(results[-1]), flush=True)
        if len({result["token"] for result in results}) != 1:
            raise SystemExit(f"first tokens differ: {[result['token'] for result in results]}")
    if asked.out:
        with open(asked.out, "a", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(result)}\n" for result in results)
    _print(results)


def _print(results: list[dict[str, Any]]) -> None:
    """Write a table of medians (least-most)."""
    middle: dict[str, float] = {}
    for case in dict.fromkeys(result["case"] for result in results):
        mine = [result for result in results if result["case"] == case]
        walls = [result["wall_s"] for result in mine]
        middle[case] = statistics.median(walls)
        phases = {name: statistics.median(result["phases"][name] for result in mine) for name in mine[0]["phases"]}
        shown = ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())
        print(f"| {case} | {middle[case]:.2f} s ({min(walls):.2f}-{max(walls):.2f}) | {shown} |")
    for case in middle.keys() & {"artifacts", "command"}:
        print(f"{case}: {middle['weights'] / middle[case]:.2f} times as fast as with weights alone")


if __name__ == "__main__":
    main()

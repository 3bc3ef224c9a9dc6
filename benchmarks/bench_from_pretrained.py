"""Models by the libraries of Hugging Face inside `patched_libraries()`, beside the libraries alone.

    python -m benchmarks.bench_from_pretrained --gib 0.5 --runs 5 --out benchmarks/results/cpu2_202611
    python -m benchmarks.bench_from_pretrained --device cuda --gib 8 --libraries transformers accelerate

Each run is a fresh process, forked from one that has imported the library. `hub`: from a hub on loopback in
another process, with an empty local cache; stock downloads to the cache and then reads it. `directory`: from a local
directory in the page cache. The time begins after imports and ends when every byte of every parameter was read once.
Memory is the process's own (RssAnon and RssShmem, looked at 100 times a second) above what it had before the load:
mapped files are not in it, nor is the device's. Stock and Penstock take turns, and all runs of a library must give the
same sum over all bytes. The limit of `hub` is what one client takes for the same files by plain requests.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.servers.hugging_face import HuggingFaceServer

from penstock.types import GIB, MIB

LIBRARIES = ("transformers", "diffusers", "accelerate", "peft", "sentence_transformers")


def make(library: str, root: Path, gib: float) -> None:
    """Save a model of random weights for a library below `root`; sizes of others than transformers are fixed."""
    import torch
    import transformers

    torch.manual_seed(0)
    if library in {"transformers", "accelerate", "peft"}:
        layers = max(1, round((gib * GIB - 131e6) / 33.6e6))
        config = _llama_config(layers)
        # Random values of gigabytes take minutes on a CPU.
        with _dtype(torch.bfloat16), torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = transformers.LlamaForCausalLM(config)
        model.save_pretrained(root / "model", max_shard_size=f"{max(1, int(gib * GIB / 4 / 1e6))}MB")
    if library == "peft":
        import peft

        lora = peft.LoraConfig(r=64, target_modules="all-linear", init_lora_weights=False)
        peft.get_peft_model(model, lora).save_pretrained(root / "adapter")
    if library == "diffusers":
        import diffusers

        unet = diffusers.UNet2DConditionModel(
            block_out_channels=(192, 384),
            layers_per_block=2,
            sample_size=32,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=384,
        )
        vae = diffusers.AutoencoderKL(
            block_out_channels=[128, 256],
            down_block_types=["DownEncoderBlock2D"] * 2,
            up_block_types=["UpDecoderBlock2D"] * 2,
            layers_per_block=2,
        )
        text = transformers.CLIPTextModel(
            transformers.CLIPTextConfig(hidden_size=384, intermediate_size=1536, num_hidden_layers=8)
        )
        words = root / "words"
        words.mkdir()
        (words / "vocab.json").write_text(json.dumps({"<|startoftext|>": 0, "<|endoftext|>": 1, "a</w>": 2}))
        (words / "merges.txt").write_text("#version: 0.2\n")
        diffusers.StableDiffusionPipeline(
            vae=vae,
            text_encoder=text,
            tokenizer=transformers.CLIPTokenizer.from_pretrained(words),
            unet=unet,
            scheduler=diffusers.DDIMScheduler(),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        ).save_pretrained(root / "model")
    if library == "sentence_transformers":
        import sentence_transformers

        bert = root / "bert"
        config = transformers.BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12)
        transformers.BertModel(config).save_pretrained(bert)
        (bert / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]))
        transformers.BertTokenizer.from_pretrained(bert).save_pretrained(bert)
        modules = sentence_transformers.sentence_transformer.modules
        parts = [modules.Transformer(str(bert)), modules.Pooling(384)]
        sentence_transformers.SentenceTransformer(modules=parts).save_pretrained(str(root / "model"))


def _llama_config(layers: int) -> Any:
    import transformers

    return transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=16,
        dtype="bfloat16",
    )


@contextlib.contextmanager
def _dtype(dtype: Any) -> Iterator[None]:
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def load(library: str, place: str, adapter: str, device: str) -> list[Any]:
    """Load a model by its library's own call; return its modules."""
    if library == "transformers":
        import transformers

        return [transformers.AutoModelForCausalLM.from_pretrained(place, device_map={"": device})]
    if library == "diffusers":
        import diffusers

        pipeline = diffusers.DiffusionPipeline.from_pretrained(place).to(device)
        return [pipeline.unet, pipeline.vae, pipeline.text_encoder]
    if library == "accelerate":
        import accelerate
        import huggingface_hub
        import transformers

        directory = place if os.path.isdir(place) else huggingface_hub.snapshot_download(place)
        config = transformers.AutoConfig.from_pretrained(directory)
        with accelerate.init_empty_weights():
            model = transformers.LlamaForCausalLM._from_config(config, dtype=config.dtype)
        return [accelerate.load_checkpoint_and_dispatch(model, directory, device_map={"": device})]
    if library == "peft":
        import peft
        import transformers

        base = transformers.AutoModelForCausalLM.from_pretrained(place, device_map={"": device})
        # Named, or PEFT starts CUDA for a model on the CPU too: a forked process could not use it.
        return [peft.PeftModel.from_pretrained(base, adapter, torch_device=device)]
    import sentence_transformers

    return [sentence_transformers.SentenceTransformer(place, device=device)]


def run(library: str, kind: str, place: str, adapter: str, device: str) -> None:
    """Load once in this process; print seconds, memory and the sum over all bytes."""
    import torch

    from penstock_hf.patched_libraries import patched_libraries

    # It looks at all modules, which copies the pages that they are in after a fork: both kinds begin with copies.
    with patched_libraries():
        pass
    if device != "cpu":
        torch.zeros(1, device=device)
    with _Peak() as peak:
        began = time.monotonic()
        if kind == "penstock":
            with patched_libraries() as report:
                modules = load(library, place, adapter, device)
        else:
            report, modules = "", load(library, place, adapter, device)
        total = sum(_sum(tensor) for module in modules for tensor in module.state_dict().values())
        seconds = time.monotonic() - began
    print(json.dumps({"seconds": seconds, "peak_mb": peak.megabytes, "total": total, "how": str(report)}))


def loop(library: str, root: str, device: str) -> None:
    """For each line of standard input, run once in a forked child: as fresh as a new process, without its imports."""
    warnings.simplefilter("ignore")
    import huggingface_hub.constants
    import torch

    from penstock_hf.patched_libraries.reading import StreamedFile

    _ = StreamedFile
    # By one thread: a forked process cannot use the threads of OpenMP that its parent has started.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    load(library, f"{root}/model", f"{root}/adapter", "cpu")
    for line in sys.stdin:
        kind, home, place, adapter = json.loads(line)
        pid = os.fork()
        if not pid:
            status = 1
            try:
                torch.set_num_threads(num_threads)
                huggingface_hub.constants.HF_HUB_CACHE = f"{home}/hub"
                run(library, kind, place, adapter, device)
                sys.stdout.flush()
                status = 0
            except Exception:  # noqa: BLE001 - the child ends here: it prints every error
                traceback.print_exc()
            finally:
                os._exit(status)
        if os.waitpid(pid, 0)[1]:
            raise SystemExit(f"{library}: a run of {kind} failed")


def _sum(tensor: Any) -> int:
    import torch

    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return int(flat[: len(flat) // 8 * 8].view(torch.int64).sum()) + int(flat[len(flat) // 8 * 8 :].sum())


class _Peak:
    """The most memory of this process in a block, above what it had before."""

    def __enter__(self) -> _Peak:
        self._before = self._most = _own_kb()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def megabytes(self) -> float:
        """The peak, in MB."""
        return round((self._most - self._before) * 1024 / 1e6, 1)

    def _look(self) -> None:
        while not self._over.wait(0.01):
            self._most = max(self._most, _own_kb())


def _own_kb() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))


def serve(root: Path) -> None:
    """Serve the models below `root` until standard input ends; print the address."""
    repositories = {
        f"org/{name}": {
            str(p.relative_to(root / name)): p.read_bytes() for p in (root / name).rglob("*") if p.is_file()
        }
        for name in ("model", "adapter")
        if (root / name).is_dir()
    }
    with HuggingFaceServer(repositories) as hub:
        print(hub.url, flush=True)
        sys.stdin.read()


def measure(library: str, gib: float, runs: int, device: str) -> list[dict[str, object]]:
    """Return the rows of one library."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        root = Path(scratch)
        command = [sys.executable, "-m", "benchmarks.bench_from_pretrained", "--gib", str(gib), "--device", device]
        offline = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
        subprocess.run([*command, "--make", library, scratch], check=True, timeout=1800, env=offline)
        server = subprocess.Popen([*command, "--serve", scratch], stdin=-1, stdout=-1, text=True)
        stop = threading.Timer(3600, server.kill)
        stop.start()
        assert server.stdin is not None and server.stdout is not None
        url = server.stdout.readline().strip()
        online = {"HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
        results: dict[tuple[str, str], list[dict[str, Any]]] = {}
        with _Runs(library, root, command, offline | online) as once:
            for turn in range(runs):
                for state in ("hub", "directory"):
                    for kind in ("penstock", "stock") if turn % 2 else ("stock", "penstock"):
                        places = (
                            ("org/model", "org/adapter") if state == "hub" else (f"{root}/model", f"{root}/adapter")
                        )
                        results.setdefault((state, kind), []).append(once(kind, *places))
        plain_s = [_plain(url, root) for _ in range(runs)]
        server.stdin.close()
        server.wait(60)
        stop.cancel()
        nbytes = sum(path.stat().st_size for path in root.glob("*/**/*.safetensors") if "bert" not in path.parts)
    if len({answer["total"] for answers in results.values() for answer in answers}) != 1:
        raise SystemExit(f"{library}: the runs loaded different bytes")
    rows: list[dict[str, object]] = []
    for (state, kind), answers in results.items():
        seconds = [answer["seconds"] for answer in answers]
        rows.append(
            {
                "row": f"{library}, {state}, {kind}",
                "device": device,
                "mb": round(nbytes / 1e6, 1),
                "median_s": round(statistics.median(seconds), 3),
                "spread_s": [round(min(seconds), 3), round(max(seconds), 3)],
                "peak_mb": max(answer["peak_mb"] for answer in answers),
                "n": len(answers),
                **({"plain_reads_s": round(statistics.median(plain_s), 3)} if state == "hub" else {}),
                "how": answers[-1]["how"],
            }
        )
    return rows


class _Runs:
    """Runs of one library, each in a process of its own: forked from one that has imported the library."""

    def __init__(self, library: str, root: Path, command: list[str], environ: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [*command, "--loop", library, str(root)],
            # Without it `torch.cuda.is_available` starts CUDA, which a forked process cannot use.
            env=environ | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
            stdin=-1,
            stdout=-1,
            text=True,
        )

    def __enter__(self) -> _Runs:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def __call__(self, kind: str, place: str, adapter: str) -> dict[str, Any]:
        """Return what one run says."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as home:
            print(json.dumps([kind, home, place, adapter]), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a run of {kind} failed; see above")
        print(f"{kind} {place}: {line.strip()}", file=sys.stderr, flush=True)
        return dict(json.loads(line))


def _plain(url: str, root: Path) -> float:
    """Return the seconds that one connection takes for all weights, read and thrown away."""
    import http.client
    import urllib.request

    began, buffer = time.monotonic(), bytearray(MIB)
    for name in ("model", "adapter"):
        for path in (root / name).rglob("*.safetensors"):
            answer: http.client.HTTPResponse = urllib.request.urlopen(
                f"{url}/org/{name}/resolve/main/{path.relative_to(root / name)}", timeout=60
            )
            with answer:
                while answer.readinto(buffer):
                    pass
    return time.monotonic() - began


def main() -> None:
    """Run the rows and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.5, help="size of the models of transformers, accelerate, PEFT")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--libraries", nargs="*", choices=LIBRARIES, default=LIBRARIES)
    parser.add_argument("--out", type=Path, help="directory: rows are appended to from_pretrained.jsonl")
    parser.add_argument("--make", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--loop", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make:
        make(args.make[0], Path(args.make[1]), args.gib)
    elif args.serve:
        serve(args.serve)
    elif args.loop:
        loop(*args.loop, args.device)
    else:
        for library in args.libraries:
            for row in measure(library, args.gib, args.runs, args.device):
                print(json.dumps(row), flush=True)
                if args.out:
                    with (args.out / "from_pretrained.jsonl").open("a") as file:
                        print(json.dumps(row), file=file)


if __name__ == "__main__":
    main()

"""One whole process of `bench_doors`: imports a library, loads a checkpoint, and prints what that cost as JSON.

    python -m benchmarks.door_worker '{"door": "load", "way": "penstock", "directory": "/models/llama", ...}'
    python -m benchmarks.door_worker --hold '{...}'       a weight cache, until standard input ends
    python -m benchmarks.door_worker --make LIBRARY DIRECTORY GIB

The clock starts before the first import of a way and ends when every page of every tensor was touched, or when the GPU
is synchronised. For a GPU, all ways first import torch and create the device's context, which takes seconds and is the
same for all, before the clock starts. The call is then repeated. The repetition is the move, and what the first call
took longer is the first use: opening, planning, the pool, kernels, new memory.
"""

import time

_STARTED = time.monotonic()

import gc  # noqa: E402 - the clock has started
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Callable, Iterable, Iterator, Mapping  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402


class Job(NamedTuple):
    """The description of one process."""

    door: str
    way: str
    directory: str
    """Directory of the checkpoint, or its name on the hub."""
    files: list[str]
    """Paths or URIs of the files with weights."""
    device: str
    began: float = 0.0
    """When the process was started, by the clock of `time.monotonic`."""
    adapter: str = ""
    """Place of the LoRA adapter."""


Load = Callable[[], Any]
"""The call of a door. It returns tensors by name, or modules, or None if another process has the weights."""


def _readable(job: Job) -> Iterator[str]:
    """Yield the files. The original cannot read a URI, so download the file for it. An open file outlives its name."""
    for path in job.files:
        if job.way == "penstock" or "://" not in path:
            yield path
            continue
        import urllib.request

        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
            yield urllib.request.urlretrieve(path, f"{directory}/model.safetensors")[0]


def _stock_load_file(job: Job) -> Load:
    import safetensors.torch

    def load() -> Any:
        # The function is looked up in each call, as most programs do.
        return [safetensors.torch.load_file(path, device=job.device) for path in _readable(job)]

    return load


def _installed_load_file(job: Job) -> Load:
    from penstock_hf.safetensors import install

    install()
    return _stock_load_file(job)


def _stock_safe_open(job: Job) -> Load:
    import safetensors
    import torch  # noqa: F401 - safetensors imports torch at the first tensor

    def load() -> Any:
        tensors: dict[str, Any] = {}
        for path in _readable(job):
            with safetensors.safe_open(path, framework="pt", device=job.device) as file:
                for name in file.keys():  # noqa: SIM118 - the file is no mapping
                    tensors[name] = file.get_tensor(name)
        return tensors

    return load


def _installed_safe_open(job: Job) -> Load:
    from penstock_hf.safetensors import install

    install()
    return _stock_safe_open(job)


def _penstock_safe_open(job: Job) -> Load:
    from penstock import safe_open

    def load() -> Any:
        tensors: dict[str, Any] = {}
        for path in job.files:
            with safe_open(path, framework="pt", device=job.device) as file:
                for name in file.keys():  # noqa: SIM118
                    tensors[name] = file.get_tensor(name)
        return tensors

    return load


def _penstock_load(job: Job, *, verify: bool | None = None) -> Load:
    from penstock import load

    return lambda: load(job.directory, job.device, verify=verify)


def _instanttensor(job: Job) -> Load:
    from instanttensor import safe_open

    def load() -> Any:
        with safe_open(job.files, framework="pt", device=job.device) as file:
            return dict(file.tensors())

    return load


def _fastsafetensors(job: Job) -> Load:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    def load() -> Any:
        loader = SafeTensorsFileLoader(SingleGroup(), device=job.device, nogds=True)
        loader.add_filenames({0: job.files})
        buffers = loader.copy_files_to_device()
        return {name: buffers.get_tensor(name) for name in buffers.key_to_rank_lidx}

    return load


class _Fetched(dict[str, Any]):
    """Fetched tensors, which this process serves to others until `close`."""

    def close(self) -> None:
        """Leave the fleet."""
        self.fleet.leave()

    def __init__(self, fleet: Any) -> None:
        super().__init__()
        self.fleet = fleet


def _fetch(job: Job) -> Load:
    import penstock

    join = penstock.join

    def load() -> Any:
        fetched = _Fetched(join("model"))
        fetched.fleet.fetch(fetched, device=job.device, timeout_s=60)
        return fetched

    return load


def _attach(job: Job) -> Load:
    from penstock.cache import attach

    return lambda: attach("model", timeout_s=60)


def _transformers(job: Job) -> Load:
    from transformers import LlamaForCausalLM

    return lambda: LlamaForCausalLM.from_pretrained(job.directory, device_map={"": job.device})


def _our_from_pretrained(job: Job) -> Load:
    from transformers import LlamaForCausalLM

    from penstock_hf.transformers import from_pretrained

    return lambda: from_pretrained(LlamaForCausalLM, job.directory, device_map={"": job.device}, progress=False)


def _accelerate(job: Job) -> Load:
    import accelerate
    import huggingface_hub
    import transformers

    def load() -> Any:
        directory = job.directory if os.path.isdir(job.directory) else huggingface_hub.snapshot_download(job.directory)
        config = transformers.AutoConfig.from_pretrained(directory)
        with accelerate.init_empty_weights():
            model = transformers.LlamaForCausalLM._from_config(config, dtype=config.dtype)
        return accelerate.load_checkpoint_and_dispatch(model, directory, device_map={"": job.device})

    return load


def _peft(job: Job) -> Load:
    from peft import PeftModel

    base = _transformers(job)
    # The device is named, or PEFT moves the model of a CPU to a GPU.
    return lambda: PeftModel.from_pretrained(base(), job.adapter, torch_device=job.device)


def _diffusers(job: Job) -> Load:
    from diffusers import StableDiffusionPipeline

    def load() -> Any:
        pipeline = StableDiffusionPipeline.from_pretrained(job.directory).to(job.device)
        return [pipeline.unet, pipeline.vae, pipeline.text_encoder]

    return load


def _sentence_transformers(job: Job) -> Load:
    from sentence_transformers import SentenceTransformer

    return lambda: SentenceTransformer(job.directory, device=job.device)


def _patched(prepare: Callable[[Job], Load]) -> Callable[[Job], Load]:
    """Return a way that makes the library's own call inside `patched_libraries()`."""

    def patched(job: Job) -> Load:
        stock = prepare(job)
        from penstock_hf.patched_libraries import patched_libraries

        def load() -> Any:
            with patched_libraries():
                return stock()

        return load

    return patched


def _runai(module: str) -> Callable[[Job], Load]:
    """Return a way that streams by Run:ai's names in a module."""

    def prepare(job: Job) -> Load:
        import importlib

        streamer_class = importlib.import_module(module).SafetensorsStreamer

        def load() -> Any:
            with streamer_class() as streamer:
                streamer.stream_files(job.files, device=job.device)
                return dict(streamer.get_tensors())

        return load

    return prepare


def _dcp(reader: Callable[[str], Any]) -> Callable[[Job], Load]:
    """Return a way that fills new tensors with `torch.distributed.checkpoint.load`."""

    def prepare(job: Job) -> Load:
        import torch
        import torch.distributed.checkpoint as dcp

        make = reader(job.directory)

        def load() -> Any:
            opened = make()
            metadata = opened.read_metadata().state_dict_metadata
            state = {
                name: torch.empty(item.size, dtype=item.properties.dtype, device=job.device)
                for name, item in metadata.items()
            }
            dcp.load(state, storage_reader=opened, no_dist=True)
            return state

        return load

    return prepare


def _torch_reader(directory: str) -> Any:
    from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageReader

    own = os.path.exists(f"{directory}/.metadata")
    return lambda: FileSystemReader(directory) if own else HuggingFaceStorageReader(directory)


def _penstock_reader(directory: str) -> Any:
    from penstock_dcp import CheckpointReader

    return lambda: CheckpointReader(directory)


def _vllm(load_format: str) -> Callable[[Job], Load]:
    """Return a way that starts vLLM in this process. vLLM's log says how long the weights took."""

    def prepare(job: Job) -> Load:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        options = {"enforce_eager": True, "max_model_len": 256, "dtype": "bfloat16", "gpu_memory_utilization": 0.5}
        engines: list[Any] = []
        return lambda: engines.append(
            LLM(model=job.directory, load_format=load_format, skip_tokenizer_init=True, **options)
        )

    return prepare


def _sglang(load_format: str) -> Callable[[Job], Load]:
    """Return a way that starts SGLang. The log of its scheduler says how long the weights took."""

    def prepare(job: Job) -> Load:
        from sglang import Engine

        options = {"disable_cuda_graph": True, "dtype": "bfloat16", "device": job.device.partition(":")[0]}
        engines: list[Any] = []
        return lambda: engines.append(
            Engine(model_path=job.directory, load_format=load_format, skip_tokenizer_init=True, **options)
        )

    return prepare


class Way(NamedTuple):
    """One way through a door."""

    prepare: Callable[[Job], Load]
    """Imports the library and returns the call."""
    packages: tuple[str, ...] = ()
    """Modules at the top level that must be installed."""
    devices: tuple[str, ...] = ("cpu", "cuda")


class Door(NamedTuple):
    """A way in which users load weights, by Penstock and by the original."""

    ways: Mapping[str, Way]
    """The first one is the reference, and the one named `penstock` is compared with it."""
    checkpoint: str = "model"
    """The files that the door needs; see `bench_doors.Places`."""
    states: tuple[str, ...] = ("kept", "new", "cold")
    engine_log: str = ""
    """Regular expression for the seconds that the weights took in an engine's log. Such a door is not repeated."""
    runs_program: bool = False
    """Whether the way `penstock` runs under `penstock run`. The clock then starts with the process."""


_ST = Way(_stock_load_file, ("safetensors",))
_LIBRARY_STATES = ("kept", "new", "cold", "hub")
_FILE_STATES = ("kept", "new", "cold", "volume", "http")
_PATCHED = {
    "transformers": (_transformers, ("transformers",), "model"),
    "accelerate": (_accelerate, ("accelerate", "transformers"), "model"),
    "peft": (_peft, ("peft", "transformers"), "peft"),
    "diffusers": (_diffusers, ("diffusers", "transformers"), "diffusers"),
    "sentence_transformers": (_sentence_transformers, ("sentence_transformers",), "sentence_transformers"),
}
DOORS: dict[str, Door] = {
    "load": Door(
        {
            "load_file": _ST,
            "penstock": Way(_penstock_load),
            "instanttensor": Way(_instanttensor, ("instanttensor",), ("cuda",)),
            "fastsafetensors": Way(_fastsafetensors, ("fastsafetensors",), ("cuda",)),
        },
        states=_FILE_STATES,
    ),
    "load, verified": Door(
        {
            "unverified": Way(lambda job: _penstock_load(job, verify=False)),
            "penstock": Way(lambda job: _penstock_load(job, verify=True)),
        },
        checkpoint="manifest",
    ),
    "fetch": Door({"load_file": _ST, "penstock": Way(_fetch)}, checkpoint="held", states=("kept", "new")),
    "cache.attach": Door({"load_file": _ST, "penstock": Way(_attach)}, checkpoint="held", states=("kept", "new")),
    "from_pretrained of penstock_hf": Door(
        {
            "transformers": Way(_transformers, ("transformers",)),
            "penstock": Way(_our_from_pretrained, ("transformers",)),
        },
        states=_LIBRARY_STATES,
    ),
    **{
        f"{name} in patched_libraries()": Door(
            {"stock": Way(stock, packages), "penstock": Way(_patched(stock), packages)},
            checkpoint=checkpoint,
            states=_LIBRARY_STATES,
        )
        for name, (stock, packages, checkpoint) in _PATCHED.items()
    },
    "load_file after install()": Door(
        {"stock": _ST, "penstock": Way(_installed_load_file, ("safetensors",))}, states=_FILE_STATES
    ),
    "load_file under penstock run": Door({"stock": _ST, "penstock": _ST}, runs_program=True),
    **{
        f"safe_open{words} after install()": Door(
            {
                "stock": Way(_stock_safe_open, ("safetensors",)),
                "penstock": Way(_installed_safe_open, ("safetensors",)),
            },
            checkpoint=checkpoint,
            states=states,
        )
        for words, checkpoint, states in (("", "model", _FILE_STATES), (" of 1,000 files", "files", ("kept", "cold")))
    },
    "penstock.safe_open": Door(
        {"stock": Way(_stock_safe_open, ("safetensors",)), "penstock": Way(_penstock_safe_open)}
    ),
    "Run:ai's names": Door(
        {
            "runai": Way(_runai("runai_model_streamer"), ("runai_model_streamer",)),
            "penstock": Way(_runai("penstock_hf.runai_streamer")),
        }
    ),
    "DCP, safetensors": Door({"torch": Way(_dcp(_torch_reader)), "penstock": Way(_dcp(_penstock_reader))}),
    "DCP, its own format": Door(
        {"torch": Way(_dcp(_torch_reader)), "penstock": Way(_dcp(_penstock_reader))}, checkpoint="dcp"
    ),
    "vLLM": Door(
        {
            "auto": Way(_vllm("auto"), ("vllm",)),
            "penstock": Way(_vllm("penstock"), ("vllm",)),
            "instanttensor": Way(_vllm("instanttensor"), ("vllm", "instanttensor"), ("cuda",)),
            "fastsafetensors": Way(_vllm("fastsafetensors"), ("vllm", "fastsafetensors"), ("cuda",)),
        },
        engine_log=r"Loading weights took ([\d.]+) s",
    ),
    "SGLang": Door(
        {"auto": Way(_sglang("auto"), ("sglang",)), "penstock": Way(_sglang("penstock"), ("sglang",))},
        engine_log=r"Load weight end\. elapsed=([\d.]+) s",
    ),
}


def tensors_of(loaded: Any) -> Iterable[Any]:
    """Yield the tensors that a door returned: a mapping, a module, or several of these."""
    if loaded is None:
        return
    if isinstance(loaded, Mapping):
        yield from loaded.values()
    elif isinstance(loaded, list):
        for one in loaded:
            yield from tensors_of(one)
    else:
        yield from loaded.state_dict().values()


def touch(loaded: Any, device: str) -> None:
    """Read one byte of each page of every tensor on the host, and wait for a GPU."""
    import torch

    if device != "cpu":
        torch.cuda.synchronize()
        return
    for tensor in tensors_of(loaded):
        tensor.detach().reshape(-1).view(torch.uint8)[::4096].sum()


def sum_of(loaded: Any) -> int:
    """Return the sum over all bytes of all tensors, as 64-bit words."""
    import torch

    total = 0
    for tensor in tensors_of(loaded):
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        words = len(flat) // 8 * 8
        total += int(flat[:words].view(torch.int64).sum()) + int(flat[words:].sum())
    return total


def status_bytes(*fields: str) -> int:
    """Return the sum of fields of this process's status, such as `VmHWM`."""
    with open("/proc/self/status", encoding="utf-8") as status:
        return sum(int(line.split()[1]) << 10 for line in status if line.split(":")[0] in fields)


def measure(job: Job) -> dict[str, Any]:
    """Go through a door once, and once more; return seconds and bytes."""
    door = DOORS[job.door]
    began = time.monotonic()
    if job.device != "cpu" and not door.engine_log:
        import torch

        torch.zeros(1, device=job.device)
        torch.cuda.synchronize()
    context_s = time.monotonic() - began
    began, before_s = time.monotonic(), time.process_time()
    load = door.ways[job.way].prepare(job)
    imported, imported_s = time.monotonic(), time.process_time()
    loaded = load()
    touch(loaded, job.device)
    ended = time.monotonic()
    answer = {
        "imports_processor_s": imported_s - before_s,
        "call_processor_s": time.process_time() - imported_s,
        "context_s": context_s,
        "start_s": _STARTED - job.began,
        "imports_s": imported - began,
        "call_s": ended - imported,
        "peak_bytes": status_bytes("VmHWM"),
        "own_bytes": status_bytes("RssAnon", "RssShmem"),
        "sum": sum_of(loaded),
    }
    if not door.engine_log:
        if hasattr(loaded, "close"):
            loaded.close()
        del loaded
        gc.collect()
        began = time.monotonic()
        touch(load(), job.device)
        answer["again_s"] = time.monotonic() - began
    return answer


def limit(job: Job) -> dict[str, Any]:
    """Read the files into new memory with plain reads, or for a GPU copy as many pinned bytes; return the seconds."""
    nbytes = sum(os.path.getsize(path) for path in job.files)
    if job.device != "cpu":
        from benchmarks.load.limits import GB, h2d

        return {"call_s": nbytes / (h2d(job.device) * GB)}
    import mmap
    from concurrent.futures import ThreadPoolExecutor

    def read(path: str) -> mmap.mmap:
        with open(path, "rb", buffering=0) as file:
            memory = mmap.mmap(-1, os.path.getsize(path))
            view, at = memoryview(memory), 0
            while got := file.readinto(view[at:]):
                at += got
            return memory

    began = time.monotonic()
    with ThreadPoolExecutor(min(len(job.files), os.cpu_count() or 1)) as pool:
        memories = list(pool.map(read, job.files))
    return {"call_s": time.monotonic() - began, "nbytes": sum(map(len, memories))}


def hold(job: Job) -> None:
    """Keep the checkpoint in a weight cache until standard input ends."""
    from penstock.cache import WeightCache

    nbytes = sum(os.path.getsize(path) for path in job.files)
    cache = WeightCache(device=job.device, memory_bytes=nbytes * 5 // 4).open()
    try:
        cache.keep("model", job.directory)
        print("held", flush=True)
        sys.stdin.read()
    finally:
        cache.leave()


def make(library: str, root: str, gib: float) -> None:
    """Save a model of random weights below `root`. Only the size of a Llama, and of its adapter, can be chosen."""
    import torch

    if library in {"model", "small", "files"}:
        from pathlib import Path

        from tests.support.moe import write_moe

        from penstock.testing.checkpoints import write_llama

        if library == "small":
            write_moe(Path(root, "small"), num_tensors=int(gib), tensor_bytes=4096, shards=1)
        elif library == "files":
            write_moe(Path(root, "files"), num_tensors=1000, tensor_bytes=4096, shards=1000)
        else:
            write_llama(f"{root}/model", total_bytes=int(gib * (1 << 30)), fp8=False, shards=4)
        return
    torch.manual_seed(0)
    if library == "dcp":
        import torch.distributed.checkpoint as dcp
        from safetensors.torch import load_file

        state = {}
        for name in sorted(os.listdir(f"{root}/model")):
            if name.endswith(".safetensors"):
                state.update(load_file(f"{root}/model/{name}"))
        dcp.save(state, checkpoint_id=f"{root}/dcp", no_dist=True)
    elif library == "peft":
        import peft
        import transformers

        config = transformers.AutoConfig.from_pretrained(f"{root}/model")
        with torch.device("meta"):
            base = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        lora = peft.LoraConfig(r=64, target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(base, lora)
        for parameter in model.parameters():
            if parameter.requires_grad:
                module, _, name = next(k for k, v in model.named_parameters() if v is parameter).rpartition(".")
                setattr(model.get_submodule(module), name, torch.nn.Parameter(torch.randn(parameter.shape)))
        model.save_pretrained(f"{root}/adapter")
    elif library == "diffusers":
        _make_diffusers(root)
    elif library == "sentence_transformers":
        _make_sentence_transformers(root)


def _make_diffusers(root: str) -> None:
    import diffusers
    import transformers

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
    words = f"{root}/words"
    os.mkdir(words)
    with open(f"{words}/vocab.json", "w", encoding="utf-8") as file:
        json.dump({"<|startoftext|>": 0, "<|endoftext|>": 1, "a</w>": 2}, file)
    with open(f"{words}/merges.txt", "w", encoding="utf-8") as file:
        file.write("#version: 0.2\n")
    diffusers.StableDiffusionPipeline(
        vae=vae,
        text_encoder=text,
        tokenizer=transformers.CLIPTokenizer.from_pretrained(words),
        unet=unet,
        scheduler=diffusers.DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(f"{root}/diffusers")


def _make_sentence_transformers(root: str) -> None:
    import sentence_transformers
    import transformers

    bert = f"{root}/bert"
    config = transformers.BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12)
    transformers.BertModel(config).save_pretrained(bert)
    with open(f"{bert}/vocab.txt", "w", encoding="utf-8") as file:
        file.write("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]))
    transformers.BertTokenizer.from_pretrained(bert).save_pretrained(bert)
    modules = sentence_transformers.sentence_transformer.modules
    parts = [modules.Transformer(bert), modules.Pooling(384)]
    sentence_transformers.SentenceTransformer(modules=parts).save_pretrained(f"{root}/sentence_transformers")


def main(arguments: list[str]) -> None:
    """Do what the arguments say; print one line of JSON."""
    if arguments[0] == "--make":
        make(arguments[1], arguments[2], float(arguments[3]))
    elif arguments[0] == "--hold":
        hold(Job(**json.loads(arguments[1])))
    else:
        job = Job(**json.loads(arguments[0]))
        print(json.dumps(limit(job) if job.door == "limit" else measure(job)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

#!/usr/bin/env bash
# Run the tests of SGLang's plugin in an environment of their own (about 2 GB), built on first use: the wheel of SGLang
# without its dependencies, which are for CUDA, and the light ones that its loaders import on a CPU.
#   scripts/test_sglang.sh [pytest arguments]      PENSTOCK_SGLANG_VENV=DIR puts the environment elsewhere
set -euo pipefail
cd "$(dirname "$0")/.."

venv="${PENSTOCK_SGLANG_VENV:-.venv-sglang}"
sglang="sglang==0.5.23"
. scripts/environment.sh

build() {
    if ! install --no-deps "$sglang"; then
        echo "$sglang does not install here: its tests are skipped" >&2
        exit 0
    fi
    install_torch
    install -c constraints.txt $(workspace torch,hub,hf,dev) aiohttp apache-tvm-ffi==0.1.11 dill einops gguf ipython \
        modelscope openai==3.54.0 orjson partial-json-parser==0.2.1.1.post7 pillow psutil pybase64 python-multipart \
        pyzmq requests sentencepiece==0.2.3 setproctitle soundfile==0.14.0 tqdm uvloop xgrammar==0.2.7
    # transformers and SGLang import torchvision, whose wheels are for CUDA; without them its operators do not exist,
    # and this file of it refuses to be imported.
    install --no-deps torchvision==0.29.2
    : > "$("$venv/bin/python" -c 'import importlib.util as u; print(u.find_spec("torchvision").submodule_search_locations[0])')/_meta_registrations.py"
}
build_once "$sglang $torch 2" build

# Nothing is compiled when it is installed: what one process compiles the next must find.
unset PYTHONDONTWRITEBYTECODE
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 SGLANG_USE_CPU_ENGINE=1
exec "$venv/bin/python" -m pytest -m engines tests/engines/test_sglang*.py \
    tests/engines/test_future_releases.py "$@"

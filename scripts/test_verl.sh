#!/usr/bin/env bash
# Run the tests of verl's checkpoint engine in an environment of their own, built on first use: verl's released wheel
# and what its import needs, over the packages of the engine tests (vLLM's CPU build, transformers, Ray), whose
# environment scripts/test_engines.sh has built before.
#   scripts/test_verl.sh [pytest arguments]      PENSTOCK_VERL_VENV=DIR puts the environment elsewhere
set -euo pipefail
cd "$(dirname "$0")/.."

venv="${PENSTOCK_VERL_VENV:-.venv-verl}"
engines="${PENSTOCK_ENGINES_VENV:-.venv-engines}"
verl="verl==0.9.1"
# The release that verl names; a later one has no value head where verl looks for it.
trl="trl==0.27.0"
# What verl's trainer keeps samples in, and reads prompts with; the rest of verl's tests do without.
trainer="TransferQueue==0.1.11 torchdata==0.11.0"
# The packages of that environment are for its own release of Python.
PYTHON="$engines/bin/python"
. scripts/environment.sh

build() {
    site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    "$engines/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/engines.pth"
    if ! install --no-deps "$verl"; then
        echo "$verl does not install here: its tests are skipped" >&2
        exit 0
    fi
    install --no-deps "$trl" tensordict==0.10.0 pyvers importlib_metadata orjson codetiming hydra-core omegaconf \
        antlr4-python3-runtime==4.9.3
    # shellcheck disable=SC2086
    install --no-deps $trainer
    # Wheels of both kinds bring a package named `tests`, which would hide ours.
    rm -rf "$site/tests"
    install --no-deps $(workspace torch)
    # verl asks for the version of the package `vllm`, and vLLM's build for the CPU has another name.
    mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$site/vllm-0.32.0+cpu.dist-info/METADATA"
}
if [ ! -f "$engines/.ready" ]; then
    echo "verl's tests use the environment of scripts/test_engines.sh, which is not there: they are skipped" >&2
    exit 0
fi
build_once "$verl $trl $trainer 2" build

unset PYTHONDONTWRITEBYTECODE
export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0
exec "$venv/bin/python" -m pytest -m engines tests/engines/test_verl.py "$@"

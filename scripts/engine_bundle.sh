#!/usr/bin/env bash
# Carry an inference engine to a machine that has a GPU and no package registry.
#
#   scripts/engine_bundle.sh pack ENGINE DIRECTORY      write the wheels of an engine in parts of PART_MB (50)
#   scripts/engine_bundle.sh unpack ENGINE DIRECTORY    make the environment DIRECTORY/ENGINE from the parts
#
# ENGINE is vllm (0.33), vllm-old (0.26) or sglang (0.5.23). scripts/engine_wheels has the lists of wheels. vllm and sglang
# share the parts `torch.*`: `pack` writes these parts if DIRECTORY does not have them, and `unpack` installs them once.
# The other machine has Python 3.12, torch 2.11 for CUDA 13, transformers and pytest. The environment finds these
# packages, and this tree's Penstock. Then run, for example, DIRECTORY/vllm/bin/python -m pytest tests/gpu/engines.
set -euo pipefail

usage() {
    sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
    exit 2
}
[ $# = 3 ] || usage
verb="$1" engine="$2" directory="$(mkdir -p "$3" && cd "$3" && pwd)"
root="$(cd "$(dirname "$0")/.." && pwd)"
part_mb="${PART_MB:-50}"
case "$engine" in
    vllm | sglang) layers=(torch "$engine") ;;
    vllm-old) layers=("$engine") ;;
    *) usage ;;
esac

# Download wheels for Python 3.12 on x86-64, whatever this machine is: download INTO REQUIREMENTS
download() {
    local tag platforms=()
    for tag in 2_5 2_12 2_17 2_18 2_24 2_26 2_27 2_28 2_31 2_34 2_35; do
        platforms+=(--platform "manylinux_${tag}_x86_64")
    done
    "${PYTHON:-python3}" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d "$1" -r "$2"
}

pack_layer() {
    local layer="$1" work
    if [ -f "$directory/$layer.sha256" ]; then
        echo "$layer: the parts are there" >&2
        return
    fi
    work="$(mktemp -d "$directory/.$layer.XXXX")"
    download "$work/wheels" "$root/scripts/engine_wheels/$layer.txt"
    "${PYTHON:-python3}" "$root/scripts/engine_wheels/wheels.py" prune "$work/wheels"
    tar cf - -C "$work/wheels" . | split -b "${part_mb}000000" -d -a 2 - "$directory/$layer.part."
    (cd "$directory" && sha256sum "$layer".part.*) > "$work/sums"
    mv "$work/sums" "$directory/$layer.sha256"
    rm -rf "$work"
}

unpack_layer() {
    local layer="$1" into="$2" work
    (cd "$directory" && sha256sum --quiet -c "$layer.sha256") || {
        echo "$layer: a part is missing or damaged: copy the parts to $directory again" >&2
        exit 1
    }
    work="$(mktemp -d "$directory/.$layer.XXXX")"
    cat "$directory/$layer".part.* | tar xf - -C "$work"
    "${PYTHON:-python3}" "$root/scripts/engine_wheels/wheels.py" install "$work" "$into"
    rm -rf "$work"
}

case "$verb" in
    pack)
        for layer in "${layers[@]}"; do pack_layer "$layer"; done
        du -ch --apparent-size "$directory"/*.part.* | tail -1
        ;;
    unpack)
        "${PYTHON:-python3}" -m venv --without-pip --clear "$directory/$engine"
        site="$(echo "$directory/$engine"/lib/python3*/site-packages)"
        unpack_layer "$engine" "$site"
        torch=""
        if [ "${layers[0]}" = torch ]; then
            torch="$directory/torch"
            [ -f "$torch/.ready" ] || unpack_layer torch "$torch"
            touch "$torch/.ready"
        fi
        "${PYTHON:-python3}" "$root/scripts/engine_wheels/wheels.py" link "$site" "$root" ${torch:+"$torch"}
        echo "$directory/$engine/bin/python"
        ;;
    *) usage ;;
esac

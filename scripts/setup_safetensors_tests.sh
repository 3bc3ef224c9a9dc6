#!/usr/bin/env bash
# The tests of safetensors itself, from its source distribution, under .cache/: they are run with Penstock under it.
# Idempotent: does nothing when the pinned version is there. Usage: [PYTHON=python3] scripts/setup_safetensors_tests.sh
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
version=0.8.0
# Of safetensors-0.8.0.tar.gz on PyPI.
sha256=fabaf3e0f18a6618d9b36560682562157f77c2b71fcffc7b432be2baed9d753d
target=.cache/safetensors-tests
if [ "$(cat "$target/pin" 2>/dev/null)" = "$sha256" ]; then exit 0; fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# pip asks the package's build backend for its metadata, which takes maturin and a Rust compiler. Nothing is built here:
# a stand-in answers with the name and the version.
mkdir "$work/stand-in"
cat >"$work/stand-in/maturin.py" <<END
import os

def get_requires_for_build_wheel(config_settings=None):
    return []

def prepare_metadata_for_build_wheel(directory, config_settings=None):
    name = "safetensors-$version.dist-info"
    os.makedirs(os.path.join(directory, name))
    with open(os.path.join(directory, name, "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\nName: safetensors\nVersion: $version\n")
    return name
END
PYTHONPATH="$work/stand-in" "$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	--no-binary safetensors --dest "$work" "safetensors==$version"
echo "$sha256  $work/safetensors-$version.tar.gz" | sha256sum --check --quiet
rm -rf "$target"
mkdir -p "$target"
tar -xzf "$work/safetensors-$version.tar.gz" -C "$target" --strip-components=3 "safetensors-$version/bindings/python/tests"
echo "$sha256" >"$target/pin"

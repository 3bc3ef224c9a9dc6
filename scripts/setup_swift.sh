#!/usr/bin/env bash
# OpenStack Swift with its S3 interface, in an environment of its own under .cache/: a real S3 server for the tests.
# Idempotent: does nothing when the pinned versions are there. Usage: [PYTHON=python3] scripts/setup_swift.sh
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=.cache/swift
pins="swift==2.38.3 pyeclib==1.8.0"
if [ "$(cat "$venv/pins" 2>/dev/null)" = "$pins" ]; then exit 0; fi
rm -rf "$venv"
"$python" -m venv "$venv"
# shellcheck disable=SC2086
"$python" scripts/install.py "$venv" $pins
"$venv/bin/python" -c 'import swift, pyeclib.ec_iface'
echo "$pins" >"$venv/pins"

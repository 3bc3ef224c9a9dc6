#!/usr/bin/env bash
# Redis from Debian's or Ubuntu's package: the store of several hubs, for the tests. Idempotent.
# Where it cannot be installed (no root, no apt, no network) it says why and exits 1; the tests that need it skip.
set -euo pipefail
if command -v redis-server >/dev/null; then exit 0; fi
if [ "$(id -u)" != 0 ]; then echo "redis-server is not installed, and only root can install it" >&2; exit 1; fi
if ! command -v apt-get >/dev/null; then echo "redis-server is not installed, and there is no apt-get" >&2; exit 1; fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >/dev/null
apt-get install -y -qq --no-install-recommends redis-server >/dev/null
if ! command -v redis-server >/dev/null; then echo "redis-server is still missing after apt-get install" >&2; exit 1; fi

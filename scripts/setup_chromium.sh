#!/usr/bin/env bash
# Chromium and its driver from Debian's or Ubuntu's packages: the browser of the fleet page's tests. Idempotent.
# If it cannot be installed (no root, no apt, no network) it says why and exits 1; the tests that need it skip.
set -euo pipefail
if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then exit 0; fi
if [ "$(id -u)" != 0 ]; then echo "chromium is not installed, and only root can install it" >&2; exit 1; fi
if ! command -v apt-get >/dev/null; then echo "chromium is not installed, and there is no apt-get" >&2; exit 1; fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >/dev/null
apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null
if ! command -v chromedriver >/dev/null; then echo "chromedriver is still missing after apt-get install" >&2; exit 1; fi

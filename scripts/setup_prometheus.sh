#!/usr/bin/env bash
# Prometheus and promtool from Debian's or Ubuntu's package: the judge of metrics, dashboard and alerts. Idempotent.
# If they cannot be installed (no root, no apt, no network) it says why and exits 1; the tests that need them skip.
set -euo pipefail
if command -v prometheus >/dev/null && command -v promtool >/dev/null; then exit 0; fi
if [ "$(id -u)" != 0 ]; then echo "prometheus is not installed, and only root can install it" >&2; exit 1; fi
if ! command -v apt-get >/dev/null; then echo "prometheus is not installed, and there is no apt-get" >&2; exit 1; fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >/dev/null
apt-get install -y -qq --no-install-recommends prometheus >/dev/null
if ! command -v promtool >/dev/null; then echo "promtool is still missing after apt-get install" >&2; exit 1; fi

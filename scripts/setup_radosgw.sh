#!/usr/bin/env bash
# Ceph's object gateway from Debian's or Ubuntu's packages: a second real S3 server for the tests. Idempotent.
# Where it cannot be installed (no root, no apt, no network) it says why and exits 1; the tests that need it skip.
set -euo pipefail
needed="ceph-mon ceph-mgr ceph-osd radosgw radosgw-admin ceph-authtool monmaptool"
missing() {
  for program in $needed; do
    command -v "$program" >/dev/null || { echo "$program"; return; }
  done
}
if [ -z "$(missing)" ]; then exit 0; fi
if [ "$(id -u)" != 0 ]; then echo "radosgw is not installed, and only root can install it" >&2; exit 1; fi
if ! command -v apt-get >/dev/null; then echo "radosgw is not installed, and there is no apt-get" >&2; exit 1; fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >/dev/null
apt-get install -y -qq --no-install-recommends ceph-mon ceph-mgr ceph-osd radosgw ceph-common >/dev/null
if [ -n "$(missing)" ]; then echo "$(missing) is still missing after apt-get install" >&2; exit 1; fi

#!/bin/sh
# The browser tests need Chromium, network tests iproute2, the store is also tested on PostgreSQL, and launches on a real Slurm.
# Installs them where it may; without them those tests are skipped, and say so.
set -u
missing=""
chromium=""
for name in chromium-headless-shell chromium google-chrome; do
    command -v "$name" >/dev/null 2>&1 && chromium="$name"
done
[ -n "$chromium" ] || missing="$missing chromium-headless-shell"
command -v tc >/dev/null 2>&1 || missing="$missing iproute2"
ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || command -v initdb >/dev/null 2>&1 || missing="$missing postgresql"
command -v slurmctld >/dev/null 2>&1 && command -v slurmd >/dev/null 2>&1 && command -v sbatch >/dev/null 2>&1 ||
    missing="$missing slurmctld slurmd slurm-client"
[ -z "$missing" ] && exit 0
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing$missing"
    # shellcheck disable=SC2086
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing; } \
        >/dev/null || echo "could not install$missing: their tests will be skipped"
else
    echo "not root or no apt-get: without$missing the tests that need them will be skipped"
fi
exit 0

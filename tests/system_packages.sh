#!/bin/sh
# Installs what tests need besides Python, where it may; without it those tests are skipped, and say so.
# Arguments: any of chromium (browser), iproute2 (testbed), postgresql (the store), slurm (launches).
set -u
missing=""
for need in "$@"; do
    case "$need" in
    chromium)
        command -v chromium-headless-shell >/dev/null 2>&1 || command -v chromium >/dev/null 2>&1 ||
            command -v google-chrome >/dev/null 2>&1 || missing="$missing chromium-headless-shell" ;;
    iproute2)
        command -v tc >/dev/null 2>&1 || missing="$missing iproute2" ;;
    postgresql)
        ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || command -v initdb >/dev/null 2>&1 ||
            missing="$missing postgresql" ;;
    slurm)
        command -v slurmctld >/dev/null 2>&1 && command -v slurmd >/dev/null 2>&1 && command -v sbatch >/dev/null 2>&1 ||
            missing="$missing slurmctld slurmd slurm-client" ;;
    *)
        echo "system_packages.sh knows no $need"
        exit 2 ;;
    esac
done
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

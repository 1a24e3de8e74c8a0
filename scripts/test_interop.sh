#!/usr/bin/env bash
# Run the tests with programs of other makers, each in an environment of its own, as their packages exclude each other:
# `scripts/test_interop.sh [MAKER…]`. tests/interop/MAKER/packages.txt has the pinned packages of a maker, and
# tests/interop/MAKER/test_*.py its tests. PYTHON names the interpreter. Environments are kept in build/interop.
set -euo pipefail
cd "$(dirname "$0")/.."

makers=("$@")
[ ${#makers[@]} -gt 0 ] || makers=($(cd tests/interop && ls -d */ | tr -d / | grep -v __pycache__))
python3 -m venv build/interop/tools
build/interop/tools/bin/python -m pip install --quiet --disable-pip-version-check uv
uv() { build/interop/tools/bin/uv --quiet "$@"; }
for maker in "${makers[@]}"; do
    folder=build/interop/$maker
    if [ ! -e "$folder/.complete" ] || [ "tests/interop/$maker/packages.txt" -nt "$folder/.complete" ]; then
        uv venv --clear --python "${PYTHON:-python3}" "$folder"
        uv pip install --python "$folder" --editable . pytest pytest-timeout pytest-xdist \
            --requirements "tests/interop/$maker/packages.txt" "torch==$(sed -n 's/^torch==//p' constraints.txt)"
        touch "$folder/.complete"
    fi
    # Warnings of other programs are theirs.
    "$folder/bin/python" -m pytest -o filterwarnings=default "tests/interop/$maker"
done

#!/usr/bin/env bash
# Run the fast tests in an environment of its own, with the oldest or the newest version of every dependency:
# `scripts/test_range.sh lowest|newest [PYTEST_ARGUMENTS]`. PYTHON names the interpreter, TORCH another torch (2.13.0).
# Tools of the tests are the newest that fit; transformers and accelerate are left out where the range does not fit them.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly extras=datasets,hdf5,http,parquet,plot,s3,sentencepiece,trackio,wandb
readonly tools=(pytest pytest-timeout pytest-xdist hypothesis jsonschema import-linter 'moto[s3,server]' 'setuptools<82')
readonly end=${1:?usage: scripts/test_range.sh lowest|newest}
shift
case $end in
    lowest) resolution=lowest-direct ;;
    newest) resolution=highest ;;
    *) printf 'scripts/test_range.sh: %s must be lowest or newest\n' "$end" >&2 && exit 2 ;;
esac

readonly folder=build/range/$end
python3 -m venv build/range/tools
build/range/tools/bin/python -m pip install --quiet --disable-pip-version-check uv
uv() { build/range/tools/bin/uv --quiet "$@"; }
uv venv --clear --python "${PYTHON:-python3}" "$folder"
uv pip install --python "$folder" --resolution "$resolution" --editable ".[$extras]" ${TORCH:+"torch==$TORCH"}
uv pip install --python "$folder" "${tools[@]}"
[ "$end" = lowest ] || uv pip install --python "$folder" 'transformers>=5' accelerate
uv pip list --python "$folder" --format freeze >"$folder/versions.txt"
printf 'make test-%s: %s packages, listed in %s\n' "$end" "$(wc -l <"$folder/versions.txt")" "$folder/versions.txt"
"$folder/bin/python" -m pytest -n 3 --dist loadfile tests/unit tests/fake "$@"

#!/usr/bin/env bash
# Run the fast tests in an environment of its own, with the oldest or the newest version of every dependency:
# `scripts/test_range.sh lowest|newest [PYTEST_ARGUMENTS]`. PYTHON names the interpreter, TORCH another torch.
# The tests' own tools are the newest that fit. transformers, which brings a newer huggingface_hub, comes for the second
# part of the tests. Counts of function calls at a command's start are those of constraints.txt, and are not compared.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly extras=completion,datasets,hdf5,http,mlflow,pandas,parquet,plot,s3,sentencepiece,tasks,trackio,wandb
readonly tools=(pytest pytest-timeout pytest-xdist hypothesis jsonschema import-linter 'moto[s3,server]' 'setuptools<82' 'pyparsing<3.3')
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
uv pip list --python "$folder" --format freeze >"$folder/versions.txt"
printf 'make test-%s: %s packages, listed in %s\n' "$end" "$(wc -l <"$folder/versions.txt")" "$folder/versions.txt"
pytest() { "$folder/bin/python" -m pytest -n 3 --dist loadfile -k "not test_a_command_starts_with_little" "$@"; }
pytest tests/unit/base/test_hub.py tests/unit/config/test_load.py tests/unit/data/reading "$@"
uv pip install --python "$folder" 'transformers>=5' accelerate
pytest tests/unit tests/fake "$@"

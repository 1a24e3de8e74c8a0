#!/usr/bin/env bash
# mlflow-skinny 3.17.2: its default tracking store, sqlite:///mlflow.db, is one that the package cannot open (no sqlalchemy),
# and a folder of files is refused unless MLFLOW_ALLOW_FILE_STORE is set. So a program that only logs needs a server.
# Expected: the default records in the working folder, as mlruns did. Seen: UnsupportedModelRegistryStoreURIException for the
# default, MlflowException ("maintenance mode") for file:, and no error for file: with the variable.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q mlflow-skinny==3.17.2
unset MLFLOW_TRACKING_URI MLFLOW_ALLOW_FILE_STORE
cat > "$work/ask.py" <<'PY'
import mlflow

try:
    mlflow.MlflowClient().create_experiment("x")
    print("recorded")
except Exception as error:
    print(type(error).__name__)
PY
cd "$work"
found="$("$work/venv/bin/python" ask.py 2>/dev/null)"
found+=" $(MLFLOW_TRACKING_URI="file:$work/store" "$work/venv/bin/python" ask.py 2>/dev/null)"
found+=" $(MLFLOW_TRACKING_URI="file:$work/store" MLFLOW_ALLOW_FILE_STORE=true "$work/venv/bin/python" ask.py 2>/dev/null)"
echo "$found"
[ "$found" = "UnsupportedModelRegistryStoreURIException MlflowException recorded" ]

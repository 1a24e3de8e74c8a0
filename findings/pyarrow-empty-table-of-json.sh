#!/usr/bin/env bash
# Guess: Schema.empty_table() of pyarrow makes a table without rows of any schema that a table has.
# Seen in pyarrow 26.0.1: not where a list or a struct holds an extension type, such as the JSON in which the library datasets
# and DuckDB store values of several types: ArrowNotImplementedError "extension", which names no column. Such a column of its
# own is fine, and so is Table.from_batches([], schema). A program that looks at the columns of a parquet file by an empty
# table of its schema cannot open the file for a column that it does not read.
#   json: ok; list of json, struct of json, list of uuid: ArrowNotImplementedError
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q pyarrow==26.0.1
cat > "$folder/try.py" <<'PY'
import pyarrow as pa

types = {
    "json": pa.json_(),
    "list of json": pa.list_(pa.json_()),
    "struct of json": pa.struct([("meta", pa.json_())]),
    "list of uuid": pa.list_(pa.uuid()),
}
found: dict[str, list[str]] = {}
for name, type_ in types.items():
    schema = pa.schema([("text", pa.string()), ("more", type_)])
    assert pa.Table.from_batches([], schema).schema == schema
    try:
        schema.empty_table()
        result = "ok"
    except pa.ArrowException as error:
        result = type(error).__name__
    found.setdefault(result, []).append(name)
print("; ".join(f"{', '.join(names)}: {result}" for result, names in found.items()))
assert found == {"ok": ["json"], "ArrowNotImplementedError": [*types][1:]}, "this has changed"
PY
"$folder/venv/bin/python" "$folder/try.py"

#!/usr/bin/env bash
# Guess: lzma.open reads all streams of a file, as it does for `cat a.xz b.xz`, also where zeros stand between them, which
# the format allows ("Stream Padding", in multiples of 4), as gzip.open does.
# Seen in Python 3.10.13, 3.11.7, 3.12.1 and 3.13.0: the streams behind the zeros are left out without an error. Whoever
# reads JSON lines of such a file trains on a part. `xz -d` reads them all.
#   xz: 2000 of 2000 lines; xz, padded: 1000 of 2000 lines; gzip, padded: 2000 of 2000 lines
# PYTHON names an interpreter, such as python==3.11.7 (default: python3). Its own modules are used, and nothing is installed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/run.py" <<'PY'
import gzip
import lzma
import sys
from pathlib import Path

assert sys.version_info[:2] in {(3, 10), (3, 11), (3, 12), (3, 13)}, sys.version
half = b"".join(b'{"text": "line %d"}\n' % number for number in range(1000))


def lines(module, between):
    Path("packed").write_bytes(module.compress(half) + between + module.compress(half))
    with module.open("packed") as file:
        return sum(1 for _ in file)


found = {
    "xz": lines(lzma, b""),
    "xz, padded": lines(lzma, bytes(8)),
    "gzip, padded": lines(gzip, bytes(8)),
}
print("; ".join(f"{name}: {count} of 2000 lines" for name, count in found.items()))
assert [*found.values()] == [2000, 1000, 2000], "this has changed"
PY
cd "$work" && "${PYTHON:-python3}" run.py

#!/usr/bin/env bash
# Guess: lzma.open and bz2.open read all streams of a file, as they do for `cat a.xz b.xz`, or raise where one is damaged.
# Seen in Python 3.10.13, 3.11.7, 3.12.1 and 3.13.0: the second stream is left out without an error where its begin is damaged, and where zeros
# stand between two streams of xz, which the format allows ("Stream Padding", in multiples of 4). Whoever reads JSON lines
# of several streams (pbzip2, lbzip2 and pxz make such files) trains on a part. `xz -t` and gzip.open tell the damage.
#   xz, padded: 1000 of 2000 lines; xz, damaged: 1000 of 2000 lines; bz2, damaged: 1000 of 2000 lines
#   gzip, padded: 2000 of 2000 lines; gzip, damaged: BadGzipFile
# PYTHON names an interpreter (default: python3).
set -euo pipefail
"${PYTHON:-python3}" - <<'PY'
import bz2
import gzip
import io
import lzma
import sys

half = b"".join(b'{"text": "line %d"}\n' % number for number in range(1000))


def read(module, between, damaged):
    stream = module.compress(half)
    second = stream[:8] + bytes([stream[8] ^ 255]) + stream[9:] if damaged else stream
    if module is gzip and damaged:
        second = stream[:2] + bytes([stream[2] ^ 255]) + stream[3:]
    try:
        with module.open(io.BytesIO(stream + between + second)) as file:
            return f"{sum(1 for _ in file)} of 2000 lines"
    except (OSError, lzma.LZMAError) as error:
        return type(error).__name__


found = {
    "xz": read(lzma, b"", False),
    "xz, padded": read(lzma, bytes(8), False),
    "xz, damaged": read(lzma, b"", True),
    "bz2, damaged": read(bz2, b"", True),
    "gzip, padded": read(gzip, bytes(8), False),
    "gzip, damaged": read(gzip, b"", True),
}
print(sys.version.split()[0], "; ".join(f"{name}: {seen}" for name, seen in found.items()))
whole, part = "2000 of 2000 lines", "1000 of 2000 lines"
wanted = [whole, part, part, part, whole, "BadGzipFile"]
assert [*found.values()] == wanted, "this has changed"
PY

#!/usr/bin/env bash
# tensorboard 2.21.0 with tensorboard-data-server 0.7.2 (its default reader): a SessionLog START at step S, by which a resumed
# training says that all points from S on are undone, removes them in the Python reader alone (--load_fast=false). The data
# server removes a point only where the same tag gets another at or before its step. So evaluations of the undone steps stay.
# Expected: both readers show eval/loss at steps 4 and 10. Seen: --load_fast=true 4, 8, 10; --load_fast=false 4, 10.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q tensorboard==2.21.0 tensorboard-data-server==0.7.2 "setuptools<81"
cat > "$work/ask.py" <<'PY'
import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

work, programs = Path(sys.argv[1]), Path(sys.executable).parent


def write(name, first, points):
    with (work / "events" / name).open("wb") as file:
        records = RecordWriter(file)
        for event in (
            Event(wall_time=1.0, file_version="brain.Event:2"),
            Event(wall_time=1.0, step=first, session_log=SessionLog(status=SessionLog.START)),
            *(
                Event(wall_time=1.0, step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)]))
                for step, tag, value in points
            ),
        ):
            records.write(event.SerializeToString())
        records.flush()


def shown(fast, port):
    options = ["--logdir", str(work / "events"), "--host", "127.0.0.1", "--port", str(port), f"--load_fast={fast}"]
    server = subprocess.Popen([programs / "tensorboard", *options], stderr=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{port}/data/plugin/scalars/scalars?run=.&tag=eval%2Floss"
        for _ in range(120):
            time.sleep(0.5)
            try:
                return [step for _, step, _ in json.load(urllib.request.urlopen(address))]
            except OSError:
                pass  # not there yet
        raise SystemExit("no answer")
    finally:
        server.terminate()
        server.wait()


(work / "events").mkdir()
write("events.out.tfevents.1.first", 1, [(4, "eval/loss", 1.0), (8, "eval/loss", 1.0)])
write("events.out.tfevents.2.second", 6, [(10, "eval/loss", 2.0)])
found = {fast: shown(fast, port) for fast, port in (("true", 16071), ("false", 16072))}
print(found)
sys.exit(found != {"true": [4, 8, 10], "false": [4, 10]})
PY
"$work/venv/bin/python" "$work/ask.py" "$work"

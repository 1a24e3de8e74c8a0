#!/usr/bin/env bash
# huggingface_hub 2.4.0 with hf_xet 1.8.0: upload_folder, called once with one commit_message, makes several commits.
#
# Guess before: one call is one commit, as it is where hf_xet is not installed. So a reader of
# the repository sees the model before or the model after.
# Seen: a folder of 260 small files becomes a commit of 250 files and one of 10, "a model (part 2)". The pipeline begins
# with 250 files a commit (20 to 1,000, by the time of the commits before), and also commits what it has every 5 minutes, so
# that a large model of a few shards is cut too. Who fetches `main` in between has config.json and shards of two models.
# create_commit with the same files makes one.
#
# The server here is the part of the hub's API that both calls use. Small files need no server of xet.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet huggingface_hub==2.4.0 hf_xet==1.8.0
export HF_HOME="$folder/home" HF_HUB_DISABLE_XET=0 HF_HUB_OFFLINE=0 HF_HUB_DISABLE_PROGRESS_BARS=1 NO_PROXY="*"
cat > "$folder/try.py" <<'PY'
import json
import os
import pathlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

commits = []


class Hub(BaseHTTPRequestHandler):
    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer({"id": "acme/model", "sha": "0" * 40, "siblings": []})

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.endswith("/preupload/main"):
            names = [file["path"] for file in json.loads(body)["files"]]
            self.answer({"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]})
        elif self.path.endswith("/commit/main"):
            lines = [json.loads(line) for line in body.splitlines()]
            summary = next(line["value"]["summary"] for line in lines if line["key"] == "header")
            commits.append((summary, sum(line["key"] == "file" for line in lines)))
            self.answer({"commitUrl": f"{os.environ['HF_ENDPOINT']}/acme/model/commit/{'0' * 40}", "commitOid": "0" * 40})
        else:
            self.answer([])

    def answer(self, value):
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
from huggingface_hub import CommitOperationAdd, HfApi

source = pathlib.Path("model")
source.mkdir()
for number in range(260):
    (source / f"part-{number}.txt").write_text(str(number))
api = HfApi(token="hf_of_nobody")
api.upload_folder(repo_id="acme/model", folder_path=source, commit_message="a model")
print("upload_folder:", commits)
assert commits == [("a model", 250), ("a model (part 2)", 10)], "upload_folder has changed"
commits.clear()
api.create_commit("acme/model", [CommitOperationAdd(p.name, p) for p in source.iterdir()], commit_message="a model")
print("create_commit:", commits)
assert commits == [("a model", 260)], "create_commit has changed"
PY
cd "$folder"
"$folder/venv/bin/python" try.py || exit 1

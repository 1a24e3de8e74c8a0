"""A run that tells of its end, by addresses and commands of which some fail; no file of it shows a secret."""

import json
import re
from pathlib import Path

from tests.e2e.command import metrics, miniature, shardwise, within
from tests.loopback_hooks import SECRET, serve


def test_the_end_is_told_once_and_what_fails_is_a_warning(tmp_path: Path) -> None:
    with serve() as hooks:
        targets = [hooks.address(), hooks.address("404"), "env:CHAT", "tee told.json", "missing-command"]
        targets.append(f"false -d @- https://127.0.0.1:1/a,{SECRET}")
        keys = ("parallel.tensor=2", "train.eval_every=0", "log.sample_tokens=0", f"log.notify={json.dumps(targets)}")
        ended = shardwise("train", miniature(tmp_path), *keys, at=tmp_path, CHAT=hooks.address())
    run = (tmp_path / "runs/latest").resolve()
    assert ended.code == 0
    first, second = hooks.notices
    assert first == second == json.loads((tmp_path / "told.json").read_text())
    last = metrics(run, "step")[-1]
    told = [first[name] for name in ("event", "run", "step", "loss", "reason", "exit_code")]
    assert told == ["end", run.name, 4, last["loss"], "finished", 0]
    warnings = [line for line in ended.complaint.splitlines() if line.startswith("warning: log.notify: ")]
    assert [line.split(": ")[-1] for line in sorted(warnings)] == ["it ended with exit code 1", "Not Found"], ended.err
    missing = "log.notify: missing-command: no program missing-command on the PATH"
    assert [(event["step"], event["text"]) for event in metrics(run, "warning")] == [(0, missing)]
    for path in run.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path
    assert SECRET not in ended.out + ended.err
    dry = within("train", str(run / "config.yaml"), "--dry-run", "--full", at=tmp_path)
    assert dry.code == 0
    assert SECRET not in dry.out
    for text in (
        missing,
        r"log.notify: http://localhost:\d+/\(redacted\): config.yaml keeps no path",
        "log.notify: env:CHAT: the variable must be set",
    ):
        assert re.search(rf"^# warning +{text}", dry.out, re.MULTILINE), dry.out

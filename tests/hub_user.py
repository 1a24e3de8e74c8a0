"""A user of the loopback hub, with processes of their own: the hub's client reads its environment once."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.arch.source import ROOT
from tests.e2e.command import shardwise
from tests.loopback_hub import TOKEN, Site, user_of

PYTHON = (sys.executable,)


class HubUser:
    def __init__(self, at: Path, site: Site) -> None:
        at.mkdir(exist_ok=True)
        self.at = at
        paths = {"PYTHONPATH": os.pathsep.join(map(str, sys.path))}
        self.environment = {**os.environ, **user_of(site.address, str(at / "hf")), **paths}
        self.environment.pop("HF_TOKEN", None)

    def call(self, code: str, arguments: Any, python: tuple[str, ...] = PYTHON, **variables: str) -> Any:
        """What the program prints as JSON; its one argument is JSON too."""
        script = self.at / "call.py"
        script.write_text(code)
        program, given = (*python, str(script)), {**self.environment, **variables}
        done = shardwise(json.dumps(arguments), at=ROOT, program=program, **given)
        assert done.code == 0, done.err
        assert done.err == "", "progress bars and warnings of libraries are not for the user"
        assert TOKEN not in done.out, "the token is a secret"
        return json.loads(done.out)

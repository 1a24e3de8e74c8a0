"""A training without a pipeline starts without torch's compiler, which takes as long as importing torch itself."""

import subprocess
import sys

PROGRAM = "import sys, shardwise.train.run; print('torch._dynamo' in sys.modules)"


def test_what_trains_leaves_the_compiler_alone() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr

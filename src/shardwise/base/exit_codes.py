"""Exit codes of the command line; each error in `errors.py` has one (docs/troubleshooting.md says what users do)."""

DONE = 0
FAILED = 1
"""The run had started and failed."""
WRONG_INPUT = 2
"""The configuration or the input is wrong, and no step was taken. argparse ends with it too."""
STOPPED = 75
"""The run stopped on request, after a checkpoint or before its first step: EX_TEMPFAIL of sysexits.h, "try again"."""

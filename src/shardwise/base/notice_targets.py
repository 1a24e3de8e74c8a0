"""The targets of `log.notify`: a command, an https address, or `env:NAME` for an address in an environment variable."""

import re
import shlex

from shardwise.base.redaction import recorded_variables

VARIABLE, ADDRESS = "env:", r"[\w+.-]+://"
_ALLOWED = r"""(?i)(https://[^/?#@\s]+|http://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?)([/?#][^\s'"<>,\[\]]*)?"""
_RULE = (
    "must be a command, an https address without a log-in (http is for localhost alone), or env:NAME, a variable that "
    "holds such an address and is none that runs record (SHARDWISE_… and others)"
)


def target_problem(target: str) -> str | None:
    """Return why a target cannot be used, without the secrets in it; None for one that can."""
    if target.startswith(VARIABLE):
        name = target.removeprefix(VARIABLE)
        is_right = re.fullmatch(r"[A-Za-z_]\w*", name) is not None and not recorded_variables({name: ""})
    elif re.match(ADDRESS, target):
        is_right = re.fullmatch(_ALLOWED, target) is not None
        target = f"{target.partition('://')[0]}://…"
    else:
        try:
            is_right = bool(shlex.split(target))
        except ValueError:
            is_right = False
    return None if is_right else f"log.notify ({target}) {_RULE}"

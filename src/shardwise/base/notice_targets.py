"""The targets of `log.notify`: a command, an https address, or `env:NAME` for an address in an environment variable."""

import re
import shlex

from shardwise.base.redaction import recorded_variables

VARIABLE, ADDRESS = "env:", r"[\w+.-]+://"
_HOST = r"(https://([\w.-]*\w\.?|\[[\da-f:.]+\])|http://(localhost|127\.0\.0\.1|\[::1\]))"
_ALLOWED = rf"""(?i){_HOST}(?::(?P<port>\d{{0,9}}))?([/?#][^\s'"<>,\[\]]*)?"""
# A mistyped address is no command. There are commands whose name is http, http.py or https-notify.
_ADDRESS_LIKE = rf"""{ADDRESS}|(?i:["'\s]*https?[^\w\s.-])"""
_RULE = (
    "must be a command, an https address https://HOST[:PORT]/… without a log-in (http is for localhost alone), or "
    "env:NAME, a variable that holds such an address and whose value no run records"
)


def notice_target_problem(target: str) -> str | None:
    """Return why a target of `log.notify` cannot be used, without the secrets in it; None for one that can."""
    if target.startswith(VARIABLE):
        name = target.removeprefix(VARIABLE)
        is_right = re.fullmatch(r"[A-Za-z_]\w*", name) is not None and not recorded_variables({name: ""})
    elif found := re.match(_ADDRESS_LIKE, target):
        allowed = re.fullmatch(_ALLOWED, target)
        is_right = allowed is not None and int(allowed["port"] or 443) in range(1, 65536)
        target = f"{found[0]}…"
    else:
        try:
            is_right = bool(shlex.split(target))
        except ValueError:
            is_right = False
    return None if is_right else f"log.notify ({target}) {_RULE}"

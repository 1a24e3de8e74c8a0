"""Print pip's settings as assignments of uv's environment variables, for `scripts/env.sh`: uv does not read pip's.

Read on standard input what `pip config list` prints, or nothing where there is no pip; variables such as PIP_INDEX_URL
come from the environment. Exit with 1 where a setting has no counterpart in uv: then pip installs. A variable of uv
that is already set stays.
"""

import ast
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

# The values of one setting are separated by spaces in pip, and in uv by the text given here.
NAMES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
    "retries": ("UV_HTTP_RETRIES", " "),
    "proxy": ("ALL_PROXY", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "client-cert": ("SSL_CLIENT_CERT", " "),
}
# They change what pip says or where it may install, and not what it takes from where.
WITHOUT_EFFECT = {
    "break-system-packages",
    "compile",
    "config-file",
    "disable-pip-version-check",
    "log",
    "no-color",
    "no-compile",
    "no-input",
    "no-warn-conflicts",
    "no-warn-script-location",
    "prefer-binary",
    "progress-bar",
    "quiet",
    "require-virtualenv",
    "require-venv",
    "root-user-action",
    "verbose",
}
OFF = {"", "0", "f", "false", "n", "no", "off"}


def pip_settings(listed: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The settings of `pip install`: those of the section `install` come before `global`, and variables before both."""
    settings: dict[str, str] = {}
    lines = [line.partition("=") for line in listed.splitlines()]
    for section in ("global.", "install."):
        for name, _, text in lines:
            if name.startswith(section):
                settings[name.removeprefix(section)] = str(ast.literal_eval(text))
    for name, text in environment.items():
        if name.startswith("PIP_") and text:
            settings[name.removeprefix("PIP_").lower().replace("_", "-")] = text
    return settings


def uv_variables(settings: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of uv that say the same, without those that the environment has; KeyError where there is none."""
    variables: dict[str, str] = {}
    for name, text in settings.items():
        if name in NAMES:
            variable, separator = NAMES[name]
            variables[variable] = separator.join(text.split())
        elif name == "cache-dir":
            variables["UV_CACHE_DIR"] = str(Path(text) / "uv")
        elif name == "no-cache-dir":
            # pip takes a negative value for the same wish.
            variables["UV_NO_CACHE"] = "1"
        elif name not in WITHOUT_EFFECT and text.lower() not in OFF:
            raise KeyError(name)
    # pip takes the best version of all places, and uv by itself one of the first place that has the package.
    variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        if Path(environment.get(name, "")).is_file():
            variables.setdefault("SSL_CERT_FILE", environment[name])
    return {name: text for name, text in variables.items() if not environment.get(name)}


if __name__ == "__main__":
    try:
        found = uv_variables(pip_settings(sys.stdin.read(), os.environ), os.environ)
    except KeyError as error:
        sys.exit(f"pip's setting {error.args[0]} has no counterpart in uv")
    print(*(f"export {name}={shlex.quote(text)}" for name, text in found.items()), sep="\n")

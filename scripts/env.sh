#!/usr/bin/env bash
# Create or complete .venv: `scripts/env.sh [--runtime] [TORCH_VERSION]`. With --runtime it has the package and what that
# needs, else the tools of tests too. `make` calls it when a stamp is older than its inputs. PYTHON names the interpreter
# to build from. An installed torch is kept: the one in .venv, else the interpreter's own. uv installs, or pip where uv
# is not to be had, or where INSTALLER=pip.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly minimum_torch=2.11
readonly install_venv="Install it (Debian: apt-get install python3-venv)"
target=env what='.[dev]'
if [ "${1:-}" = --runtime ]; then
    target=train what=.
    shift
fi
wanted_torch=${1:-}

say() { printf "make $target: %s\n" "$*"; }

fail() {
    say "$*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "no Python >= 3.11 found (looked for: ${PYTHON:-python3, python3.11 to python3.14}). Install one" \
        "(Debian: apt-get install python3 python3-venv) or name it: make $target PYTHON=/path/to/python3"
}

# The version of the torch that an interpreter sees, or nothing.
torch_of() {
    "$1" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true
}

# Whether torch version $1 is at least the oldest supported one.
supported() {
    [ "$(printf '%s\n%s\n' "$minimum_torch" "${1%%+*}" | sort -V | head -n 1)" = "$minimum_torch" ]
}

# Whether the torch of .venv is the one of the interpreter that .venv was made from.
torch_is_outside() {
    .venv/bin/python -c 'import sys; from importlib.metadata import distribution
sys.exit(str(distribution("torch").locate_file("")).startswith(sys.prefix))'
}

has_pip() { .venv/bin/python -m pip --version >/dev/null 2>&1; }

# uv brings pip into .venv; without uv, Python does.
ensure_pip() {
    has_pip || .venv/bin/python -m ensurepip --default-pip >/dev/null 2>&1 ||
        fail "$(.venv/bin/python --version) has no venv module. $install_venv"
}

if [ -e .venv/bin/python ] || [ -L .venv/bin/python ]; then
    if ! version=$(.venv/bin/python -c 'import platform; print(platform.python_version())' 2>/dev/null); then
        say "the interpreter of .venv does not start; .venv is made again"
        rm -rf .venv
    elif [ "$(printf '%s\n3.11\n' "$version" | sort -V | head -n 1)" != 3.11 ]; then
        fail "the Python of .venv ($version) must be at least 3.11. Remove it (rm -r .venv) and run the same command again"
    fi
fi

uv=
if [ "${INSTALLER:-uv}" = uv ]; then
    for candidate in .venv/bin/uv uv; do
        if "$candidate" --version >/dev/null 2>&1; then
            uv=$candidate
            break
        fi
    done
fi

python=.venv/bin/python
if [ ! -x .venv/bin/python ] || ! has_pip; then
    python=$(find_python)
    options=(--without-pip)
    system_torch=$(torch_of "$python")
    if [ -z "$wanted_torch" ] && [ -n "$system_torch" ] && supported "$system_torch"; then
        say "torch $system_torch of $python is kept"
        options+=(--system-site-packages)
    fi
    say "making .venv with $("$python" --version)"
    "$python" -m venv "${options[@]}" .venv || fail "$("$python" --version) has no venv module. $install_venv"
fi

torch=${wanted_torch:-$(torch_of .venv/bin/python)}
if [ -n "$torch" ] && ! supported "$torch"; then
    fail "torch ($torch) must be at least $minimum_torch; choose one with TORCH=, for example" \
        "make $target TORCH=$(sed -n 's/^torch==//p' constraints.txt)"
fi

temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
constraints=$temporary/constraints.txt
sed "s/^torch==.*/torch==${torch:-$(sed -n 's/^torch==//p' constraints.txt)}/" constraints.txt >"$constraints"

# `pip INTERPRETER ARGUMENT…` installs into .venv with the pip of an interpreter.
pip() {
    "$1" -m pip --disable-pip-version-check --python .venv/bin/python install --constraint "$constraints" "${@:2}"
}

# Packages are built with the setuptools of constraints.txt, which therefore comes first.
install_with_pip() {
    pip .venv/bin/python --quiet setuptools && pip .venv/bin/python --no-build-isolation --editable "$what"
}

# uv reads neither pip's settings nor the packages outside .venv: a torch there is left out of what uv installs.
install_with_uv() (
    settings=$({ "$python" -m pip config list 2>/dev/null || true; } | .venv/bin/python scripts/uv_settings.py) || return
    eval "$settings"
    export UV_CONSTRAINT="$constraints${UV_CONSTRAINT:+ $UV_CONSTRAINT}"
    if [ -z "$wanted_torch" ] && [ -n "$torch" ] && torch_is_outside; then
        printf 'torch; sys_platform == "none"\n' >"$temporary/overrides.txt"
        export UV_OVERRIDE=$temporary/overrides.txt
    fi
    # What pip compiles at installation, and uv not, is compiled at its first import, or here where that is forbidden.
    if [ "$target" = env ] && [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then
        export UV_COMPILE_BYTECODE=1
    fi
    "$uv" pip install --quiet --python .venv/bin/python setuptools pip || return
    # Files are links to uv's cache, which is only possible within one file system.
    if [ "$(stat -c %d "$("$uv" cache dir)" .venv | uniq | wc -l)" -ne 1 ]; then
        export UV_LINK_MODE=${UV_LINK_MODE:-copy}
    fi
    "$uv" pip install --python .venv/bin/python --no-build-isolation --editable "$what"
)

say "installing ${what/#./shardwise} and what it needs into .venv"
if [ -z "$uv" ] && [ "${INSTALLER:-uv}" = uv ]; then
    "$python" -m pip --version >/dev/null 2>&1 || { ensure_pip && python=.venv/bin/python; }
    if pip "$python" --quiet --retries 2 --only-binary :all: uv 2>/dev/null; then
        uv=.venv/bin/uv
    else
        say "uv is not to be had here; pip installs"
    fi
fi
if [ -z "$uv" ] || ! install_with_uv; then
    [ -z "$uv" ] || say "uv cannot install here (see above); pip is tried"
    ensure_pip
    install_with_pip || fail "the packages could not be installed (see above). Check the network, or set PIP_INDEX_URL" \
        "or PIP_FIND_LINKS to where they are, and run the same command again: what has come is kept"
fi
touch .venv/.runtime
[ "$target" = train ] || touch .venv/.complete

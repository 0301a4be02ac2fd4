# Shared by the scripts beside it: find a Python, make .venv, install once per change of the inputs.
# Sourced, never run. Everything it says goes to standard error; standard output belongs to the command.

set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"

say() { printf '== %s\n' "$*" >&2; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# The interpreter to make .venv with: $PYTHON, else python3. One clear line for each thing that can be missing.
find_python() {
    python=${PYTHON:-python3}
    command -v "$python" >/dev/null 2>&1 || fail "$python not found: install Python 3.11 or newer (apt install python3 python3-venv)"
    local version
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) \
        || fail "$python does not run: set PYTHON to a Python 3.11 or newer"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
        || fail "$python is Python $version, Python 3.11 or newer is needed (set PYTHON to one)"
    "$python" -c 'import venv, ensurepip' 2>/dev/null \
        || fail "$python has no venv module (or no ensurepip): apt install python3-venv"
}

# What decides whether an install is still good: its inputs, the interpreter, and where the checkout lies.
install_key() {
    { cat "$root/pyproject.toml" "$root/constraints.txt"; "$1" -VV; printf '%s\n' "$root"; } 2>&1 | sha256sum | cut -d' ' -f1
}

# ensure_env run|dev: .venv with the package, editable; with `dev` also the development extras.
ensure_env() {
    local kind=$1 extras='' key stamp
    [ "$kind" = dev ] && extras='[dev]'
    exec 9<"$root"
    flock 9 # two scripts started together: the second waits and finds the work done
    if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        find_python
        say "making .venv with $("$python" -V 2>&1)"
        "$python" -m venv --clear "$venv" >&2 || fail "could not make $venv (is python3-venv installed?)"
    fi
    key=$(install_key "$venv/bin/python")
    for stamp in "$venv/.installed-$kind" "$venv/.installed-dev"; do
        if [ "$(cat "$stamp" 2>/dev/null)" = "$key" ]; then
            say ".venv is up to date"
            exec 9<&-
            return
        fi
    done
    say "installing lightkeeper$extras into .venv (minutes the first time; log: .venv/install.log)"
    if ! "$venv/bin/python" -m pip install --no-input --disable-pip-version-check \
        -c "$root/constraints.txt" -e "$root$extras" </dev/null >"$venv/install.log" 2>&1; then
        tail -n 20 "$venv/install.log" >&2
        fail "pip could not install lightkeeper; the whole log is $venv/install.log"
    fi
    printf '%s\n' "$key" >"$venv/.installed-$kind"
    exec 9<&-
}

# Sourced by the scripts beside it: `prepare EXTRAS` sets $root and $python, an environment with fastpatch[EXTRAS].
#
# It installs into the active virtual environment, else into .venv, which it makes with $PYTHON (python3).
# FASTPATCH_TORCH="torch==2.13.0" chooses the torch; pip's own settings (PIP_INDEX_URL, ...) hold too.

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
run() { say "$*"; "$@"; }

root=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

prepare() {
    local extras=$1 torch=${FASTPATCH_TORCH:-} venv=${VIRTUAL_ENV:-$root/.venv} stamp state installed
    # An interrupted run may have left a folder without pip; venv mends it.
    if [ -z "${VIRTUAL_ENV:-}" ] && ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        run "${PYTHON:-python3}" -m venv "$venv"
    fi
    say "using $venv"
    python=$venv/bin/python

    # Installed once for each state of pyproject.toml, torch asked for, and checkout.
    stamp=$venv/.fastpatch-installed
    state="$(cksum <"$root/pyproject.toml") torch='$torch' $root $extras"
    installed=$(cat "$stamp" 2>/dev/null || true)
    if [[ "$installed" = "$state"* ]]; then
        say "already installed"
        return
    fi
    # torch first, and by itself: what was asked for decides, not what pip would choose for fastpatch.
    if [ -n "$torch" ]; then
        run "$python" -m pip install "$torch"
    elif ! "$python" -c 'import torch' 2>/dev/null; then
        run "$python" -m pip install torch
    fi
    (cd "$root" && run "$python" -m pip install -e ".[$extras]")
    printf '%s\n' "$state" >"$stamp"
}

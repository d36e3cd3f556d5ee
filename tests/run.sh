#!/bin/sh
# Everything that is tested. On a machine with root and apt, what is missing is installed; elsewhere
# one line says what is left out and why. In CI nothing may be left out.
set -eu
cd "$(dirname "$0")/.."

if sh tests/lab/install.sh; then
    lab=yes
elif [ "${CI:-}" = true ]; then
    echo "In CI the real-guest lab must run." >&2
    exit 1
else
    lab=no
    echo "Left out: the tests on the real guest, which need root and apt (see the line above)."
fi

if [ "$lab" = yes ] && ! python3 -c 'import ensurepip' 2>/dev/null; then
    apt-get install -y -qq python3-venv >/dev/null
fi
make --no-print-directory lint PYTHON="${PYTHON:-python3}"
if [ "$lab" = no ]; then
    exec .venv/bin/pytest -m 'not lab and not exhaustive' "$@"
elif [ $# -gt 0 ]; then
    exec .venv/bin/pytest "$@"
fi

exec .venv/bin/python tests/side_by_side.py

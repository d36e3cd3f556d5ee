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

# The lab mostly waits for its guest, so the other tests run beside it; their output comes after.
beside=$(mktemp)
.venv/bin/pytest -m 'not lab and not exhaustive' >"$beside" 2>&1 &
others=$!
status=0
.venv/bin/pytest -m 'lab and not exhaustive' || status=$?
wait "$others" || status=$?
cat "$beside"
rm -f "$beside"
exit "$status"

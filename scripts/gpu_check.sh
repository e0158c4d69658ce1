#!/usr/bin/env bash
# Check fastpatch on a machine with a CUDA GPU, in under nine minutes, and write docs/gpu-report.md:
#
#     PYTHON=python3 scripts/gpu_check.sh
#
# It builds, runs the tests of devices, those under compute-sanitizer where there is one, and the benchmark. $PYTHON's
# environment needs torch (a CUDA build), wrapt, filelock, ninja, pytest, hypothesis and numpy; nothing is installed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
report=${REPORT:-docs/gpu-report.md}
notes=$(mktemp)
started=$(mktemp)
trap 'rm -f "$notes" "$started"' EXIT
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
failed=0

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }

# step NAME SECONDS COMMAND...: a line of the report, with the last line that the command printed.
step() {
    local name=$1 limit=$2 start=$SECONDS status=0 output
    shift 2
    say "$name: $*"
    output=$(mktemp)
    timeout -k 5 "$limit" "$@" 2>&1 | tee "$output" >&2
    status=${PIPESTATUS[0]}
    local verdict=passed
    if [ "$status" -ne 0 ]; then
        verdict="FAILED with status $status"
        failed=1
    fi
    printf -- '- %s: %s in %d s: `%s`\n' "$name" "$verdict" "$((SECONDS - start))" \
        "$(grep -v '^ *$' "$output" | tail -n 1 | tr -d '`' | cut -c 1-200)" >>"$notes"
    rm -f "$output"
}

"$python" - <<'CHECK' || exit 1
import importlib.util, sys
missing = [name for name in ("torch", "wrapt", "filelock", "ninja", "pytest", "hypothesis", "numpy") if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"{sys.executable} lacks {', '.join(missing)}; install them: {sys.executable} -m pip install {' '.join(missing)}")
import torch
if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} sees no CUDA GPU here")
CHECK

step "build" 210 "$python" -c '
import fastpatch
fastpatch.enable(strict=True)
from fastpatch import _build, _native
assert _native.is_built_for_cuda(), _build.why_no_cuda()
print("the library has CUDA kernels")'
step "tests" 150 "$python" -m pytest -q -p no:cacheprovider tests/test_devices.py tests/test_cuda_proofs.py

sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null || true)
if [ -n "$sanitizer" ]; then
    for tool in memcheck racecheck; do
        # API errors are those of libraries that probe the driver at their start.
        step "$tool" 50 "$sanitizer" --tool "$tool" --report-api-errors no --error-exitcode 9 "$python" scripts/gpu_touch.py
    done
else
    printf -- '- compute-sanitizer: not found\n' >>"$notes"
fi

# What time is left: torch.compile takes most of it.
step "benchmark" $((530 - SECONDS > 60 ? 530 - SECONDS : 60)) \
    "$python" scripts/gpu_bench.py --report "$report" --notes "$notes"
if [ ! "$report" -nt "$started" ]; then # the benchmark failed: what the steps before it found is kept all the same
    { printf '# fastpatch on a GPU, without figures\n\n%s\n\n' "$(date -I)" && cat "$notes"; } >"$report"
fi
cat "$notes" >&2
exit "$failed"

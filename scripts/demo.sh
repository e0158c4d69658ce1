#!/usr/bin/env bash
# Run the demo, in an environment made for it if need be (see env.sh): scripts/demo.sh [options of demo.py]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

extras=test
case " $* " in *" --plot"*) extras=test,bench ;; esac
prepare "$extras"

# From the caller's folder, where --plot's file is meant to be.
run exec "$python" "$root/scripts/demo.py" "$@"

#!/usr/bin/env bash
# Run the tests, in an environment made for them if need be (see env.sh): scripts/test.sh [options of pytest]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

prepare test
cd "$root"
run exec "$python" -m pytest "$@"

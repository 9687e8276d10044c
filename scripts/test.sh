#!/usr/bin/env bash
# Everything, one step after another, with the seconds each took; the first failing step ends the run.
set -euo pipefail
cd "$(dirname "$0")/.."
begin=$SECONDS
step() {
    local name=$1 start=$SECONDS
    shift
    printf '\n######## %s\n' "$name"
    "$@"
    printf '######## %s: %d s\n' "$name" $((SECONDS - start))
}
step lint scripts/lint.sh
step unit python -m pytest -q tests/unit
step lab python -m pytest -q lab/tests
step integration python -m pytest -v tests/integration
if [[ -n ${PIVOT_SOAK:-} ]]; then step bench scripts/bench.sh; fi
step molecule scripts/molecule.sh
printf '\nall of it: %d s\n' $((SECONDS - begin))

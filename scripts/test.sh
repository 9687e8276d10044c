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

# the lab's own tests mostly wait for containers of labs of their own: they run beside linters and pure code
lab_log=$(mktemp)
python -m pytest -q lab/tests >"$lab_log" 2>&1 &
lab=$!
trap 'wait; rm -f "$lab_log"' EXIT
lab_result() {
    local status=0
    wait $lab || status=$?
    cat "$lab_log"
    return $status
}

step lint scripts/lint.sh
step unit python -m pytest -q tests/unit
step lab lab_result
step integration python -m pytest -v tests/integration
if [[ -n ${PIVOT_SOAK:-} ]]; then step bench scripts/bench.sh; fi
step molecule scripts/molecule.sh
printf '\nall of it: %d s\n' $((SECONDS - begin))

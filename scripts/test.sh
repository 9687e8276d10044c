#!/usr/bin/env bash
# Everything, in three lanes beside each other; each step's output stands together, with the seconds it took. A step that
# fails does not hide what comes after it: all that fails in a run is seen.
#   deploy     deploy.yml and its tags, bad input, the first killed runs, the README; with PIVOT_SOAK also the bench
#   check      linters, pure code, the lab itself, then the roles' scenarios on the engine that the first lane installed;
#              with PIVOT_SOAK also the probe against SGLang in all its ways
#   interrupt  the other killed runs, in a copy of this clone with a lab of its own, on that engine too; then the longest
#              scenario
set -euo pipefail
cd "$(dirname "$0")/.."
begin=$SECONDS
logs=$PWD/artifacts/test
rm -rf "$logs"
mkdir -p "$logs"
export PIVOT_TEST_LANES=1

step() {
    local name=$1 start=$SECONDS status=0
    shift
    printf '######## %s begins; its output grows in %s\n' "$name" "artifacts/test/$name.log"
    "$@" >"$logs/$name.log" 2>&1 || status=$?
    {
        flock 9
        printf '\n######## %s\n' "$name"
        cat "$logs/$name.log"
        printf '######## %s: %d s%s\n' "$name" $((SECONDS - start)) "$([[ $status -eq 0 ]] || echo ", FAILED")"
    } 9>"$logs/.printing"
    if [[ $status -ne 0 ]]; then echo "$name" >>"$logs/.failed"; fi
    return $status
}

# The first deployment's engine becomes a layer: tests/integration/conftest.py
engine() {
    until pivot-lab layer list 2>/dev/null | grep -qx engine; do
        if [[ -e $logs/.deploy-ended ]]; then
            echo "the deploy lane ended before there was an engine to stand on" >&2
            return 1
        fi
        sleep 1
    done
}

killed=tests/integration/test_interruption.py
beside=("$killed::test_engine" "$killed::test_serve" "$killed::test_debug")
longest=molecule/debug_probes/molecule.yml
scenarios=()
for scenario in molecule/*/molecule.yml; do [[ $scenario == "$longest" ]] || scenarios+=("$scenario"); done
verbose=(-v --durations=0 --durations-min=5)

# What failed, once more in few lines: often the end of the output is all there is of a run
failures() {
    local name
    [[ -s $logs/.failed ]] || echo 'FAILED: a lane ended by itself'
    while read -r name; do
        printf 'FAILED: %s\n' "$name"
        grep -aE '^(FAILED|ERROR|E) |^fatal: |^\[ERROR\]: |: error: ' "$logs/$name.log" | cut -c1-400 | tail -n 20 || true
    done < <(cat "$logs/.failed" 2>/dev/null)
}

deploy_lane() {
    trap 'touch "$logs/.deploy-ended"' EXIT
    local status=0
    step integration python -m pytest "${verbose[@]}" "${beside[@]/#/--deselect=}" tests/integration || status=1
    if [[ -n ${PIVOT_SOAK:-} ]]; then step bench scripts/bench.sh || status=1; fi
    return $status
}

check_lane() {
    local status=0
    step lint scripts/lint.sh || status=1
    step unit python -m pytest -q tests/unit || status=1
    step lab python -m pytest -q lab/tests || status=1
    engine || true # the scenarios then install their own
    step molecule scripts/molecule.sh "${scenarios[@]}" || status=1
    if [[ -n ${PIVOT_SOAK:-} ]]; then step probe scripts/probe.sh tests/live.py || status=1; fi
    return $status
}

interrupt_lane() {
    engine
    local status=0
    step interruption scripts/beside.sh "${verbose[@]}" "${beside[@]}" "$killed::test_nothing_is_left_to_do" || status=1
    step molecule-longest scripts/molecule.sh "$longest" || status=1
    return $status
}

# a new lab for a new run; also what an interrupted run left
pivot-lab down
set -m # every lane is a process group of its own, which ends with this script
lanes=()
for lane in deploy_lane check_lane interrupt_lane; do
    "$lane" &
    lanes+=($!)
done
trap 'for pid in "${lanes[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || true; done; wait' EXIT
trap 'exit 130' INT TERM
broken=0
for pid in "${lanes[@]}"; do wait "$pid" || broken=1; done
printf '\nall of it: %d s\n' $((SECONDS - begin))
if [[ $broken -ne 0 ]]; then
    failures
    exit 1
fi

#!/usr/bin/env bash
# Everything, in lanes beside each other; each step's output stands together, with the seconds it took. A step that fails
# does not hide what comes after it: all that fails in a run is seen.
#   deploy     deploy.yml and its tags, bad input, wrong wirings, the README; with PIVOT_SOAK also the shorter of the killed
#              runs, the bench, and the probe against SGLang in all its ways
#   beside     the killed runs, in a copy of this clone with a lab of its own
#   check      linters, pure code, the lab itself
#   scenarios  the roles' scenarios; the other lanes take from them too when they have done their own
# A step that passed is not run again on these very files, this machine's kernel and packages: linters, pure code, the lab
# itself, each scenario; `make lint unit lab-test molecule` does it. deploy.yml and the killed runs always run.
set -euo pipefail
cd "$(dirname "$0")/.."
begin=$SECONDS
logs=$PWD/artifacts/test
rm -rf "$logs"
mkdir -p "$logs" .cache
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
        sleep 3
    done
}

killed=tests/integration/test_interruption.py
# all of them beside; the many of PIVOT_SOAK would take twice as long there as all else here, so the shorter stay here
if [[ -n ${PIVOT_SOAK:-} ]]; then
    beside=("$killed::test_engine" "$killed::test_serve" "$killed::test_debug" "$killed::test_nothing_is_left_to_do")
    here=("${beside[@]:0:3}")
    here=("${here[@]/#/--deselect=}")
else
    beside=("$killed")
    here=("--ignore=$killed")
fi
verbose=(-v --durations=0 --durations-min=5)

# What failed, once more in few lines: often the end of the output is all there is of a run
failures() {
    local name
    [[ -s $logs/.failed ]] || echo 'FAILED: a lane ended by itself'
    while read -r name; do
        printf 'FAILED: %s\n' "$name"
        grep -aE '^(FAILED|ERROR|E) |^fatal: |^\[ERROR\]: |: error: |^NOT SHOWN' "$logs/$name.log" | cut -c1-400 | tail -n 20 || true
    done < <(cat "$logs/.failed" 2>/dev/null)
}

# All that git would show of this clone, the packages that check it, and what the lab's containers stand on
files() {
    git ls-files -coz --exclude-standard | sort -z | xargs -0 sha256sum &&
        cat .venv/.pivot-lock && uname -r && xargs dpkg-query -W <lab/debian-packages.txt
}

# The same for as long as nothing of these changes; where git cannot tell, nothing is taken as passed
state() { { files && echo "soak: ${PIVOT_SOAK:-}"; } 2>/dev/null | sha256sum; }

# A step whose outcome its files and this machine decide
once() {
    local name=$1 stamp=.cache/passed-$1 state
    state=$(state) || state=
    if [[ -n $state && -f $stamp && $(<"$stamp") == "$state" ]]; then
        printf '######## %s: passed on these very files before\n' "$name"
        echo "$name" >>"$logs/.passed-before"
        return
    fi
    rm -f "$stamp"
    step "$@" || return 1
    [[ -z $state ]] || printf '%s\n' "$state" >"$stamp"
}

# The longest first; each is drawn once, and those that stand on the engine, or share its container's card, after it
printf '%s\n' debug_probes proxmox_container model_weights sglang_server log_bundle >"$logs/.longest"
{
    cat "$logs/.longest"
    for scenario in molecule/*/molecule.yml; do basename "${scenario%/molecule.yml}"; done | grep -vxFf "$logs/.longest"
} >"$logs/.scenarios"

draw() {
    local name
    exec 8>"$logs/.drawing"
    while true; do
        flock 8
        while read -r name; do
            [[ -e $logs/.engine ]] || ! grep -qE 'layer: engine|gpu_shared' "molecule/$name/molecule.yml" || continue
            sed -i "/^$name\$/d" "$logs/.scenarios"
            printf '%s\n' "$name"
            return
        done <"$logs/.scenarios"
        [[ -s $logs/.scenarios ]] || return 1
        flock --unlock 8
        sleep 2
    done
}

scenarios() {
    local status=0 name
    while name=$(draw); do once "molecule-$name" scripts/molecule.sh "molecule/$name/molecule.yml" || status=1; done
    return $status
}

deploy_lane() {
    trap 'touch "$logs/.deploy-ended"' EXIT
    local status=0
    step integration python -m pytest "${verbose[@]}" "${here[@]}" tests/integration || status=1
    touch "$logs/.deploy-ended"
    if [[ -n ${PIVOT_SOAK:-} ]]; then
        step bench scripts/bench.sh || status=1
        step probe scripts/probe.sh tests/live.py || status=1
    fi
    scenarios || status=1
    return $status
}

beside_lane() {
    local status=0
    step beside scripts/beside.sh "${verbose[@]}" "${beside[@]}" || status=1
    scenarios || status=1
    return $status
}

check_lane() {
    local status=0
    once lint scripts/lint.sh || status=1
    once unit python -m pytest -q tests/unit || status=1
    once lab python -m pytest -q lab/tests || status=1
    scenarios || status=1
    return $status
}

scenarios_lane() {
    (engine || true; touch "$logs/.engine") & # without it, the scenarios install their own
    scenarios
}

# a new lab for a new run; also what an interrupted run left
pivot-lab down
set -m # every lane is a process group of its own, which ends with this script
lanes=()
for lane in deploy_lane beside_lane check_lane scenarios_lane; do
    "$lane" &
    lanes+=($!)
done
trap 'for pid in "${lanes[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || true; done; wait' EXIT
trap 'exit 130' INT TERM
broken=0
for pid in "${lanes[@]}"; do wait "$pid" || broken=1; done
printf '\nall of it: %d s\n' $((SECONDS - begin))
if [[ -s $logs/.passed-before ]]; then
    printf 'not run, passed on these very files before: %s\n' "$(sort "$logs/.passed-before" | paste -sd' ')"
fi
if [[ $broken -ne 0 ]]; then
    failures
    exit 1
fi

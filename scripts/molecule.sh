#!/usr/bin/env bash
# One scenario a role, one after another; each on real containers of this clone's lab. Arguments limit the scenarios.
set -euo pipefail
cd "$(dirname "$0")/.."

# 2.4 GB of engine: installed once by the role itself, then cloned by the scenarios that need it
engine_layer() {
    local wanted stamp=.lab/engine-layer base=engine-base container
    exec 7>.lab/engine-layer.lock # of scenarios beside each other, one makes it
    flock 7
    wanted=$(cat requirements/engine/cpu-py311.lock roles/sglang_engine/*/*.* lab/kernels/src/*/*.py | sha256sum)
    if pivot-lab layer list 2>/dev/null | grep -qx engine; then
        [[ -n ${PIVOT_TEST_LANES:-} ]] && return # of this run's deployment
        [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && return
        pivot-lab layer drop engine
    fi
    pivot-lab scratch down $base 2>/dev/null || true
    container=$(pivot-lab scratch up $base)
    field() { python -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])' "$1" <<<"$container"; }
    ansible-playbook molecule/shared/engine.yml --inventory "$(field address)," \
        --extra-vars "ansible_user=$(field user) ansible_ssh_private_key_file=$(field ssh_key)" \
        --extra-vars "ansible_python_interpreter=/usr/bin/python3" \
        --extra-vars "{\"ansible_ssh_common_args\": \"-o UserKnownHostsFile=$(field known_hosts)\"}"
    pivot-lab layer save $base engine
    printf '%s\n' "$wanted" >$stamp
}

pivot-lab up
mkdir -p -m 700 ~/.ansible/cp # sockets of ssh, by .config/molecule/config.yml
[[ $# -gt 0 ]] || set -- molecule/*/molecule.yml
if grep -q 'layer: engine' "$@"; then (engine_layer); fi
failed=()
for scenario in "$@"; do
    name=$(basename "${scenario%/molecule.yml}")
    begin=$SECONDS
    printf '\n== molecule test: %s\n' "$name"
    export MOLECULE_EPHEMERAL_DIRECTORY=$PWD/.lab/molecule/$name
    if [[ -d $MOLECULE_EPHEMERAL_DIRECTORY ]]; then molecule destroy --scenario-name "$name"; fi # of an interrupted run
    molecule test --scenario-name "$name" || failed+=("$name")
    rm -rf "$MOLECULE_EPHEMERAL_DIRECTORY"
    printf '== molecule test: %s: %d s\n' "$name" $((SECONDS - begin))
done
if [[ ${#failed[@]} -gt 0 ]]; then
    echo "molecule: error: failed: ${failed[*]}" >&2
    exit 1
fi

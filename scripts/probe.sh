#!/usr/bin/env bash
# What the probe costs, or whether its records are right, on the engine that the lab has deployed.
# scripts/probe.sh bench.py [--rounds N] | scripts/probe.sh tests/live.py [--case NAME]
set -euo pipefail
cd "$(dirname "$0")/.."
[[ -f probe/${1:-} ]] || { echo "name a program of probe/: bench.py or tests/live.py" >&2; exit 2; }
variables=inventory/lab/group_vars/all/lab.yml
[[ -f $variables ]] || { echo "the lab is not up: make deploy" >&2; exit 1; }
value() { python -c 'import sys, yaml; v = yaml.safe_load(open(sys.argv[1])); print(eval(sys.argv[2], {}, v))' $variables "$1"; }
target=root@$(value 'lab_addresses["infer1"]')
ssh=(ssh -i "$(value lab_ssh_key)" -o "UserKnownHostsFile=$(value lab_known_hosts)" -o StrictHostKeyChecking=yes)
python=/opt/sglang/current/bin/python
there=/var/tmp/pivot-probe-check
trap '"${ssh[@]}" "$target" rm -rf $there' EXIT
"${ssh[@]}" "$target" mkdir -p $there
rsync --recursive --relative --exclude __pycache__ --rsh "${ssh[*]}" \
    probe lab/models roles/debug_probes/files "$target:$there/"
"${ssh[@]}" "$target" $python "$there/probe/$1" --python $python "${@:2}"

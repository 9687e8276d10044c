#!/usr/bin/env bash
# Accept length and speed by wiring, with ratios, on the engine that the lab has deployed. Arguments: see lab/models/bench.py
set -euo pipefail
cd "$(dirname "$0")/.."
variables=inventory/lab/group_vars/all/lab.yml
[[ -f $variables ]] || { echo "the lab is not up: make deploy" >&2; exit 1; }
value() { python -c 'import sys, yaml; v = yaml.safe_load(open(sys.argv[1])); print(eval(sys.argv[2], {}, v))' $variables "$1"; }
target=root@$(value 'lab_addresses["infer1"]')
ssh=(ssh -i "$(value lab_ssh_key)" -o "UserKnownHostsFile=$(value lab_known_hosts)" -o StrictHostKeyChecking=yes)
python=/opt/sglang/current/bin/python
there=/var/tmp/pivot-bench
trap '"${ssh[@]}" "$target" rm -rf $there' EXIT
rsync --recursive --exclude __pycache__ --rsh "${ssh[*]}" lab/models/ "$target:$there/"
"${ssh[@]}" "$target" $python $there/bench.py --python $python "$@"

#!/usr/bin/env bash
# How long preflight takes; then on the engine that the lab has deployed: accept length and speed by wiring with ratios,
# and what the probe costs; then bundles of logs. Less than is promised ends it, but not beside the tests of
# scripts/test.sh: there a figure is of the other lanes too, and wrong results alone end it.
# Arguments: see lab/models/bench.py
set -euo pipefail
cd "$(dirname "$0")/.."
export LC_ALL=C.UTF-8 # figures have points
variables=inventory/lab/group_vars/all/lab.yml
[[ -f $variables ]] || { echo "the lab is not up: make deploy" >&2; exit 1; }

said=$(mktemp)
trap 'rm -f "$said"' EXIT
begin=$EPOCHREALTIME
ansible-playbook deploy.yml --tags preflight >"$said" 2>&1 || { cat "$said" >&2; exit 1; }
seconds=$(awk "BEGIN {print $EPOCHREALTIME - $begin}")
printf 'preflight of the lab: %.1f s (aim: 5 s)\n' "$seconds"

value() { python -c 'import sys, yaml; v = yaml.safe_load(open(sys.argv[1])); print(eval(sys.argv[2], {}, v))' $variables "$1"; }
target=root@$(value 'lab_addresses["infer1"]')
ssh=(ssh -i "$(value lab_ssh_key)" -o "UserKnownHostsFile=$(value lab_known_hosts)" -o StrictHostKeyChecking=yes)
python=/opt/sglang/current/bin/python
there=/var/tmp/pivot-bench
trap 'rm -f "$said"; "${ssh[@]}" "$target" rm -rf $there' EXIT
rsync --recursive --exclude __pycache__ --rsh "${ssh[*]}" lab/models/ "$target:$there/"
"${ssh[@]}" "$target" $python $there/bench.py --python $python "$@"
echo "the probe: throughput with it and without it"
scripts/probe.sh bench.py ${PIVOT_TEST_LANES:+--least 0}
echo "bundles of logs"
python scripts/bench_logs.py --transfer 1024
echo "weights: verification and transfer"
python scripts/bench_weights.py ${PIVOT_TEST_LANES:+--figures}

#!/usr/bin/env bash
# One scenario a role, one after another; each on real containers of this clone's lab.
set -euo pipefail
cd "$(dirname "$0")/.."
for scenario in molecule/*/molecule.yml; do
    name=$(basename "$(dirname "$scenario")")
    printf '\n== molecule test: %s\n' "$name"
    molecule test --scenario-name "$name"
done

#!/usr/bin/env bash
# Integration tests in a copy of this clone, with a lab of its own, beside those of the clone itself. The copy is one of a
# person whose umask hides everything from others. Arguments: pytest's.
set -euo pipefail
umask 077
cd "$(dirname "$0")/.."
root=$PWD
beside=$root/.cache/beside
lab() { PIVOT_LAB_ROOT=$beside PIVOT_LAB_CACHE=$root/.cache pivot-lab "$@"; }

if [[ -d $beside ]]; then
    lab down # of an interrupted run
    rm -rf "$beside"
fi
mkdir -p "$root/.cache/wheelhouse" "$beside/.cache" "$beside/artifacts"
rsync --archive --chmod=go= --exclude /.git --exclude /artifacts --filter ':- .gitignore' ./ "$beside/"
ln -s "$root/.cache/wheelhouse" "$beside/.cache/wheelhouse"
export PIVOT_TEST_BESIDE=1 PIVOT_LAB_ROOT=$beside PIVOT_LAB_CACHE=$root/.cache ANSIBLE_CONFIG=$beside/ansible.cfg
export PYTHONPATH=$beside/src # the copy is one state of the code, whatever is edited meanwhile
cd "$beside"
trap 'lab down' EXIT
python -m pytest "$@"

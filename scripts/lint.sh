#!/usr/bin/env bash
# All linters, all findings: a failing one does not hide the others.
set -uo pipefail
cd "$(dirname "$0")/.."
status=0
step() { printf '\n== %s\n' "$*"; "$@" || status=1; }
step ruff check .
step ruff format --check .
# roles/*/files are sent to hosts one by one and share names, so each is checked alone
step mypy src probe/src lab/pivot_lab plugins/action plugins/callback plugins/modules
for file in plugins/filter/*.py; do step mypy "$file"; done
step yamllint --strict .
step ansible-lint
exit $status

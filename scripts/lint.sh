#!/usr/bin/env bash
# All linters, all findings: a failing one does not hide the others.
set -uo pipefail
cd "$(dirname "$0")/.."
status=0
step() { printf '\n== %s\n' "$*"; "$@" || status=1; }
step ruff check .
step ruff format --check .
step mypy src probe/src lab/pivot_lab
step mypy lab/kernels/src
step mypy lab/models/serve.py lab/models/bench.py
step mypy lab/faults/bench.py lab/faults/capture.py
step mypy plugins/*/*.py
step yamllint --strict .
step ansible-lint
exit $status

#!/usr/bin/env bash
# Resolve the locks anew. uv keeps what is locked already unless a requirement or --upgrade says otherwise.
set -euo pipefail
cd "$(dirname "$0")/.."
resolve() { uv pip compile --quiet --universal --python-version 3.12 --generate-hashes --no-header "$@"; }
resolve pyproject.toml --no-annotate --output-file requirements/controller.txt
resolve pyproject.toml --extra dev lab/pyproject.toml --constraint requirements/controller.txt \
    --output-file requirements/dev.txt
# the engines' locks; the CPU one downloads its wheels (a few hundred MB), the CUDA one only their metadata
python -m pivot.wheelhouse lock requirements/engine/cpu-py311.in
python -m pivot.index_lock requirements/engine/cuda-py312.in

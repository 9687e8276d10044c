#!/usr/bin/env bash
# Resolve the locks anew. uv keeps what is locked already unless a requirement or --upgrade says otherwise.
set -euo pipefail
cd "$(dirname "$0")/.."
resolve() { uv pip compile --quiet --universal --python-version 3.12 --generate-hashes --no-header "$@"; }
resolve pyproject.toml --no-annotate --output-file requirements/controller.txt
resolve pyproject.toml --extra dev lab/pyproject.toml --constraint requirements/controller.txt \
    --output-file requirements/dev.txt
# the engines' locks; the CPU one downloads its wheels (a few hundred MB), the CUDA one only their metadata
python -m pivot.engines.wheelhouse lock requirements/engine/cpu-py311.in
python -m pivot.engines.index_lock requirements/engine/cuda-py312.in
# what the locked SGLangs are: read from their wheels, those at hand or else the locked ones of the index
versions=$(sed -n 's/^sglang==\([^ ]*\) .*/\1/p' requirements/engine/*.lock | sort -u)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
for version in $versions; do
    wheel=
    for candidate in .cache/wheelhouse/*/wheels/"sglang-$version"-*.whl; do
        if [[ -f $candidate ]]; then wheel=$candidate; fi
    done
    if [[ -z $wheel ]]; then
        sed -n "s/^\(sglang==$version \)/\1/p" requirements/engine/cpu-py311.lock >"$place/wanted"
        if python -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary=:all: \
            --python-version 3.11 --platform manylinux_2_34_x86_64 --dest "$place" --requirement "$place/wanted"; then
            wheel=$(find "$place" -name "sglang-$version-*.whl" -print -quit)
        fi
    fi
    if [[ -z $wheel ]]; then
        echo "no wheel of sglang $version can be had now: its description stays as it is" >&2
        continue
    fi
    pivot engine describe "$wheel" --out "$place/description.json"
    mv "$place/description.json" "src/pivot/data/engines/sglang-$version.json"
done

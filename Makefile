# Two commands are enough: `make deploy` and `make test`. Everything else is a part of them.
SHELL := /bin/bash
VENV := .venv
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export LC_ALL := C.UTF-8
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg
PYTEST := python -m pytest

.DEFAULT_GOAL := help
.PHONY: help setup lab-up lab-down deploy test lint unit lab-test integration molecule soak bench bench-wiring lock

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## Debian packages and .venv, when missing or when the lock changed
	@scripts/bootstrap.sh

lab-up: setup  ## the lab: Proxmox API, node and network of this clone
	@pivot-lab up

lab-down:  ## remove every trace of this clone's lab, and of those that its tests left if they were killed
	@if [ -x $(VENV)/bin/pivot-lab ]; then pivot-lab down; else echo "no lab: $(VENV) was never made"; fi
	@for left in .cache/*/.lab; do \
	  if [ -d "$$left" ]; then pivot-lab --root "$${left%/.lab}" --cache .cache down; fi; \
	done

deploy: lab-up  ## what is missing, the lab, and deploy.yml against it
	@ansible-playbook deploy.yml

test: setup  ## everything: lint, unit, lab, integration, molecule
	@scripts/test.sh

lint: setup  ## ruff, mypy, yamllint, ansible-lint
	@scripts/lint.sh

unit: setup  ## pure code
	@$(PYTEST) tests/unit

lab-test: setup  ## the lab itself: conformance to the recordings, real containers
	@$(PYTEST) lab/tests

integration: setup  ## deploy.yml and its tags against a new lab
	@$(PYTEST) -v tests/integration

molecule: setup  ## one scenario a role, on real containers
	@scripts/molecule.sh

soak: setup  ## the long runs: all seeds
	@PIVOT_SOAK=1 scripts/test.sh

bench: setup  ## accept lengths and speed by wiring, then what probe, bundles and weights cost
	@scripts/bench.sh

bench-wiring: setup  ## wrong wirings on the deployed engine, and whether the analysis names each; BENCH="--row …"
	@python lab/faults/bench.py $(BENCH)

lock: setup  ## resolve the locks of packages and engines again (upgrades only what pyproject.toml or a .in demands)
	@scripts/lock.sh

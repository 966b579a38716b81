# Every target sets up .venv first; nothing else is needed but Python 3.11 or newer and a C++ compiler (for torch.compile).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-slow lint format docs evidence bench bench-docs clean

$(READY): pyproject.toml constraints.txt tests/no-deps.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	$(BIN)/pip install --quiet --no-deps --requirement tests/no-deps.txt
	$(BIN)/python -c "import torch; assert torch.cuda.is_available() or torch.version.cuda is None, 'a CUDA build of torch was installed on a machine without a GPU'"
	touch $(READY)

demo: $(READY)  ## train on the embedded digits and write the report, about two minutes
	$(BIN)/revode train --out runs/demo --overwrite

test: $(READY)  ## the everyday suite, under 6 minutes on 2 cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow" $(ARGS)

test-slow: $(READY)  ## what takes longer than the everyday suite allows
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest -m slow $(ARGS)

lint: $(READY)
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/pyright

format: $(READY)
	$(BIN)/ruff check --fix src tests benchmarks examples
	$(BIN)/ruff format src tests benchmarks examples

docs: $(READY)  ## the site, from README.md, docs/ and results/; nothing is fetched
	$(BIN)/python -m sphinx -q -W --keep-going -c docs -d build/doctrees . build/site
	@echo "open build/site/index.html"

ITEM ?= levels-74

evidence: $(READY)  ## go on with a training that takes hours, on one core; its checkpoint is kept in results/unfinished
	OMP_NUM_THREADS=1 nice $(BIN)/revode reproduce $(ITEM) --budget cpu --autocast bfloat16 --threads 1 --runs results/unfinished $(ARGS)

PEERS := $(VENV)/benchmark-peers

# Beside the environment, not in it: the tests run without them. Never their dependencies, which are torchvision and a CUDA torch.
$(PEERS)/.ready: benchmarks/peers.txt | $(READY)
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(PEERS) --requirement benchmarks/peers.txt
	touch $@

bench: $(READY) $(PEERS)/.ready  ## time, memory and gradient error beside other libraries; ARGS=--quick for 3 minutes
	$(BIN)/python benchmarks/bench.py $(ARGS)

LOWER := stage-32x32 stage-16x16 stage-8x8 hamiltonian-74 hamiltonian-1202 attention-12

bench-docs: $(READY) $(PEERS)/.ready  ## measure everything and rewrite docs/benchmarks.md, about 35 minutes on an idle machine
	$(BIN)/python benchmarks/bench.py --extra --out docs $(ARGS)
	$(BIN)/python benchmarks/bench.py --extra --dtype bfloat16 $(LOWER:%=--workload %) --rows docs/benchmarks.json --out docs $(ARGS)
	$(BIN)/python benchmarks/bench.py --blocks docs
	$(BIN)/python benchmarks/page.py docs

clean:
	rm -rf $(VENV) build runs .hypothesis .ruff_cache

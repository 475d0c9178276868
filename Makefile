# `make help` tells what there is. Every target makes its own virtual environment in .venv first; a second run is quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
LANES ?= 3

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export SINCE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: dist release help demo near test coverage gpu newest oldest nightly stress lock lint format docs bench clean

help: ## What there is to make
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  ARGS=...         more arguments for pytest: make test ARGS='-k sharding -x'"
	@echo "  LANES=...        how many files of tests run at once (3): make test LANES=0 ARGS='--pdb'"
	@echo "  SLICE=...        slices of the nightly, 0 to 23: make nightly SLICE=3"
	@echo "  PYTHON=...       another interpreter than python3"
	@echo "  REPOSITORY=...   where a release's README has its pictures: make release REPOSITORY=https://github.com/me/kale_dist"
	@echo "  TORCH_INDEX=...  where PyTorch comes from, such as https://download.pytorch.org/whl/cu128"

demo: $(VENV)/demo.stamp ## Train on handwritten digits with two processes, from a notebook
	@mkdir -p build
	@$(BIN)/kale-dist run notebooks/digits.ipynb -o $(CURDIR)/build/digits.ipynb
	@echo "It holds the loss curve as a picture."

test: $(VENV)/test.stamp $(VENV)/trainers.stamp ## Run the tests that this machine can run
	@$(BIN)/python -m pytest -n $(LANES) --dist loadfile --no-loadscope-reorder --reruns=1 -rR $(ARGS)

near: $(VENV)/test.stamp ## The tests that are nearest to what you have changed, within five minutes (SINCE=... names another commit than the branch's first)
	@$(BIN)/python -m pytest -n $(LANES) --dist loadfile --no-loadscope-reorder $$($(BIN)/python .ci/near.py) $(ARGS)

coverage: override ARGS += --cov --cov-report=term:skip-covered
coverage: test ## The same, and which lines no test of one process has run

gpu: PYTHON := $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
gpu: ## The tests that need a GPU, in nine minutes, and what they measure into build/gpu; installs nothing
	@$(PYTHON) tests/gpu/run.py --out build/gpu $(ARGS)

newest: $(VENV)/test.stamp .venv-newest/venv.stamp ## What others' releases may break, with the newest of everything but PyTorch
	@LANES=$(LANES) .ci/other-versions $@ $(ARGS)

oldest: $(VENV)/test.stamp .venv-oldest/venv.stamp ## The same with the oldest that pyproject.toml allows, on Python 3.11
	@LANES=$(LANES) .ci/other-versions $@ $(ARGS)

nightly: $(VENV)/test.stamp $(VENV)/nightly.stamp ## What takes long and rarely breaks: more browsers and faults, a thousand jobs, the newest and oldest PyTorch
	@LANES=$(LANES) .ci/nightly $(SLICE)

stress: $(VENV)/test.stamp ## A thousand jobs in a row: none may hang, abort or leave anything (ARGS="100 kubernetes")
	@$(BIN)/python benchmarks/trivial_jobs.py $(ARGS)

lock: $(VENV)/venv.stamp ## Write the newest versions that pyproject.toml allows into .ci/constraints*.txt (ARGS=--no-upgrade: as few as it must)
	@$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt uv
	@.ci/lock $(BIN)/uv $(ARGS)

lint: $(VENV)/lint.stamp $(VENV)/test.stamp ## Style, types, import contracts, and what is taken from inside other packages
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/python tests/docs/private_names.py
	@$(BIN)/python .ci/house.py

format: $(VENV)/lint.stamp ## Put the code into its form
	@$(BIN)/ruff check --fix-only
	@$(BIN)/ruff format

docs: $(VENV)/docs.stamp ## The documentation, into build/docs
	@$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs
	@echo "The documentation: $(CURDIR)/build/docs/index.html"

dist: $(VENV)/lint.stamp ## The wheel and the source archive, into dist, as they would be released
	@rm -rf dist
	@PIP_CONSTRAINT=$(CURDIR)/.ci/constraints.txt $(BIN)/python -m build --outdir dist >/dev/null
	@$(BIN)/twine check --strict dist/*

release: $(VENV)/lint.stamp docs ## Build and check what a release has, and write its notes; a person uploads it
	@.ci/release $(VENV) $(REPOSITORY)

bench: $(VENV)/test.stamp ## Time to the first training step, against torchrun
	@$(BIN)/python benchmarks/launch.py

clean: ## Remove what was made here, the virtual environment too
	rm -rf .venv .venv-* build dist *.egg-info .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv-oldest/venv.stamp: PYTHON := python3.11
$(VENV)/venv.stamp .venv-newest/venv.stamp .venv-oldest/venv.stamp: %/venv.stamp: .ci/make-venv
	@echo "Making $*; the first time this takes a few minutes."
	@.ci/make-venv $(PYTHON) $*
	@touch $@

# One stamp for each dependency group of pyproject.toml. The name in front of the colon is the group's.
$(VENV)/demo.stamp $(VENV)/test.stamp $(VENV)/trainers.stamp $(VENV)/nightly.stamp $(VENV)/lint.stamp $(VENV)/docs.stamp: $(VENV)/%.stamp: $(VENV)/venv.stamp pyproject.toml $(wildcard .ci/constraints*)
	@echo "Installing what \`$*\` needs"
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --editable '.[all]' --group $* $(addprefix --constraint=,.ci/constraints.txt $(wildcard .ci/constraints-$*.txt)) --build-constraint=.ci/constraints.txt
	@touch $@

# GNU make 4.3 or newer.  Every target makes its own environment in .venv first, where it is missing or out of date.

PYTHON ?= python3
# Another interpreter has an environment beside .venv: make test PYTHON=python3.12
VENV := $(if $(filter-out python3,$(PYTHON)),.venv-$(notdir $(PYTHON)),.venv)
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

DEEPSPEED_VERSION := $(or $(VERSION),0.19.8)
DEEPSPEED := .deepspeed/$(DEEPSPEED_VERSION)
RELEASE := .releases/$(VERSION)
CLIENTS := .clients
PROFILE ?= gate
BASE ?= HEAD
DOCS := .docs
PAGE := .page
AXE_VERSION := 4.14.1

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
unexport PYTHONDONTWRITEBYTECODE  # or each of the hundreds of processes of a test run compiles the package anew
.PHONY: help gate conform test deepspeed deepspeed-installed release release-installed clients clients-installed lint format bench docs docs-installed page page-installed smoke-wheel clean

help:  ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

gate: $(INSTALLED)  ## The gate on gloo and the CPU, with a report in report/: about 15 minutes on two quiet cores
	$(BIN)/equivtest run --profile gate --report report

conform: $(INSTALLED)  ## Conformance run on gloo and the CPU, with a report in report/: about 30 minutes on two quiet cores
	$(BIN)/equivtest run --profile conformance --report report

# A file's tests run in one process: what they share is drawn and computed once.
test: $(INSTALLED)  ## All tests, and a smoke run of the properties on 2 and 4 ranks: about 15 minutes on two quiet cores
	@echo 'All tests, and a smoke run of the properties on 2 and 4 ranks, take about 15 minutes on two quiet cores.'
	$(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder --profile smoke --world-sizes 2,4

deepspeed-installed: $(INSTALLED) $(DEEPSPEED)/.installed

deepspeed: deepspeed-installed  ## The properties of the real DeepSpeed; VERSION=0.19.3 takes another release, PROFILE=smoke few cases
	PYTHONPATH=$(CURDIR)/$(DEEPSPEED) $(BIN)/equivtest run --profile $(PROFILE) --import deepspeed --report report/deepspeed-$(DEEPSPEED_VERSION) \
		--subjects deepspeed_fetch_all_gather,deepspeed_fetch_all_reduce,deepspeed_mlp_all_gather,deepspeed_mlp_all_reduce,deepspeed_mlp_stages_1_and_2
	PYTHONPATH=$(CURDIR)/$(DEEPSPEED) $(BIN)/pytest -q -n auto tests/families/test_deepspeed.py

release-installed: $(RELEASE)/.installed

release: release-installed  ## The gate on another release of torch, VERSION=2.15.0; PROFILE=smoke is a first look
	$(RELEASE)/bin/equivtest run --profile $(PROFILE) --allow-unsupported release --report report/torch-$(VERSION)

clients-installed: $(INSTALLED) $(CLIENTS)/.installed

clients: clients-installed deepspeed-installed  ## Other people's parallel programs: transformers, DeepSpeed, ...; PROFILE=smoke is a few cases of each
	PYTHONPATH=$(CURDIR):$(CURDIR)/$(CLIENTS):$(CURDIR)/$(DEEPSPEED) HF_HUB_OFFLINE=1 \
		$(BIN)/equivtest run tests/clients --profile $(PROFILE) --import tests.clients.titan --import tests.clients.language_models \
		--known-failures tests/clients/known_failures.toml --report report/clients

lint: $(INSTALLED)  ## Ruff, mypy and plain English, changing nothing; BASE=main holds the whole branch to the final budget
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m studies.plain
	$(BIN)/python -m studies.plain --change $(BASE)

format: $(INSTALLED)  ## Ruff's format and its safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)  ## Speed of the harness beside bare programs
	$(BIN)/python -m studies.speed

docs-installed: $(INSTALLED) $(DOCS)/.installed

docs: docs-installed  ## The documentation site in build/docs; a warning or a dead link is an error
	$(DOCS)/bin/sphinx-build --fresh-env --fail-on-warning --keep-going --quiet --jobs auto -c docs . build/docs

page-installed: $(INSTALLED) $(PAGE)/.installed

# The red run has a defect on purpose, so make takes no notice of its exit code.
page: page-installed docs  ## Reports and the site in headless Chromium: axe-core, dark, phone; needs chromium and npm
	rm -rf build/page; mkdir -p build/page/shots
	$(BIN)/equivtest run -q --profile smoke --subjects scale,rowwise_linear --report build/page/green
	$(BIN)/equivtest run -q --profile smoke --report build/page/red \
		--subjects rowwise_linear=tests.defects.linear.layers:output_differs_on_last_rank,scale=tests.defects.scale:scaled_by_every_rank || true
	PYTHONPATH=$(CURDIR)/$(PAGE) $(BIN)/python -m studies.page --shots build/page/shots build/page/green/report.html \
		build/page/red/report.html $(addprefix build/docs/,docs/index.html docs/tutorial/first-program.html docs/reference/subjects.html)

smoke-wheel: $(INSTALLED)  ## Build the wheel, install it beside .venv's packages, run it from an empty folder
	folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	$(BIN)/python -m build --no-isolation --wheel --outdir "$$folder/dist" .; \
	$(PYTHON) -m venv "$$folder/venv"; \
	"$$folder/venv/bin/python" -m pip install --quiet --no-deps -c constraints.txt "$$folder"/dist/*.whl; \
	site() { "$$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	site $(VENV) > "$$(site "$$folder/venv")/packages_of_main_environment.pth"; \
	mkdir "$$folder/empty"; cd "$$folder/empty"; \
	../venv/bin/equivtest run --profile smoke --subjects colwise_linear,rowwise_linear,zero3_fetch_all_gather,attention_block

clean:  ## Remove everything that make, the tests and the build leave, .venv included
	rm -rf .venv .venv-* .docs .page .releases .clients .deepspeed build dist report .equivtest .hypothesis .pytest_cache .mypy_cache .ruff_cache .coverage *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

# Beside .venv, whose packages it sees: the builder is no part of what the tests run in.
$(DOCS)/.installed: $(INSTALLED) constraints-docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet -c constraints.txt -r constraints-docs.txt
	site() { "$$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	echo "import site; site.addsitedir('$$(site $(VENV))')" > "$$(site $(DOCS))/packages_of_main_environment.pth"
	touch $@

$(PAGE)/.installed: $(INSTALLED) constraints-page.txt
	$(BIN)/python -m pip install --quiet --upgrade --target $(PAGE) -r constraints-page.txt
	npm install --silent --no-save --prefix $(PAGE) axe-core@$(AXE_VERSION)
	touch $@

# Beside .venv and not in it, so that releases lie side by side; its own operators are never built.
$(DEEPSPEED)/.installed: constraints-deepspeed.txt
	$(BIN)/python -m pip install --quiet --upgrade --target $(DEEPSPEED) -r constraints-deepspeed.txt
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(BIN)/python -m pip install --quiet --upgrade --target $(DEEPSPEED) \
		--no-deps --no-build-isolation deepspeed==$(DEEPSPEED_VERSION)
	touch $@

# An environment of its own, since torch brings libraries of its own: 6 GB for one that is built for CUDA.
$(RELEASE)/.installed: pyproject.toml constraints.txt
	test -n "$(VERSION)" || { echo 'name a release of torch: make release VERSION=2.15.0' >&2; exit 2; }
	$(PYTHON) -m venv $(RELEASE)
	sed -E '/^(torch|setuptools|sympy)==/d' constraints.txt > $(RELEASE)/constraints.txt
	$(RELEASE)/bin/python -m pip install --quiet -c $(RELEASE)/constraints.txt torch==$(VERSION) -e .
	touch $@

# Beside .venv too, and without what they ask for: torch is that of .venv, all else is in the file.
$(CLIENTS)/.installed: constraints-clients.txt
	$(BIN)/python -m pip install --quiet --upgrade --target $(CLIENTS) --no-deps --no-build-isolation \
		-r constraints-clients.txt
	touch $@

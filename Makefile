# Everything happens inside this folder: the environment is .venv, runs go to runs/.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
TEST   := $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: install demo demo-hospitals test test-all check bench guard docs clean
install: $(READY)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-cache-dir --disable-pip-version-check --editable '.[dev]'
	touch $@

demo: $(READY)     ## FedMix against FedAvg on embedded data: finds the hidden groups of clients
	$(BIN)/fedmix compare digits-permutation --algorithms fedmix,fedavg --seeds 0 --out runs/demo --overwrite

demo-hospitals: $(READY)  ## four real hospitals with missing values: FedMix against FedAvg, then predictions for one of them
	$(BIN)/fedmix compare heart-disease --algorithms fedmix,fedavg --seeds 0,1,2 --out runs/hospitals --overwrite
	$(BIN)/fedmix predict runs/hospitals/fedmix-seed0 --client 'Long Beach' --input src/fedmix/data/heart-disease.csv --out runs/hospitals/long-beach.csv --overwrite

test: $(READY)     ## the tests that CI runs, file by file in two processes
	$(TEST)

test-all: $(READY) ## and the long ones
	$(BIN)/python -m pytest -m 'slow or not slow'

check: $(READY)    ## lint, types, import contracts, tests: exactly what CI runs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(TEST)

bench: $(READY)    ## fedmix beside its peers (installed under .bench/), then how cost grows; half an hour
	$(BIN)/python benchmarks/peers.py
	$(BIN)/python benchmarks/growth.py

guard: $(READY)    ## fails if a round has become slow beside a plain loop; under a minute
	$(BIN)/python benchmarks/guard.py

docs: $(READY)     ## the documentation as a site: site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo site/index.html

clean:
	rm -rf $(VENV) .bench .pytest_tmp build dist site .cache src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

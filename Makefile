# Two commands on a fresh machine: `make demo` and `make test`. Nothing before them but Python >= 3.11 and make.
#
# torch goes in first and alone: with it present, pip fetches no other build. The default is the version the constraints
# file was made with. On a CUDA machine: make demo TORCH=torch
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
SCALE ?= cpu
SEED ?= 0
DEMO_OUT ?= runs/lsar.table1/$(SCALE)-seed$(SEED)

export HF_HUB_OFFLINE ?= 1

OLDEST ?= 5.18.0

.PHONY: setup demo test slow trl ray check oldest format choices readme clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'sidestream needs Python 3.11 or newer, this is ' + sys.version.split()[0])"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: setup  ## train every arm of LS-AR Table 1, end with a report; a second call goes on where the first was stopped
	$(BIN)/sidestream run lsar.table1 --scale $(SCALE) --seed $(SEED) --out $(DEMO_OUT) --resume

test: setup  ## the default suite
	$(BIN)/python -m pytest

slow: setup  ## the long tests
	$(BIN)/python -m pytest -m slow --timeout 1800

trl: setup  ## TRL's SFTTrainer on an attached model
	$(BIN)/python -m pytest -n 0 -m slow tests/test_trl.py

ray: setup  ## jobs on a cluster of local nodes, one of them killed in the middle of a training
	$(BIN)/python -m pytest -n 0 -m slow --timeout 600 tests/experiments/test_cluster.py

# An older transformers laid over the same environment: all else that it needs is there, torch above all.
oldest: setup $(VENV)/oldest-$(OLDEST)/.ready  ## the contract on the oldest supported transformers
	PYTHONPATH=$(abspath $(VENV))/oldest-$(OLDEST) $(BIN)/python -c "import transformers as t; assert t.__version__ == '$(OLDEST)', t"
	PYTHONPATH=$(abspath $(VENV))/oldest-$(OLDEST) $(BIN)/python -m pytest -q tests/test_contract.py tests/test_gradients.py \
		tests/test_saving.py tests/test_tracker.py tests/test_pinned.py tests/test_pinned_families.py tests/test_one_cache.py \
		tests/test_bases.py tests/test_trainer.py

$(VENV)/oldest-$(OLDEST)/.ready: $(VENV)/.ready
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(@D) "transformers==$(OLDEST)"
	touch $@

check: setup  ## style, types, architecture
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest tests/test_architecture.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

choices:  ## where a paper is silent or we deviate, and why
	@grep -rn "CHOICE(" src --include=*.py -A 3 | sed 's|^src/sidestream/||'

readme: setup  ## rewrite the tables of docs from the committed results files
	for page in docs/measurements.md docs/results/*.md; do $(BIN)/sidestream readme $$page results || exit 1; done

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist

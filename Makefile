# Two commands do everything on a fresh machine: make demo, make test.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test check model fixtures bench clean

demo: $(READY)
	$(BIN)/python examples/demo.py

test: check
	$(BIN)/python -m pytest -n auto

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Train the embedded models again: hours on a CPU. The recipe is training/README.md.
model: $(READY)
	$(BIN)/python -m training.recipe

fixtures: $(READY)
	$(BIN)/python -m training.fixtures fixtures

bench: $(READY)
	$(BIN)/python -m benchmarks.link_speed --out benchmarks/results

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .pic .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Two commands set up everything in .venv: `make quickstart` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: quickstart test lint embedded-model clean

quickstart: .venv/installed
	$(BIN)/python benchmarks/methods.py --config configs/quickstart.yaml \
		--save 2:4=SM=runs/quickstart/sm-2of4 --markdown runs/quickstart/table.md
	$(BIN)/python -m export.to_sparse runs/quickstart/sm-2of4 --overwrite

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Trains the tokenizer and the model in mrp_lightning/embedded/stdlib-llama; about an hour on 2 cores.
embedded-model: .venv/installed
	$(BIN)/python -m mrp_lightning.embedded.train_tokenizer runs/tokenizer
	$(BIN)/python -m mrp_lightning fit --config configs/train/text.yaml --config configs/train/llama.yaml \
		--trainer.callbacks.init_args.save_dir mrp_lightning/embedded/stdlib-llama

# constraints.txt holds the versions that were tested; pyproject.toml the ranges that should work.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv runs build dist

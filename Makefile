# Everything from a fresh clone, on a machine that has Python 3.10 or later and a C++ compiler:
#
#   make test            make the environment, build, run the tests
#   make demo            make the environment, build, compare PersFL, FedAvg and Ditto on digits
#   make help            all targets
#
#   ENV=path             use this existing virtual environment (with torch in it) instead of making .venv
#   TORCH=cpu            make the environment with a CPU-only torch, without torchvision
#   PYTHON=python3.12    the interpreter the environment is made with
#   PIP_FLAGS=...        more flags for pip, such as an index that has what yours has not

PYTHON ?= python3
TORCH ?= cuda
PIP_FLAGS ?=

# torchvision has no build that imports beside a CPU-only torch.
TORCH_cuda = torch==2.14.1 torchvision==0.29.1
TORCH_cpu = torch==2.13.0
ifeq ($(TORCH_$(TORCH)),)
$(error TORCH=$(TORCH) is not known; use TORCH=cuda or TORCH=cpu)
endif

ifdef ENV
VENV := $(ENV)
else
VENV := .venv$(if $(filter cpu,$(TORCH)),-cpu)
endif
BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check -q
WHEELS := build/wheels$(subst /,-,$(VENV))

# Warnings and register spills are errors; ptxas reports on every kernel.
STRICT_NVCC := -Werror=all-warnings -Xptxas=-v,-warn-spills,-Werror

# As many test processes as there are cores, each with one thread; the tests of threads ask for theirs.
WORKERS ?= $(shell getconf _NPROCESSORS_ONLN)
test flower abi sanitized sanitized-cpu gpu-check soak: export OMP_NUM_THREADS := 1

# Versions: constraints.txt.
TEST_TOOLS := pytest pytest-xdist hypothesis numpy
DEV_TOOLS := $(TEST_TOOLS) rich safetensors opacus peft timm tensorboard uplot-python pyte scikit-learn pandas ipykernel jupyter_client pybind11 ninja setuptools wheel matplotlib ruff mypy clang-format sphinx furo myst-parser

PYTHON_SOURCES := pfl_ext benchmarks docs examples python_tests setup.py .ci
NATIVE_SOURCES := $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
PACKAGE := $(shell find pfl_ext benchmarks -name '*.py') $(wildcard pfl_ext/reports/page/page.*) $(wildcard pfl_ext/data/digits.* pfl_ext/data/speeches.*) $(NATIVE_SOURCES) setup.py pyproject.toml README.md

.PHONY: help test demo site build lint browser flower abi sanitized sanitized-cpu thread-sanitized fuzz fuzz-files soak soak-flower cuda-check gpu-check gpu-report bench readme methods clean FORCE
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' $(MAKEFILE_LIST) | expand -t 14

# ---- the environment -------------------------------------------------------------------------------------------------

$(VENV)/tools: constraints.txt Makefile
ifndef ENV
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install $(PIP_FLAGS) -c constraints.txt $(TORCH_$(TORCH))
endif
	$(PIP) install $(PIP_FLAGS) -c constraints.txt $(DEV_TOOLS)
	@touch $@

# A wheel's name depends on the platform, so a stamp stands for it.
$(WHEELS)/built: $(VENV)/tools $(PACKAGE)
	@rm -rf $(WHEELS) && mkdir -p $(WHEELS)
	PFL_EXT_NVCC_FLAGS="$(STRICT_NVCC)" $(BIN)/python -m pip -v wheel --no-build-isolation --no-deps -w $(WHEELS) . > $(WHEELS)/log 2>&1 || { tail -n 60 $(WHEELS)/log; exit 1; }
	@grep -h '^ *pfl_ext: building' $(WHEELS)/log || true
	@touch $@

$(VENV)/installed: $(WHEELS)/built
	$(PIP) install --force-reinstall --no-deps $(WHEELS)/*.whl
	@touch $@

build: $(VENV)/installed ## make the environment, compile and install

# ---- what people run -------------------------------------------------------------------------------------------------

test: build ## all tests; on the GPU too where there is one
	$(BIN)/pytest -n $(WORKERS)

demo: build ## PersFL, FedAvg and Ditto on digits: table and plots in build/demo
	$(BIN)/pfl-ext info
	rm -rf build/demo
	$(BIN)/pfl-ext compare persfl fedavg ditto --data digits --partition ds1 --clients 10 --rounds 20 --lr 0.1 \
	  --seeds 0,1,2 --output build/demo

# Warnings are errors, also of links; then every file and anchor that a page names is looked for, and what it would load
# from elsewhere. Made anew: Sphinx says what is wrong with a page only when it reads it.
site: build ## the documentation as a site, in build/site; open build/site/index.html
	rm -rf build/site build/site.doctrees docs/generated
	$(BIN)/python -I -m sphinx -q -W --keep-going -b html -d build/site.doctrees docs build/site
	$(BIN)/python .ci/site_check.py build/site

# ---- what CI runs beside the tests -----------------------------------------------------------------------------------

lint: $(VENV)/tools ## ruff, mypy, clang-format
	$(BIN)/ruff check $(PYTHON_SOURCES)
	$(BIN)/ruff format --check $(PYTHON_SOURCES)
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(NATIVE_SOURCES)

# Without them these tests are skipped, with PFL_EXT_BROWSER=1, as in CI, refused.
browser: ## Chromium and its driver for the report's tests, by apt-get where this is root
	@if command -v chromium chromedriver; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	  apt-get -q update && apt-get -q install -y --no-install-recommends chromium chromium-driver; \
	else echo "the report's tests need chromium and chromedriver on PATH: apt-get install chromium chromium-driver, as root"; exit 1; fi

# One library, built once, under the oldest torch we can test and under the newest there is. CI leaves NEWEST= empty:
# `make test` runs the same tests under the pinned torch, and the newest is a large download.
OLDEST := .venv-oldest
NEWEST ?= .venv-newest

$(OLDEST)/tools: constraints.txt Makefile
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip --disable-pip-version-check -q install $(PIP_FLAGS) -c constraints.txt $(TORCH_cpu) $(TEST_TOOLS)
	@touch $@

.venv-newest/tools: constraints.txt Makefile
	test -x .venv-newest/bin/python || $(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip --disable-pip-version-check -q install $(PIP_FLAGS) -c constraints.txt -U torch $(TEST_TOOLS)
	@touch $@

abi: build $(OLDEST)/tools $(addsuffix /tools,$(NEWEST)) ## the built library unchanged under torch 2.13 and under the newest
	@for env in $(OLDEST) $(NEWEST); do \
	  $$env/bin/python -m pip --disable-pip-version-check -q install --force-reinstall --no-deps $(WHEELS)/*.whl || exit 1; \
	  $$env/bin/python -I -c "import hashlib, pathlib, torch, pfl_ext; from pfl_ext import _native; \
	library = pathlib.Path(pfl_ext.__file__).with_name('_C.abi3.so'); assert _native.status()['cpu'].loaded; \
	print('torch', torch.__version__, 'loads _C', hashlib.sha256(library.read_bytes()).hexdigest()[:16])" || exit 1; \
	  $$env/bin/pytest -q -n $(WORKERS) python_tests/ops || exit 1; done

# Flower brings 60 packages, 250 MB of them ray for its simulation, and needs Python 3.11: an environment of its own,
# with the torch and the test tools of $(OLDEST), which CI has made by then.
FLOWER_ENV := .venv-flower
FLOWER ?= 1.42.0
FLOWER_PIP := $(FLOWER_ENV)/bin/python -m pip --disable-pip-version-check -q install
SITE := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

$(FLOWER_ENV)/tools: $(OLDEST)/tools .ci/flower.txt Makefile
	test -x $(FLOWER_ENV)/bin/python || $(PYTHON) -m venv $(FLOWER_ENV)
	$(FLOWER_PIP) $(PIP_FLAGS) -c constraints.txt --no-deps -r .ci/flower.txt safetensors
	$(abspath $(OLDEST))/bin/python $(SITE) > $$($(FLOWER_ENV)/bin/python $(SITE))/torch-and-tools.pth
	@touch $@

ifeq ($(shell $(PYTHON) -c 'import sys; print(sys.version_info >= (3, 11))'),True)
flower: build $(FLOWER_ENV)/tools ## the tests of Flower with the real one, FLOWER=1.42.0
	$(FLOWER_PIP) $(PIP_FLAGS) --no-deps flwr==$(FLOWER)
	$(FLOWER_PIP) --force-reinstall --no-deps $(WHEELS)/*.whl
	# -P: not what is in this folder, which has no library, but what is installed.
	$(FLOWER_ENV)/bin/python -P -m pytest -q python_tests/flower
else
flower: ## the tests of Flower with the real one, FLOWER=1.42.0
	@echo "not run: Flower needs Python 3.11 or later, and $(PYTHON) is older"
endif

sanitized: build ## the emulated CUDA kernels under AddressSanitizer and UndefinedBehaviorSanitizer
	env $$($(BIN)/python python_tests/emulator/build.py --print-environment) PFL_EMULATOR_VARIANT=sanitized \
	  $(BIN)/pytest -n $(WORKERS) python_tests/emulator python_tests/common python_tests/cuda

# The CPU library in folders of their own, with the package beside it, as PYTHONPATH takes it. At -O1: a report names the
# line, and the tests take minutes. What is not the library's (torch, Python) is not instrumented.
SANITIZE_cpu := -fsanitize=address,undefined,float-cast-overflow -fno-sanitize=vptr \
  -fno-sanitize-recover=undefined,float-cast-overflow
SANITIZE_thread := -fsanitize=thread -pthread -include $(CURDIR)/.ci/thread_sanitizer.h
SANITIZED = build/sanitized-$*

build/sanitized-%/built: $(VENV)/tools $(PACKAGE) .ci/thread_sanitizer.h
	@rm -rf $(SANITIZED)/lib && mkdir -p $(SANITIZED)
	PFL_EXT_CUDA=0 PFL_EXT_CXX_FLAGS="-O1 -g1 -fno-omit-frame-pointer $(SANITIZE_$*)" \
	  $(BIN)/python setup.py -q build --build-temp $(SANITIZED)/objects --build-lib $(SANITIZED)/lib \
	  > $(SANITIZED)/log 2>&1 || { tail -n 60 $(SANITIZED)/log; exit 1; }
	@touch $@

# That it is this library which is loaded, and not the installed one: from a folder without a pfl_ext in it.
IS_SANITIZED := from pfl_ext import _native; assert _native.status()["cpu"].loaded; \
  assert "-fsanitize=" in _native.build_info()["cxx_flags"], "the installed library was loaded"

# Left out: what compiles (minutes in the compiler, none of them in the kernels).
sanitized-cpu: build/sanitized-cpu/built ## the op tests with the CPU library under AddressSanitizer and UndefinedBehaviorSanitizer
	export $$($(BIN)/python python_tests/emulator/build.py --print-environment) PYTHONPATH=$(CURDIR)/build/sanitized-cpu/lib; \
	  (cd build/sanitized-cpu && $(abspath $(BIN))/python -c '$(IS_SANITIZED)') && \
	  $(BIN)/pytest -q -n $(WORKERS) -k "not compile and not gradcheck" python_tests/ops

# Not in CI: half of it is in torch and Python, slowed down. -s: pytest would keep the reports of tests that pass to
# itself; the exit status is 66 where there was one. setarch: ThreadSanitizer does not start where addresses are drawn
# from too wide a range.
thread-sanitized: build/sanitized-thread/built ## the op tests that use threads, under ThreadSanitizer
	export LD_PRELOAD=$$($${CXX:-c++} -print-file-name=libtsan.so) OMP_NUM_THREADS=1 \
	  TSAN_OPTIONS="exitcode=66 report_signal_unsafe=0 suppressions=$(CURDIR)/.ci/thread_sanitizer.supp" \
	  PYTHONPATH=$(CURDIR)/build/sanitized-thread/lib; \
	  (cd build/sanitized-thread && setarch -R $(abspath $(BIN))/python -c '$(IS_SANITIZED)') && \
	  setarch -R $(BIN)/pytest -q -s -p no:xdist -k "(thread or large or long or instruction) and not given_back" python_tests/ops

# ISA=baseline, avx2 or avx512 for the kernels of that instruction set, plain for torch's own; all of them by default.
ISA ?= $(shell $(BIN)/python -I -c "from pfl_ext import _native; print(*_native.available_isas(), 'plain')" 2> /dev/null)
CASES ?= 100000
FILES ?= 5000
SEED ?= 0

fuzz: build ## every op against its definition in float64: CASES=100000 on each of ISA=..., SEED=0
	@mkdir -p build/fuzz
	for isa in $(ISA); do echo "== $$isa"; $(BIN)/python python_tests/fuzz/fuzz_ops.py --cases $(CASES) --seed $(SEED) \
	  --isa $$isa --findings build/fuzz/ops-$$isa.json || exit 1; done

fuzz-files: build ## FILES=5000 tampered checkpoints, partitions, archives and configurations, SEED=0
	@mkdir -p build/fuzz
	$(BIN)/python python_tests/fuzz/fuzz_files.py --cases $(FILES) --seed $(SEED) --findings build/fuzz/files.json

KILLS ?= 300

soak: build ## hundreds of runs killed, stopped, without disk, two in a folder, each resumed to the same bits
	$(BIN)/python python_tests/reliability/soak.py --kills $(KILLS)

# Minutes a run: each message starts a process that imports torch.
soak-flower: build $(FLOWER_ENV)/tools ## the server of a Flower deployment killed ten times, each run resumed to the same bits
	$(FLOWER_PIP) --force-reinstall --no-deps $(WHEELS)/*.whl
	$(FLOWER_ENV)/bin/python -P python_tests/reliability/soak_flower.py --kills 10

cuda-check: build ## no register spills, no stack frames, every op registered by the CUDA library
	$(BIN)/python .ci/cuda_check.py $(WHEELS)/log

# The installed CUDA library, unmodified, through torch's dispatcher on a simulated GPU: docs/gpu.md. SIMULATOR is the
# folder of a program fakegpu.py that runs Python so. First in the order of the calls, then with random orders of blocks,
# warps and threads and a check for races in global memory, then with torch's caching allocator, which graphs need and
# which alone knows torch's error for a memory that is full.
SIMULATOR ?=
GPU = FAKEGPU_CACHE=$(CURDIR)/build/simulator $(abspath $(BIN))/python $(abspath $(SIMULATOR))/fakegpu.py \
  --python $(abspath $(BIN))/python
GPU_TESTS := $(addprefix $(CURDIR)/python_tests/,ops optim federation engines/test_streams.py algorithms/test_devices.py \
  algorithms/test_gpu_waits.py benchmarks/test_gpu_cases.py benchmarks/test_gpu_traffic.py test_commands.py)
GPU_ORDERS := $(addprefix $(CURDIR)/python_tests/,ops optim algorithms/test_devices.py)
RUNS_CUDA := import torch; from pfl_ext import _native; library = _native.status()["cuda"]; \
  raise SystemExit(None if library.loaded and torch.cuda.is_available() else f"no CUDA library to run: {library.reason}")

# From a folder without a pfl_ext in it, so that the installed one is what runs.
gpu-check: build ## the CUDA library on a simulated GPU: ops, optimisers, all methods; SIMULATOR=folder
	@test -f "$(SIMULATOR)/fakegpu.py" || { echo "SIMULATOR='$(SIMULATOR)' has no fakegpu.py; name its folder"; exit 1; }
	@mkdir -p build/simulator && rm -rf build/gpu-check
	cd build/simulator && $(GPU) -c '$(RUNS_CUDA)'
	cd build/simulator && $(GPU) -m pytest -q -n $(WORKERS) -k cuda $(GPU_TESTS)
	cd build/simulator && FAKEGPU_SEED=1 FAKEGPU_GLOBAL_RACES=1 FAKEGPU_THREAD_SCHEDULE=1 \
	  $(GPU) -m pytest -q -n $(WORKERS) -k "cuda and not check and not compile and not graph" $(GPU_ORDERS)
	cd build/simulator && FAKEGPU_CACHING=1 $(GPU) -m pytest -q -n $(WORKERS) -k "cuda and (graph or running_out) and not compile" $(GPU_TESTS)
	cd build/simulator && $(GPU) -m pfl_ext compare persfl fedavg ditto scd plgu-lf --data digits --partition ds1 --clients 4 \
	  --rounds 1 --lr 0.1 --device cuda --output ../gpu-check

# For the owner of a GPU: the same tests there, under the toolkit's checker too where it is installed, and the race. What
# fails is written down and does not end it. With SIMULATOR it is a rehearsal of the same commands, small and by its name.
REPORT := build/gpu-$(if $(SIMULATOR),rehearsal,report)
ON_GPU = $(if $(SIMULATOR),FAKEGPU_CACHING=1 $(GPU),$(abspath $(BIN))/python)
REPORTED := $(if $(SIMULATOR),$(addprefix $(CURDIR)/python_tests/,optim ops/test_graphs.py),$(GPU_TESTS))

gpu-report: build ## on a real GPU: tests, compute-sanitizer, race; build/gpu-report.tar.gz is what to send back
	@rm -rf $(REPORT) && mkdir -p $(REPORT) build/simulator
	cd $(REPORT) && $(ON_GPU) -c '$(RUNS_CUDA)'
	cd $(REPORT) && $(ON_GPU) -m pfl_ext info > info.txt
	-nvidia-smi -q > $(REPORT)/nvidia-smi.txt 2>&1
	-cd $(REPORT) && $(ON_GPU) -m pytest -q -p no:cacheprovider -k cuda $(REPORTED) 2>&1 | tee tests.txt
	-cd $(REPORT) && if test -z "$(SIMULATOR)" && command -v compute-sanitizer > sanitizer.txt; then for tool in memcheck racecheck initcheck synccheck; do \
	  compute-sanitizer --tool $$tool $(abspath $(BIN))/python -m pytest -q -p no:cacheprovider -k "cuda and not check and not compile and not large" \
	  $(CURDIR)/python_tests/ops > $$tool.txt 2>&1; done; else echo "no compute-sanitizer" > sanitizer.txt; fi
	-cd $(REPORT) && $(ON_GPU) -m pfl_ext bench --device cuda $(if $(SIMULATOR),--shapes adapters --repeats 2) --output . \
	  > table.md 2> race.txt
	tar -czf $(REPORT).tar.gz -C build $(notdir $(REPORT))
	@echo "wrote $(REPORT).tar.gz"

# ---- measuring -------------------------------------------------------------------------------------------------------

FAMILIES := averaging spectral sharpness distillation proximal

bench: build ## all benchmarks at full size, into benchmarks/results
	for family in $(FAMILIES); do $(BIN)/pfl-ext bench $$family --output benchmarks/results || exit 1; done

readme: build ## the README's table and the pages of docs/benchmarks, from benchmarks/results
	for family in $(FAMILIES) federation; do \
	  $(BIN)/pfl-ext bench $$family --output benchmarks/results --readme docs/benchmarks/$$family.md || exit 1; done
	$(BIN)/pfl-ext bench federation --memory --output benchmarks/results --readme docs/benchmarks/federation.md
	$(BIN)/pfl-ext bench goals --output benchmarks/results --readme docs/benchmarks/index.md
	$(BIN)/pfl-ext bench goals --summary --output benchmarks/results --readme README.md

methods: build ## the tables of docs/methods.md, from the classes
	$(BIN)/pfl-ext methods --page docs/methods.md

clean: ## remove what was built; environments stay
	rm -rf build dist *.egg-info pfl_ext/*.so pfl_ext/_build.json $(VENV)/installed

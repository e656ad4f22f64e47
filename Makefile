# One command each, on a machine with make and Python 3.11 or 3.12:
#   make report   quick check, figures, every notebook executed and exported to out/reports
#   make test     ruff, mypy, pytest, notebooks as tests
#   make lab      JupyterLab          make quick    every op and backend, in seconds
#   make sweep    measure this GPU    make figures  redraw the recorded runs
#   make refresh  re-execute the committed notebooks, the README's table and its figure in place
# Each makes the environment in .venv first, once; `make clean-env` removes it.

VENV ?= .venv
BIN := $(VENV)/bin
ENV := $(VENV)/.installed
# The first of these that is a supported version; PYTHON=/path/to/python overrides.
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done)
# Where a CPU build of torch is looked for on Linux without an NVIDIA driver; empty: nowhere but pip's own index.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Test processes; a test machine has two cores, and each process computes on one.
WORKERS ?= 2

export OMP_NUM_THREADS ?= 1
export PYDEVD_DISABLE_FILE_VALIDATION := 1

.PHONY: env check test report lab quick sweep figures refresh clean-env

env: $(ENV)

$(ENV): environment.yml pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or 3.12 found; name one with PYTHON=/path/to/python."; exit 1; }
	@rm -f $@
	$(PYTHON) -m venv $(VENV)
	@sed -n 's/^ *- \([A-Za-z0-9._-]*==.*\)/\1/p' environment.yml > $(VENV)/pins.txt
	@grep '^torch==' $(VENV)/pins.txt > $(VENV)/torch.txt
	@index=; \
	if [ "$$(uname -s)" = Linux ] && [ -n "$(TORCH_INDEX)" ] && ! command -v nvidia-smi >/dev/null; then \
	  if $(BIN)/python -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1] + "/torch/", timeout=10)' "$(TORCH_INDEX)" 2>/dev/null; \
	  then index="--extra-index-url $(TORCH_INDEX)"; echo "No NVIDIA driver here: taking torch's CPU build from $(TORCH_INDEX)."; \
	  else echo "No NVIDIA driver here, and $(TORCH_INDEX) does not answer: pip picks torch's build (it may be the CUDA one, several GB)."; fi; \
	fi; \
	$(BIN)/pip install -q --disable-pip-version-check $$index -r $(VENV)/torch.txt
	$(BIN)/pip install -q --disable-pip-version-check -r $(VENV)/pins.txt
	$(BIN)/pip install -q --disable-pip-version-check --no-deps -e .
	@touch $@

check: $(ENV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check
	$(BIN)/pytest -q -n $(WORKERS) --dist loadgroup
	$(BIN)/pytest -q -n $(WORKERS) --dist loadfile -o addopts= --nbval --nbval-current-env \
	  --nbval-sanitize-with tests/notebooks/sanitize.cfg --nbval-cell-timeout=300 notebooks

quick: $(ENV)
	$(BIN)/python -m harness quick

sweep: $(ENV)
	$(BIN)/python -m harness sweep

figures: $(ENV)
	$(BIN)/python -m harness figures

report: quick figures
	$(BIN)/python -m harness.report html

refresh: $(ENV)
	$(BIN)/python -m harness.report refresh

lab: $(ENV)
	$(BIN)/jupyter lab notebooks

clean-env:
	rm -rf $(VENV)

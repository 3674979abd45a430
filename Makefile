# `make demo` and `make test` need Python 3.11 or newer and make; the rest they install into .venv, once.
# Another Python: make PYTHON=python3.12 test

FIND_PYTHON = for python in python3.12 python3.11 python3; do \
	  $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; \
	done
PYTHON ?= $(shell $(FIND_PYTHON))
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
RUN = .venv/bin/python
INSTALLED = .venv/installed-$(VERSION)

export PIP_DISABLE_PIP_VERSION_CHECK = 1
export PIP_REQUIRE_VIRTUALENV =

.PHONY: install demo test lint format parity benchmark clean

install: $(INSTALLED)

$(INSTALLED): constraints.txt pyproject.toml
	@test -n "$(VERSION)" || { echo "no Python 3.11 or newer found: make PYTHON=/path/to/python3.12 ..."; exit 1; }
	$(PYTHON) -m venv --clear .venv
	$(RUN) -m pip install --quiet --requirement constraints.txt
	$(RUN) -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(INSTALLED)
	$(RUN) examples/demo.py

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist worksteal

lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(INSTALLED)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

parity: $(INSTALLED)
	for config in examples/configs/*.yaml; do .venv/bin/duohead-parity $$config || exit 1; done

benchmark: $(INSTALLED)
	$(RUN) benchmarks/cpu.py

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

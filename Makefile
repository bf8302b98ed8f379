# The first command a newcomer runs is `make quickstart`, the second `make test`. Both set up what they need.
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: quickstart test test-slow lint clean

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP_INSTALL) torch
	$(VENV)/bin/python $(PIP_INSTALL) -e '.[dev]'
	touch $@

# The oldest transformers that the code supports.
$(OLDEST)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python $(PIP_INSTALL) torch
	$(OLDEST)/bin/python $(PIP_INSTALL) 'transformers==5.17.0' -e '.[dev]'
	touch $@

quickstart: $(VENV)/.ready  ## a real answer from a real model, plainly and with speculation; ARGS="--dtype float32"
	$(VENV)/bin/python -m assistgen.quickstart $(ARGS)

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test: lint $(OLDEST)/.ready  ## linters, all tests on the newest transformers, the exactness tests on the oldest
	$(VENV)/bin/pytest -m 'not slow'
	$(OLDEST)/bin/pytest -m 'exactness and not slow'

test-slow: $(VENV)/.ready  ## what needs the Qwen pair or Gemma
	$(VENV)/bin/python $(PIP_INSTALL) -e '.[quant]'
	$(VENV)/bin/pytest -m slow

clean:
	rm -rf $(VENV) $(OLDEST) .mypy_cache .pytest_cache .ruff_cache .hypothesis

# The first command a newcomer runs is `make quickstart`, the second `make test`. Both set up what they need.
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: quickstart demo chromium test test-slow lint clean

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

demo: $(VENV)/.ready  ## the chat demo on http://127.0.0.1:7860; ARGS="--model qwen2.5-coder-0.5b --port 8000"
	$(VENV)/bin/python $(PIP_INSTALL) -e '.[demo]'
	$(VENV)/bin/python -m demos.chat $(ARGS)

# The browser of the demo's tests. Where it can't be installed they are skipped and say so (but fail where CI=true).
SUDO := $(if $(filter 0,$(shell id -u)),,sudo -n)
chromium:
	command -v chromium >/dev/null || ! command -v apt-get >/dev/null || { $(SUDO) apt-get update -qq && $(SUDO) env DEBIAN_FRONTEND=noninteractive \
		apt-get install -y -qq --no-install-recommends chromium fonts-liberation >/dev/null; } || echo "chromium could not be installed"

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# The two side by side, a core each; what the second one prints comes at the end.
test: lint chromium $(OLDEST)/.ready  ## linters, all tests on the newest transformers, the exactness tests on the oldest
	@export OMP_NUM_THREADS=1; \
	$(OLDEST)/bin/pytest -m 'exactness and not slow' -p no:cacheprovider >$(OLDEST)/tests.log 2>&1 & oldest=$$!; \
	trap "kill $$oldest 2>/dev/null" INT TERM; \
	$(VENV)/bin/pytest -m 'not slow'; newest=$$?; \
	wait $$oldest; oldest=$$?; cat $(OLDEST)/tests.log; \
	exit $$((newest | oldest))

test-slow: $(VENV)/.ready  ## what needs the Qwen pair or Gemma
	$(VENV)/bin/python $(PIP_INSTALL) -e '.[quant]'
	$(VENV)/bin/pytest -m slow

clean:
	rm -rf $(VENV) $(OLDEST) .mypy_cache .pytest_cache .ruff_cache .hypothesis

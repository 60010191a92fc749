# install  a virtual environment outside the checkout, shared by all checkouts (scripts/environment.py)
# serve    the demo pair on http://127.0.0.1:30000;  make serve ARGS="--model-path ... --port ..."  for anything else
# test     lint, then every test
# lint     format, lint, types, imports
# bench    the short benchmark (about 15 minutes on two cores) and its page, build/bench/results.md;  make bench
#          BENCH_ARGS="micro" or "run --plan full --data FOLDER" for another

PYTHON ?= python3
ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?= run --plan short --write build/bench/results.md

VENV := $(shell $(PYTHON) scripts/environment.py path)
ifeq ($(VENV),)
$(error Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ...)
endif

# The environment may have been pointed at another checkout in the meantime: this one goes first.
RUN = PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(VENV)/bin

.PHONY: install serve test lint bench

install:
	@$(PYTHON) scripts/environment.py install

serve: install
	@$(RUN)/python -m sglang_ssd.launch_server $(ARGS)

lint: install
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .
	$(RUN)/mypy
	$(RUN)/lint-imports

test: lint
	$(RUN)/python -m pytest $(PYTEST_ARGS)

bench: install
	@$(RUN)/python -m sglang_ssd.bench $(BENCH_ARGS)

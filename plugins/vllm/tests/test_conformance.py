"""The engine holds all that it claims, in both modes; then the one in a process of its own ends."""

from __future__ import annotations

from typing import Any

import cases
import psutil

from rlsdk.testing.process.resources import children


class TestVllm(cases.InProcess):
    pass


class TestAsynchronous(cases.Asynchronous):
    """What the mode has a share in: how requests come in, run together, end and are held; how weights and their
    versions get to the core. The same workers sample in both modes: `make check-vllm-modes` holds this one to all."""

    # Each starts an engine. Workers are the same in both modes; how this one begins is in `test_processes`, how it ends
    # below.
    test_tensor_parallel = None
    test_sharded_update = None
    test_update_first = None
    test_replicas = None
    test_close = None
    test_model_configuration = None
    test_model_scaled = None
    test_model_tied = None
    test_model_capped = None
    test_model_float16 = None
    test_model_experts = None
    # How the sampler draws, what stops it, which parameter a tensor is served from.
    test_log_probs_filters = None
    test_filters = None
    test_min_p = None
    test_greedy = None
    test_distribution = None
    test_distribution_filtered = None
    test_distribution_responses = None
    test_distribution_sequences = None
    test_distribution_rare_tokens = None
    test_distribution_special_tokens = None
    test_length_responses = None
    test_independent_draws_seeds = None
    test_seed_values = None
    test_nothing_else_stops = None
    test_longest_prompt = None
    test_update_each_tensor = None


def test_closing_the_asynchronous_engine_ends_what_runs_and_its_core(labs: Any) -> None:
    """Of the engine that all tests of the mode share: this one is its last."""
    lab = labs(cases.Asynchronous)
    lab.drop_split()
    engine, processes = lab.engine, children()
    assert any("EngineCore" in " ".join(process.cmdline()) for process in processes)
    cases.ends_what_runs(lab, engine)
    assert not psutil.wait_procs(processes, timeout=60)[1]
    lab.drop()

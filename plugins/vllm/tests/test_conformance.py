"""The engine holds all that it claims, in both modes."""

from __future__ import annotations

import cases


class TestVllm(cases.InProcess):
    pass


class TestAsynchronous(cases.Asynchronous):
    # vLLM's workers are the same in both modes, and `test_weights` begins with no weights: both start an engine.
    test_tensor_parallel = None
    test_update_first = None

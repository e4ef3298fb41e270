"""The engine holds all that it claims, in both modes."""

from __future__ import annotations

import cases


class TestVllm(cases.InProcess):
    pass


class TestAsynchronous(cases.Asynchronous):
    # Each starts an engine. Workers are the same in both modes; how this one begins and ends, `test_weights` has.
    test_tensor_parallel = None
    test_update_first = None
    test_close = None

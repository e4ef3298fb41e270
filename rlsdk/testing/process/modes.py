"""Modes of torch and random generators: if an engine changes one, this affects all code of the process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def torch_modes() -> set[tuple[str, object]]:
    """Names and values of the modes."""
    return {
        ("inference mode", torch.is_inference_mode_enabled()),
        ("gradients", torch.is_grad_enabled()),
        ("autocast", torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")),
        ("anomaly detection", torch.is_anomaly_enabled()),
        ("default dtype", torch.get_default_dtype()),
        ("default device", str(torch.get_default_device())),
        ("deterministic", torch.are_deterministic_algorithms_enabled()),
        ("precision of products", torch.get_float32_matmul_precision()),
        ("threads", torch.get_num_threads()),
    }


def random_states() -> dict[str, object]:
    """States of the random generators of the process, by the name of the library."""
    known: Any = np.random.get_state()
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": (known[1].tolist(), known[2]),
        "random": random.getstate(),
    }


@contextmanager
def kept_modes(what: str, *, but: str = "") -> Iterator[None]:
    """Within this context no mode of torch may change for what follows, whether or not an error is raised in it.

    Args:
        what: name of the call, for the message.
        but: name of a mode that may change.

    Raises:
        AssertionError: a mode changed.
    """
    before = torch_modes()
    try:
        yield
    finally:
        changed = sorted(f"{name} is {value}" for name, value in torch_modes() - before if name != but)
        if changed:
            torch.set_default_dtype(torch.float32)  # so that the next requirement is not affected
            raise AssertionError(f"{what} changed torch for the whole process: {', '.join(changed)}")

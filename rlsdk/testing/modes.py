"""Global and thread-local modes of torch: if an engine changes one, this affects all code of the process."""

from __future__ import annotations

import torch


def torch_modes() -> set[tuple[str, object]]:
    """Names and values of the modes."""
    return {
        ("inference mode", torch.is_inference_mode_enabled()),
        ("gradients", torch.is_grad_enabled()),
        ("autocast", torch.is_autocast_enabled("cpu")),
        ("anomaly detection", torch.is_anomaly_enabled()),
        ("default dtype", torch.get_default_dtype()),
        ("default device", str(torch.get_default_device())),
        ("deterministic", torch.are_deterministic_algorithms_enabled()),
        ("threads", torch.get_num_threads()),
    }

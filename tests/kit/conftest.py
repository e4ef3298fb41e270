"""Tiny models, written once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import settings

from rlsdk.testing.process.models import write_tiny_model

settings.register_profile("rlsdk", deadline=None)
settings.load_profile("rlsdk")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folder of each tiny model."""
    root: Path = tmp_path_factory.mktemp("models")
    return {
        "qwen2": str(write_tiny_model(root / "qwen2", seed=1)),
        "llama": str(write_tiny_model(root / "llama", architecture="llama", tied=True, seed=2)),
        "qwen3": str(write_tiny_model(root / "qwen3", architecture="qwen3", seed=3)),
    }

"""Models that the tests of the rollout engine share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_cases import make_engine

from rlsdk.testing.process.models import write_tiny_model
from rlsdk.testing.process.reference import load_plain_model


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("qwen2") / "model")


@pytest.fixture(scope="session")
def served(qwen2: Path) -> Any:
    """One engine for tests that leave it as it was."""
    return make_engine(qwen2)


@pytest.fixture(scope="session")
def plain(qwen2: Path) -> Any:
    return load_plain_model(str(qwen2))

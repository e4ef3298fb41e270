"""One engine for all tests that need nothing special: it starts once, and has its first weights back before each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cases import make_engine, plain_model, state_of, whole_shards

from rlsdk.testing.models import write_tiny_model

os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    # vLLM's own modules warn about each other and about torch.
    config.addinivalue_line("filterwarnings", "ignore:::vllm.*")
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning")
    config.addinivalue_line("filterwarnings", "ignore::ResourceWarning")


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "qwen2", seed=1)


@pytest.fixture(scope="session")
def plain(qwen2: Path) -> Any:
    """The same model, in transformers."""
    return plain_model(qwen2)


@pytest.fixture(scope="session")
def started(qwen2: Path) -> Iterator[Any]:
    engine = make_engine(qwen2)
    yield engine
    engine.close()


@pytest.fixture
def served(started: Any, plain: Any) -> Any:
    """An engine that serves the first weights as version 0, awake and without work."""
    started.resume()
    started.wake()
    started.update_weights(whole_shards(state_of(plain)), 0)
    assert not started.samples
    return started

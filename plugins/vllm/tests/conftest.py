"""One engine of each mode for all tests that need nothing special: it starts once, and gets its first weights back
before each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cases import make_engine, plain_model, state_of, whole_shards

from rlsdk.testing.models import write_tiny_model
from rlsdk_vllm.engine import VllmRolloutEngine

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
def engines(qwen2: Path) -> Iterator[Callable[[bool], VllmRolloutEngine]]:
    """The engine of a mode (True: asynchronous), started when it is first asked for."""
    started: dict[bool, VllmRolloutEngine] = {}

    def engine(asynchronous: bool) -> VllmRolloutEngine:
        if asynchronous not in started:
            started[asynchronous] = make_engine(qwen2, asynchronous=asynchronous)
        return started[asynchronous]

    yield engine
    for one in started.values():
        one.close()


@pytest.fixture(params=[False, True], ids=["in process", "asynchronous"])
def served(request: pytest.FixtureRequest, engines: Any, plain: Any) -> Any:
    """An engine that serves the first weights as version 0, awake and without work."""
    return renewed(engines(request.param), plain)


@pytest.fixture
def in_process(engines: Any, plain: Any) -> Any:
    """As `served`, of the mode in which a test can look inside, and step by step."""
    return renewed(engines(False), plain)


def renewed(engine: Any, plain: Any) -> Any:
    engine.resume()
    engine.wake()
    engine.update_weights(whole_shards(state_of(plain)), 0)
    assert not engine.samples
    return engine

"""One engine for all tests that need nothing special: it starts once, and has its first weights back before each."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STAND_INS = str(Path(__file__).parent / "standins")
# Before anything imports SGLang, here and in every process that is started from here.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [STAND_INS, os.environ.get("PYTHONPATH")]))
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, STAND_INS)
sys.modules.pop("sitecustomize", None)
__import__("sitecustomize")

import pytest  # noqa: E402
from cases import make_engine, plain_model, state_of, whole_shards  # noqa: E402

from rlsdk.testing.models import write_tiny_model  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    # SGLang's own modules warn about each other and about torch.
    config.addinivalue_line("filterwarnings", "ignore:::sglang.*")
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

"""What rlsdk asks of every rollout engine; of this one, all that is not about weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_server import Server

from rlsdk.testing import RolloutConformance
from rlsdk.testing.process.models import write_tiny_model


@pytest.fixture(scope="module", autouse=True)
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A server of the model that the suite compares with."""
    folder = str(write_tiny_model(Path(tmp_path_factory.mktemp("model")) / "tiny", seed=1))
    with Server(folder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        TestOpenAi.model, TestOpenAi.options = folder, {"url": server.url, "timeout_s": 60.0}
        yield
        server.shutdown()


class TestOpenAi(RolloutConformance):
    backend = "openai"

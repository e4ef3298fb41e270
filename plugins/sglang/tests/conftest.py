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
from cases import Sglang  # noqa: E402

from rlsdk.testing.process.models import write_tiny_model  # noqa: E402
from rlsdk.testing.rollout.lab import RolloutLab  # noqa: E402
from rlsdk.testing.suites.requirements import MARK  # noqa: E402
from rlsdk_sglang import adapter  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    # SGLang's own modules warn about each other and about torch.
    config.addinivalue_line("filterwarnings", "ignore:::sglang.*")
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning")
    config.addinivalue_line("filterwarnings", "ignore::ResourceWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The last of them end the engines that tests share: `test_endings` the other, the suite its own.
    items.sort(key=lambda item: (item.get_closest_marker(MARK) is not None, item.path.name == "test_endings.py"))


@pytest.fixture(scope="session", autouse=True)
def _several_blocks() -> Iterator[None]:
    """Weights go to the schedulers in blocks of less than the embedding takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter, "STAGING_BYTES", 50_000)
        yield


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutLab]:
    """What all tests share; its engine starts when it is first asked for."""
    lab = Sglang.make_lab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.close()


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutLab]:
    """An engine of another model beside it: tied weights, norms of queries and keys, a vocabulary that is padded."""
    folder = tmp_path_factory.mktemp("other")
    (folder / "scratch").mkdir()
    model = write_tiny_model(folder / "model", architecture="qwen3", vocab_size=131, tied=True, seed=4)
    lab = RolloutLab(Sglang, model, folder / "scratch")
    yield lab
    lab.close()


@pytest.fixture(scope="class")
def rlsdk_lab(shared: RolloutLab) -> RolloutLab:
    """The requirements of the suite share the engine with the other tests."""
    renew(shared)
    return shared


@pytest.fixture(scope="session")
def qwen2(shared: RolloutLab) -> Path:
    """Folder of the model that is served."""
    return shared.folder


@pytest.fixture
def lab(shared: RolloutLab) -> RolloutLab:
    """A lab whose engine serves the first weights as version 0, awake and without work."""
    renew(shared)
    return shared


def renew(lab: Any) -> None:
    lab.engine.wake()
    lab.restore()
    lab.engine.resume()
    assert not lab.inner.samples

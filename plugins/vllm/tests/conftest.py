"""One engine of each mode for all tests that need nothing special: it starts once, and gets its first weights back
before each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cases import Asynchronous, InProcess

from rlsdk.interfaces import ModelSpec, RankContext, RolloutSpec
from rlsdk.testing import RolloutConformance
from rlsdk.testing.rollout.lab import RolloutLab
from rlsdk_vllm import adapter
from rlsdk_vllm.environment import prepare_environment

os.environ["HF_HUB_OFFLINE"] = "1"

Labs = Callable[[type[RolloutConformance]], RolloutLab]


def pytest_configure(config: pytest.Config) -> None:
    # vLLM's own modules warn about each other and about torch.
    config.addinivalue_line("filterwarnings", "ignore:::vllm.*")
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning")
    config.addinivalue_line("filterwarnings", "ignore::ResourceWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The last of them end the engines that all tests of a mode share.
    items.sort(key=lambda item: item.path.name == "test_conformance.py")


@pytest.fixture(scope="session", autouse=True)
def _several_blocks() -> Iterator[None]:
    """Weights go to other processes in blocks of less than the embedding takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter, "STAGING_BYTES", 50_000)
        yield


@pytest.fixture(scope="session", autouse=True)
def _architectures_are_inspected_here() -> Iterator[None]:
    """vLLM inspects each architecture that is new to the machine in a process of its own, which imports all of vLLM
    once more, and stores what it finds: a session meets seven. Devices, for whose sake it does so, are not touched."""
    prepare_environment(RankContext(role="rollout"), RolloutSpec(model=ModelSpec(path="")), InProcess.options)
    from vllm.model_executor.models import registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())
        yield


@pytest.fixture(scope="session")
def labs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Labs]:
    """What all tests of a mode share; its engine starts when it is first asked for."""
    made: dict[type[RolloutConformance], RolloutLab] = {}

    def lab_of(mode: type[RolloutConformance]) -> RolloutLab:
        if mode not in made:
            made[mode] = mode.make_lab(tmp_path_factory.mktemp("lab"))
        return made[mode]

    yield lab_of
    for one in made.values():
        one.close()


@pytest.fixture(scope="class")
def rlsdk_lab(request: pytest.FixtureRequest, labs: Labs) -> RolloutLab:
    """That of the mode which a conformance suite is of: its requirements share the engine with the other tests."""
    lab: RolloutLab = renewed(labs(Asynchronous if issubclass(request.cls, Asynchronous) else InProcess))
    return lab


@pytest.fixture(params=[InProcess, Asynchronous], ids=["in process", "asynchronous"])
def lab(request: pytest.FixtureRequest, labs: Labs) -> Any:
    """A lab whose engine serves the first weights as version 0, awake and without work."""
    return renewed(labs(request.param))


@pytest.fixture
def in_process(labs: Labs) -> Any:
    """As `lab`, of the mode in which a test can look inside, and step by step."""
    return renewed(labs(InProcess))


@pytest.fixture
def qwen2(labs: Labs) -> Path:
    """Folder of the model that the labs serve."""
    return labs(InProcess).folder


def renewed(lab: Any) -> Any:
    lab.engine.wake()
    lab.restore()
    lab.engine.resume()
    assert not lab.inner.samples
    return lab

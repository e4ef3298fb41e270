"""RolloutConformance: the requirements that every RolloutEngine must pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsdk.interfaces import Capability, RolloutEngine
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.testing.rollout.adapter_requirements import AdapterSyncRequirements
from rlsdk.testing.rollout.adapter_version_requirements import AdapterVersionRequirements
from rlsdk.testing.rollout.lab import RolloutLab
from rlsdk.testing.rollout.requirements.batch_invariance import BatchInvarianceRequirements
from rlsdk.testing.rollout.requirements.cancellation import CancellationRequirements
from rlsdk.testing.rollout.requirements.capacity import CapacityRequirements
from rlsdk.testing.rollout.requirements.configured_models import ConfiguredModelRequirements
from rlsdk.testing.rollout.requirements.continuation import ContinuationRequirements
from rlsdk.testing.rollout.requirements.distribution import DistributionRequirements
from rlsdk.testing.rollout.requirements.event_loop import EventLoopRequirements
from rlsdk.testing.rollout.requirements.events import EventRequirements
from rlsdk.testing.rollout.requirements.half_precision import HalfPrecisionRequirements
from rlsdk.testing.rollout.requirements.interruptions import InterruptionRequirements
from rlsdk.testing.rollout.requirements.kept_state import KeptStateRequirements
from rlsdk.testing.rollout.requirements.length import LengthRequirements
from rlsdk.testing.rollout.requirements.lifetime import LifetimeRequirements
from rlsdk.testing.rollout.requirements.processes import ProcessRequirements
from rlsdk.testing.rollout.requirements.prompt_log_probs import PromptLogProbRequirements
from rlsdk.testing.rollout.requirements.random_calls import RandomCallRequirements
from rlsdk.testing.rollout.requirements.sampling import SamplingRequirements
from rlsdk.testing.rollout.requirements.scheduling import SchedulingRequirements
from rlsdk.testing.rollout.requirements.sharded import ShardedRequirements
from rlsdk.testing.rollout.requirements.side_effects import SideEffectRequirements
from rlsdk.testing.rollout.requirements.sources import SourceRequirements
from rlsdk.testing.rollout.requirements.stale_cache import StaleCacheRequirements
from rlsdk.testing.rollout.requirements.start import StartRequirements
from rlsdk.testing.rollout.requirements.weights import WeightRequirements
from rlsdk.testing.rollout.settings import RolloutSettings
from rlsdk.testing.suites.requirements import NOT_CLAIMED, unmeasured


class RolloutConformance(
    ProcessRequirements,
    SamplingRequirements,
    DistributionRequirements,
    PromptLogProbRequirements,
    LengthRequirements,
    BatchInvarianceRequirements,
    ContinuationRequirements,
    SchedulingRequirements,
    EventLoopRequirements,
    CancellationRequirements,
    SourceRequirements,
    StaleCacheRequirements,
    KeptStateRequirements,
    WeightRequirements,
    CapacityRequirements,
    EventRequirements,
    SideEffectRequirements,
    InterruptionRequirements,
    StartRequirements,
    ConfiguredModelRequirements,
    HalfPrecisionRequirements,
    RandomCallRequirements,
    LifetimeRequirements,
    AdapterSyncRequirements,
    AdapterVersionRequirements,
    # First: an engine with several workers takes longest to start, and no other engine should run meanwhile.
    ShardedRequirements,
    RolloutSettings,
):
    """Subclass it with the name of a backend and run pytest.

    One engine serves all requirements without special needs; a requirement that fails ends the engine. Weights are
    replaced by `update_weights`, as in a run.
    """

    test_expert_parallel = unmeasured(Capability.EXPERT_PARALLEL)
    test_lora = unmeasured(Capability.LORA)
    test_routed_experts = unmeasured(Capability.ROUTED_EXPERTS)
    test_multimodal = unmeasured(Capability.MULTIMODAL)

    @classmethod
    def make_lab(cls, folder: Path) -> RolloutLab:
        (folder / "scratch").mkdir()
        model = Path(cls.model) if cls.model is not None else write_tiny_model(folder / "model", seed=1, sharpness=2.0)
        return RolloutLab(cls, model, folder / "scratch")

    @pytest.fixture
    def lab(self, rlsdk_lab: RolloutLab) -> RolloutLab:
        return rlsdk_lab

    @pytest.fixture
    def engine(self, lab: RolloutLab, request: pytest.FixtureRequest) -> Iterator[RolloutEngine]:
        """The shared engine, serving the first weights as version 0."""
        from rlsdk.testing.plugin import FAILED

        yield lab.engine
        if request.node.stash.get(FAILED, False):
            lab.drop()

    @pytest.fixture
    def changing(
        self, engine: RolloutEngine, lab: RolloutLab, request: pytest.FixtureRequest
    ) -> Iterator[RolloutEngine]:
        """The shared engine, for requirements that change its weights: the first weights are restored afterwards."""
        from rlsdk.testing.plugin import FAILED

        if not lab.spec.takes_weights:
            pytest.skip(f"{NOT_CLAIMED}takes_weights")
        yield engine
        if not request.node.stash.get(FAILED, False):
            try:
                lab.restore()
            except Exception:
                lab.drop()
                raise

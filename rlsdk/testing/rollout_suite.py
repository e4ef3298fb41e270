"""RolloutConformance: the requirements that every RolloutEngine must pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsdk.interfaces import Capability, RolloutEngine
from rlsdk.testing.models import write_tiny_model
from rlsdk.testing.requirements import NOT_CLAIMED, unmeasured
from rlsdk.testing.rollout_batch_invariance import BatchInvarianceRequirements
from rlsdk.testing.rollout_cancellation import CancellationRequirements
from rlsdk.testing.rollout_capacity import CapacityRequirements
from rlsdk.testing.rollout_configured_models import ConfiguredModelRequirements
from rlsdk.testing.rollout_continuation import ContinuationRequirements
from rlsdk.testing.rollout_distribution import DistributionRequirements
from rlsdk.testing.rollout_event_loop import EventLoopRequirements
from rlsdk.testing.rollout_events import EventRequirements
from rlsdk.testing.rollout_half_precision import HalfPrecisionRequirements
from rlsdk.testing.rollout_interruptions import InterruptionRequirements
from rlsdk.testing.rollout_kept_state import KeptStateRequirements
from rlsdk.testing.rollout_lab import RolloutLab
from rlsdk.testing.rollout_length import LengthRequirements
from rlsdk.testing.rollout_lifetime import LifetimeRequirements
from rlsdk.testing.rollout_processes import ProcessRequirements
from rlsdk.testing.rollout_random_calls import RandomCallRequirements
from rlsdk.testing.rollout_sampling import SamplingRequirements
from rlsdk.testing.rollout_scheduling import SchedulingRequirements
from rlsdk.testing.rollout_settings import RolloutSettings
from rlsdk.testing.rollout_sharded import ShardedRequirements
from rlsdk.testing.rollout_side_effects import SideEffectRequirements
from rlsdk.testing.rollout_sources import SourceRequirements
from rlsdk.testing.rollout_stale_cache import StaleCacheRequirements
from rlsdk.testing.rollout_start import StartRequirements
from rlsdk.testing.rollout_weights import WeightRequirements


class RolloutConformance(
    ProcessRequirements,
    SamplingRequirements,
    DistributionRequirements,
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

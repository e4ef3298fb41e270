"""Requirements: every claimed parallel split gives the results of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

from rlsdk.interfaces import Capability
from rlsdk.testing.suites.requirements import Measured, requirement
from rlsdk.testing.train.case_runner import whole
from rlsdk.testing.train.cases import Case, train_batch
from rlsdk.testing.train.lab import TrainLab, furthest_weight, whole_of
from rlsdk.testing.train.requirements.gradients import three_steps


class ParallelismRequirements:
    """Mixed into `TrainConformance`."""

    @requirement("parallel.data", needs=Capability.DATA_PARALLEL, basic=True)
    def test_split_data(self, lab: TrainLab, measured: Measured) -> None:
        """With rows split unevenly over two ranks, losses, gradient, weights and outputs are those of one rank; also if
        one rank has all rows."""
        case = split_case(lab, Capability.DATA_PARALLEL, default={})
        for name, changes in (
            ("all in one pass", {}),
            ("2 rows a pass", {"rows": 2}),
            ("an idle rank", {"lonely": True}),
        ):
            found = replace(case, **changes)
            lab.holds_to_plain(measured, lab.drive_split(found), found, name)

    @requirement("parallel.tensor", needs=Capability.TENSOR_PARALLEL, basic=True)
    def test_split_tensor(self, lab: TrainLab, measured: Measured) -> None:
        """With matrices split over two ranks, losses, gradient, weights and outputs are those of one rank."""
        self._holds(lab, measured, Capability.TENSOR_PARALLEL)

    @requirement("parallel.pipeline", needs=Capability.PIPELINE_PARALLEL, basic=True)
    def test_split_pipeline(self, lab: TrainLab, measured: Measured) -> None:
        """With layers split over two ranks, losses, gradient, weights and outputs are those of one rank."""
        self._holds(lab, measured, Capability.PIPELINE_PARALLEL)

    @requirement("parallel.context", needs=Capability.CONTEXT_PARALLEL, basic=True)
    def test_split_context(self, lab: TrainLab, measured: Measured) -> None:
        """With the tokens of a row split over two ranks, losses, gradient, weights and outputs are those of one
        rank."""
        self._holds(lab, measured, Capability.CONTEXT_PARALLEL)

    @requirement("parallel.expert", needs=Capability.EXPERT_PARALLEL, basic=True)
    def test_split_expert(self, lab: TrainLab, measured: Measured) -> None:
        """With experts split over two ranks, losses and gradient norm over three steps, and outputs after them, are
        those of one rank.

        Weights are not compared individually: checkpoints and transformers name those of experts differently.
        """
        case = replace(split_case(lab, Capability.EXPERT_PARALLEL), model=lab.expert_model)
        lab.holds_to_plain(measured, lab.drive_split(case), case, weights=False)

    @requirement("parallel.resume", needs=Capability.DATA_PARALLEL)
    def test_split_resume(self, lab: TrainLab, measured: Measured) -> None:
        """A checkpoint of two ranks continues exactly on two ranks."""
        folder = str(lab.new_folder("saved"))
        case = split_case(lab, Capability.DATA_PARALLEL, default={})
        steps = [*three_steps(), *three_steps()]
        on = lab.drive_split(replace(case, steps=steps, save=folder, save_after=3))
        again = lab.drive_split(replace(case, steps=steps[3:], load=folder))
        measured.equal("largest difference of weights", furthest_weight(whole(again), whole(on)), 0.0)

    @requirement("checkpoint.reshard", needs=Capability.RESHARD_ON_LOAD, basic=True)
    def test_reshard(self, lab: TrainLab, measured: Measured) -> None:
        """A checkpoint of two ranks loads on one, and the steps after it are the same except for rounding."""
        folder = str(lab.new_folder("saved"))
        case = split_case(lab, Capability.DATA_PARALLEL, default={})
        steps = [*three_steps(), *three_steps()]
        on = lab.drive_split(replace(case, steps=steps, save=folder, save_after=3))
        again = lab.drive(steps=steps[3:], load=folder)
        worst = furthest_weight(whole_of(again), whole(on))
        measured.at_most("largest difference of weights", worst, lab.suite.step_tolerance)

    def _holds(self, lab: TrainLab, measured: Measured, capability: Capability) -> None:
        case = split_case(lab, capability)
        for name, rows in (("all in one pass", None), ("2 rows a pass", 2)):
            found = replace(case, rows=rows)
            lab.holds_to_plain(measured, lab.drive_split(found), found, name)


def split_case(lab: TrainLab, capability: Capability, default: Mapping[str, Any] | None = None) -> Case:
    """A case whose options set this split."""
    given = lab.suite.splits.get(capability.value, default)
    if given is None:
        given = guessed(lab, capability)
    kind = lab.suite.registry().load_options(lab.spec)
    options = lab.options
    if given and kind is not None:
        options = replace(options, **given) if is_dataclass(options) else kind(**given)  # type: ignore[type-var]
    batch = train_batch(11, seed=80)
    return lab.case(steps=three_steps(), options=options, probe=(batch, ("log_probs",)))


def guessed(lab: TrainLab, capability: Capability) -> Mapping[str, Any]:
    """The field of the backend's options with the name of the capability, set to the size of the world."""
    kind = lab.suite.registry().load_options(lab.spec)
    names = {field.name for field in fields(kind)} if kind is not None and is_dataclass(kind) else set()
    for name in (capability.value, f"{capability.value}_size"):
        if name in names:
            return {name: lab.suite.world}
    pytest.skip(
        f"{capability.value} is claimed, and no option of {lab.suite.backend!r} is called so: set "
        f"splits = {{{capability.value!r}: {{OPTION: {lab.suite.world}}}}} in the suite's class"
    )

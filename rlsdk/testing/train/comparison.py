"""Repeats every call of a train engine in plain torch, and compares each loss, metric, norm, rate, output and weight,
in addition to the requirement's own checks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from rlsdk.interfaces import (
    Batch,
    CheckpointError,
    ForwardBackwardResult,
    Head,
    Objective,
    OptimSpec,
    OptimStepResult,
    Parallel,
    RankContext,
    TrainEngine,
    TrainSpec,
    WeightLayout,
    WeightShard,
)
from rlsdk.kit.memory.memory_parts import TRAIN_PARTS
from rlsdk.testing.train.cases import Case, Weighted
from rlsdk.testing.train.objectives import Comparing, Raising, Reporting, Unfit
from rlsdk.testing.train.plain_engine import CHECKPOINTS, PlainTrainEngine

T = TypeVar("T")
ADDITIVE = (Weighted, Comparing, Raising, Reporting, Unfit)
"""Objectives whose results do not depend on the split into micro-batches."""
LEAST_EPS = 1e-4
"""Smallest eps of AdamW: below it, rounding determines the step of a gradient that is 0 except for rounding."""
STRAY_SHARE = 0.001
"""Share of a tensor's elements that may differ."""
MOST_STEPS = 16
"""Number of steps after which rounding errors have grown too much to compare."""


def compared(engine: TrainEngine, case: Case, faults: list[str]) -> TrainEngine:
    """The engine, compared with plain torch if this gives the right results: one rank, float32, the checkpoint's
    weights (a head that it lacks is random), and an optimizer that does not amplify rounding."""
    optim = case.optim
    if not case.witness or engine.parallel != Parallel() or case.dtype != "float32" or case.random:
        return engine
    if optim is not None and optim.eps < LEAST_EPS:
        return engine
    if case.head is not Head.LM and not _has_head(Path(case.model)):
        return engine
    return ComparedTrainEngine(engine, PlainTrainEngine(case), case.tolerance, faults)


@functools.cache
def _has_head(folder: Path) -> bool:
    """Whether a checkpoint has a head with one output."""
    files: list[Any] = [safe_open(file, "pt") for file in folder.glob("*.safetensors")]
    return any(name.startswith("score.") for file in files for name in file.keys())  # noqa: SIM118


class ComparedTrainEngine(TrainEngine):
    """Forwards every call, and records results that differ from plain torch's."""

    def __init__(self, engine: TrainEngine, plain: PlainTrainEngine, tolerance: float, faults: list[str]) -> None:
        self.engine, self.tolerance, self.faults = engine, tolerance, faults
        self.plain: PlainTrainEngine | None = plain
        """None: the right results are no longer known."""
        self.num_calls = 0

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        self.engine.initialize(ctx, spec)

    @property
    def parallel(self) -> Parallel:
        return self.engine.parallel

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        self.num_calls += 1
        found = self.engine.forward(batch, outputs)
        expected = self._right(lambda plain: plain.forward(batch, outputs))
        if expected is not None:
            for name in outputs:
                # The rounding error of logits grows with their size.
                scale = min(batch.temperature, 1.0)
                self._near(f"{name} of forward", _furthest(found.get(name), expected[name]) * scale)
        return found

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        if not isinstance(objective, ADDITIVE):
            self.plain = None
        if isinstance(objective, Raising):
            return self._raising(batch, objective)
        found = self._called(lambda: self.engine.forward_backward(batch, objective))
        expected = self._right(lambda plain: plain.forward_backward(batch, objective))
        if expected is not None:
            self._near("loss", abs(found.loss - expected.loss) / max(abs(expected.loss), 1.0))
            if isinstance(objective, Weighted) and batch.num_rows:
                self._near("sums", _numbers_apart(found.sums, expected.sums))
                self._near("maxima", _numbers_apart(found.maxima, expected.maxima))
        return found

    def optim_step(self) -> OptimStepResult:
        found = self._called(self.engine.optim_step)
        expected = self._right(lambda plain: plain.optim_step())
        if expected is not None and self.plain is not None:
            self._equal("skipped", found.skipped, expected.skipped)
            if not expected.skipped:
                self._near("grad_norm, relative", abs(found.grad_norm - expected.grad_norm) / (expected.grad_norm or 1))
            self._near("lr, relative", abs(found.lr - expected.lr) / (expected.lr or 1))
            if self.plain.num_steps > MOST_STEPS:
                self.plain = None
        return found

    def layout(self) -> WeightLayout:
        return self.engine.layout()

    def shards(self) -> Iterator[WeightShard]:
        for shard in self.engine.shards():
            if self.plain is not None:
                whole = self.plain.tensors().get(shard.name)
                here = tuple(slice(at, at + size) for at, size in zip(shard.box.offset, shard.box.size, strict=True))
                expected = None if whole is None else whole.detach()[here]
                self._weights(f"weights of {shard.name}", shard.tensor, expected, self.plain)
            yield shard

    def save_checkpoint(self, path: Path) -> None:
        self._called(lambda: self.engine.save_checkpoint(path))
        CHECKPOINTS.pop(str(path), None)
        self._right(lambda plain: plain.save_checkpoint(path))

    def load_checkpoint(self, path: Path) -> None:
        self.num_calls += 1
        try:
            self.engine.load_checkpoint(path)
        except CheckpointError:
            raise  # the engine continues with what it had
        except Exception:
            self.plain = None
            raise
        if str(path) not in CHECKPOINTS:
            self.plain = None
        self._right(lambda plain: plain.load_checkpoint(path))

    def save_pretrained(self, path: Path) -> None:
        self._called(lambda: self.engine.save_pretrained(path))
        if self.plain is not None:
            written: dict[str, Tensor] = {}
            for file in path.glob("*.safetensors"):
                written |= load_file(file)
            tensors = self.plain.tensors()
            for name in tensors.keys() & written.keys():
                self._weights(f"{name} in the export", written[name], tensors[name].detach(), self.plain)
            self._equal("that an export has weights", bool(written), True)
            self._equal("that an export has its configuration", (path / "config.json").is_file(), True)

    def offload(self, parts: Sequence[str] = TRAIN_PARTS) -> None:
        self._called(lambda: self.engine.offload(parts))

    def onload(self, parts: Sequence[str] = TRAIN_PARTS) -> None:
        self._called(lambda: self.engine.onload(parts))

    def reset_optimizer(self, optim: OptimSpec) -> None:
        self._called(lambda: self.engine.reset_optimizer(optim))
        self._right(lambda plain: plain.reset_optimizer(optim))

    def close(self) -> None:
        self.plain = None
        self.engine.close()

    def _raising(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        """A call whose objective raised: it leaves no gradients."""
        try:
            found = self.engine.forward_backward(batch, objective)
        except Exception:
            self._forget_gradients()
            raise
        self.plain = None
        return found

    def _forget_gradients(self) -> None:
        if self.plain is not None:
            self.plain.model.zero_grad()

    def _right(self, call: Callable[[PlainTrainEngine], T]) -> T | None:
        """Plain torch's result; None: it is not known, or plain torch refuses what the engine accepted (a fault)."""
        if self.plain is None:
            return None
        try:
            return call(self.plain)
        except Exception as error:
            self.plain = None
            said = f"{type(error).__name__}: {error}"
            self.faults.append(f"call {self.num_calls}: plain torch refuses what the engine took ({said})")
            return None

    def _called(self, call: Callable[[], T]) -> T:
        """The engine's result; if the engine raises, the right results are no longer known."""
        self.num_calls += 1
        try:
            return call()
        except Exception:
            self.plain = None
            raise

    def _weights(self, what: str, found: Tensor, expected: Tensor | None, plain: PlainTrainEngine) -> None:
        """Compares weights. A few elements may differ by at most the size of the steps: AdamW makes a full step even of
        a gradient that is only rounding."""
        if expected is not None and found.shape == expected.shape and plain.num_steps and plain.optim is not None:
            apart = (found.detach().cpu().float() - expected).abs().flatten()
            strays = apart.topk(int(len(apart) * STRAY_SHARE)).indices
            strays = strays[apart[strays] <= 2 * plain.num_steps * plain.optim.lr]
            found = found.detach().cpu().float().flatten().index_copy(0, strays, expected.float().flatten()[strays])
            found = found.reshape(expected.shape)
        self._near(what, _furthest(found, expected))

    def _near(self, what: str, difference: float) -> None:
        if not difference <= self.tolerance:
            self.faults.append(f"call {self.num_calls}: {what} differs from plain torch by {difference:.3g}")

    def _equal(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            self.faults.append(f"call {self.num_calls}: {what} is {found}, in plain torch {expected}")


def _furthest(found: Tensor | None, expected: Tensor | None) -> float:
    """Largest difference of an element, relative for large ones; infinite if a tensor is missing, has another shape or
    has NaN."""
    if found is None or expected is None or found.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    worst = float((found.detach().cpu().float() - expected).abs().max() / expected.abs().max().clamp_min(1.0))
    return worst if math.isfinite(worst) else math.inf


def _numbers_apart(found: Mapping[str, float], expected: Mapping[str, float]) -> float:
    if found.keys() != expected.keys():
        return math.inf
    return max((abs(found[name] - value) / max(abs(value), 1.0) for name, value in expected.items()), default=0.0)

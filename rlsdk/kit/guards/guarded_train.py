"""Guards a TrainEngine: refuses calls that its state does not allow (offloaded parts, frozen model, closed)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlsdk.interfaces import (
    Batch,
    ConfigError,
    ForwardBackwardResult,
    ModelSpec,
    Objective,
    OptimSpec,
    OptimStepResult,
    Parallel,
    RankContext,
    RlsdkError,
    TrainEngine,
    TrainSpec,
    WeightLayout,
    WeightPart,
    WeightShard,
)
from rlsdk.kit.memory.memory_parts import TRAIN_PARTS, check_parts
from rlsdk.kit.ranks.progress import Advancing

if TYPE_CHECKING:
    from torch import Tensor


class GuardedTrainEngine(TrainEngine):
    """Refuses calls that are invalid in the engine's state, on every rank, and forwards all others; see `TrainEngine`
    for what an engine can rely on.

    Use of offloaded parts is refused even where offloading frees no memory (on a CPU), so that a run that works there
    works on a GPU too.
    """

    def __init__(self, engine: TrainEngine) -> None:
        self.engine = engine
        """The wrapped engine."""
        self.offloaded: set[str] = set()
        """Parts that are offloaded."""
        self.is_frozen = False
        self.is_closed = False
        self._role = "?"

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        self.is_frozen, self._role = spec.optim is None, ctx.role
        self.engine.initialize(ctx, spec)

    @property
    def parallel(self) -> Parallel:
        return self.engine.parallel

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        self._check_here("forward", "weights")
        return self.engine.forward(batch, outputs)

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        self._check_trained("forward_backward")
        self._check_here("forward_backward", "weights", "gradients")
        return self.engine.forward_backward(batch, Advancing(objective))

    def load_teacher(self, spec: ModelSpec, number: int = 0) -> None:
        self._check_trained("load_teacher")
        self.engine.load_teacher(spec, number)

    def optim_step(self) -> OptimStepResult:
        self._check_trained("optim_step")
        self._check_here("optim_step", *TRAIN_PARTS)
        return self.engine.optim_step()

    def layout(self) -> WeightLayout:
        self._check_here("layout")
        return self.engine.layout()

    def shards(self) -> Iterator[WeightShard]:
        self._check_here("shards", "weights")
        return self.engine.shards()

    def part_layout(self, part: WeightPart) -> WeightLayout:
        self._check_here("part_layout")
        return self.engine.part_layout(part)

    def part_shards(self, part: WeightPart) -> Iterator[WeightShard]:
        self._check_here("part_shards", "weights")
        return self.engine.part_shards(part)

    def save_checkpoint(self, path: Path) -> None:
        self._check_here("save_checkpoint", "weights", "optimizer")
        self.engine.save_checkpoint(path)

    def load_checkpoint(self, path: Path) -> None:
        self._check_here("load_checkpoint", *TRAIN_PARTS)
        self.engine.load_checkpoint(path)

    def save_pretrained(self, path: Path) -> None:
        self._check_here("save_pretrained", "weights")
        self.engine.save_pretrained(path)

    def forward_reference(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        self._check_here("forward_reference", "weights")
        return self.engine.forward_reference(batch, outputs)

    def keep_reference(self) -> None:
        self._check_here("keep_reference", "weights")
        self.engine.keep_reference()

    def moved_share(self) -> float:
        self._check_here("moved_share", "weights")
        return self.engine.moved_share()

    def offload(self, parts: Sequence[str] = TRAIN_PARTS) -> None:
        """See `TrainEngine`. Parts that are already offloaded are skipped.

        Raises:
            ConfigError: an unknown part.
        """
        check_parts("offload", parts, TRAIN_PARTS)
        self._check_here("offload")
        if leaving := [part for part in TRAIN_PARTS if part in parts and part not in self.offloaded]:
            self.engine.offload(leaving)
            self.offloaded |= set(leaving)

    def onload(self, parts: Sequence[str] = TRAIN_PARTS) -> None:
        """See `TrainEngine`. Parts that are already on the device are skipped.

        Raises:
            ConfigError: an unknown part.
        """
        check_parts("onload", parts, TRAIN_PARTS)
        self._check_here("onload")
        if coming := [part for part in TRAIN_PARTS if part in parts and part in self.offloaded]:
            self.engine.onload(coming)
            self.offloaded -= set(coming)

    def reset_optimizer(self, optim: OptimSpec) -> None:
        """See `TrainEngine`.

        Raises:
            ConfigError: `optim` is not an `OptimSpec`, or the model is frozen.
        """
        if not isinstance(optim, OptimSpec):
            raise ConfigError(f"reset_optimizer takes an OptimSpec, got {type(optim).__name__}")
        self._check_trained("reset_optimizer")
        self._check_here("reset_optimizer", *TRAIN_PARTS)
        self.engine.reset_optimizer(optim)

    def close(self) -> None:
        self.is_closed = True
        self.engine.close()

    def _check_trained(self, method: str) -> None:
        if self.is_frozen:
            raise ConfigError(
                f"{method}: the model of role {self._role!r} is frozen: it was built without an OptimSpec and can only "
                "run `forward`; give TrainSpec.optim to train it"
            )

    def _check_here(self, method: str, *parts: str) -> None:
        """Raises: RlsdkError: one of the parts is offloaded, or the engine is closed."""
        if self.is_closed:
            raise RlsdkError(f"{method}() was called after the engine of role {self._role!r} was closed")
        if away := [part for part in parts if part in self.offloaded]:
            raise RlsdkError(f"{method}: {away} of role {self._role!r} are offloaded; call onload({away}) first")

"""RolloutEngine: what serves a model. One object per replica."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence

from rlsdk.interfaces.capability import Capability
from rlsdk.interfaces.errors import UnsupportedCapabilityError
from rlsdk.interfaces.generation import GenerationOutput, GenerationRequest
from rlsdk.interfaces.model import RankContext, RolloutSpec
from rlsdk.interfaces.weights import SyncReceipt, WeightLayout, WeightShard


class RolloutEngine(ABC):
    """Order of calls: `initialize`, then `generate` and `update_weights` in any order, then `close`.

    An engine with tensor parallelism spreads its own workers over `RankContext.bundles`; the caller sees one object.
    `generate` is an asynchronous generator; every other method blocks. `abort`, `pause` and `resume` may come from any
    thread while `generate` is under way; the others come from the thread that runs it, between two of its samples.
    """

    @abstractmethod
    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        """Starts the engine. With `spec.load_weights` it serves version 0; without, it serves nothing yet.

        Raises:
            ConfigError: the model or the sizes cannot be served, with what could be.
        """

    @abstractmethod
    def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        """Yields each sample as it finishes, in any order: `n` per request, each exactly once.

        May be called while another call is under way (from the same event loop) by engines that claim
        `Capability.ABORT`; requests then share the engine.

        Raises:
            ConfigError: an empty prompt, a prompt longer than `max_model_tokens` less one, or a sampling field that
                needs a capability the engine lacks (`min_p`, `stop_strings`; a `seed` counts only where
                `Capability.SEED` is claimed). Nothing is generated then.
            WeightSyncError: the last update failed, or no weights have come yet.
        """

    @abstractmethod
    def layout(self) -> Sequence[WeightLayout]:
        """What the replica wants: one layout per place that weights are delivered to. An engine that loads whole
        tensors itself returns one, with a box per tensor; one with `Capability.SHARDED_UPDATE`, one per worker."""

    @abstractmethod
    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        """Replaces the weights: all or nothing.

        While samples run and are not paused, an engine either refuses with a WeightSyncError, before it touches
        anything and without harm to them, or lets each go on under the new weights, with versions and log-probs that
        say so. It takes the items one at a time (memory stays bounded by one bucket), loads them, drops every cache
        that was made with the old weights, and only then serves `version`. Items come in any order of names; those of
        one name come together. If anything fails the engine either still serves the old version whole, or refuses
        `generate` until the next successful update: never a mixture.

        Args:
            shards: values in any float dtype, on CPU or the engine's device; of tied tensors only the one that
                `layout()` holds.
            version: what outputs carry from now on.

        Raises:
            WeightSyncError: a tensor of `layout()` was not covered, one is unknown, a shape does not fit, or samples
                run and are not paused.
        """

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Ends these requests (None: all), also of a paused engine. Returns at once and takes effect before the next
        decoding step. Each sample is still yielded, with what it has (perhaps no token). Unknown ids are ignored.

        It means the calls of `generate` that have begun, which a call does when its first sample is asked for; one that
        is just being taken in is meant with all of its samples or with none. Calls that begin later are not touched."""
        raise UnsupportedCapabilityError(f"{type(self).__name__} does not support {Capability.ABORT.value!r}")

    def pause(self) -> None:
        """Stops decoding before the next step and keeps unfinished requests; calls of `generate` wait meanwhile."""
        raise UnsupportedCapabilityError(f"{type(self).__name__} does not support {Capability.PARTIAL_ROLLOUT.value!r}")

    def resume(self) -> None:
        """Goes on with what `pause` kept, under the weights now served: keys and values of older weights are computed
        anew, tokens and log-probs that were sampled stay as they are."""
        raise UnsupportedCapabilityError(f"{type(self).__name__} does not support {Capability.PARTIAL_ROLLOUT.value!r}")

    def sleep(self, level: int = 1) -> None:
        """Frees device memory: level 1 keeps weights on the host, level 2 drops them. No request may be under way."""
        raise UnsupportedCapabilityError(f"{type(self).__name__} does not support {Capability.SLEEP.value!r}")

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Takes memory back, in stages: `weights`, then (after the sync) `kv_cache`, so the peaks never add up."""
        raise UnsupportedCapabilityError(f"{type(self).__name__} does not support {Capability.SLEEP.value!r}")

    def close(self) -> None:  # noqa: B027 - a working default: many engines hold nothing that needs closing
        """Leaves no process, port, file or shared memory behind. Safe to call twice."""

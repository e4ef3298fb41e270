"""RolloutEngine: what serves a model. One object per replica."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence

from rlsdk.interfaces.capability import Capability
from rlsdk.interfaces.errors import UnsupportedCapabilityError
from rlsdk.interfaces.generation import GenerationOutput, GenerationRequest
from rlsdk.interfaces.model import RankContext, RolloutSpec
from rlsdk.interfaces.weights import Delivery, SyncReceipt, WeightLayout, WeightShard


class RolloutEngine(ABC):
    """Order of calls: `initialize`, then `generate` and `update_weights` in any order, then `close`.

    An engine with tensor parallelism spreads its own workers over `RankContext.bundles`; the caller sees one object.
    `generate` is an asynchronous generator; every other method blocks. `abort`, `pause`, `resume`, `num_decoded` and
    `kv_used` may come from any thread while `generate` is under way. The others come from the thread that runs it, from
    inside the running event loop, while calls of `generate` are suspended: an engine may not start or run an event loop
    in them.

    What may be asked of an engine, its host tracks (`rlsdk.kit.guarded_rollout`), so that no engine has to. It is never
    asked for: `generate` or `resume` while a part is asleep, or without whole weights (none have come yet, `sleep(2)`
    dropped them, an update failed); `update_weights` while the weights are asleep; `sleep` while a call of `generate`
    is under way; `wake` of what is awake; anything but `close` after `close`.
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
        `Capability.ABORT`; its requests then join those that are decoded. It returns to the event loop between decoding
        steps, so that other calls and blocking methods get their turn.

        A call may be left half-way: its caller closes the generator, or is cancelled. What is left of it is dropped
        then; when `aclose` returns it decodes nothing more, keeps no slot and is in the way of no update. What was
        yielded is the caller's: its arrays do not change afterwards.

        Raises:
            RlsdkError: logits are not finite: no sample is made of such, and the calls that meet them end.
            ConfigError: an empty prompt; prompt and `response_ids` that leave no room for one more token, by
                `max_model_tokens` or `max_tokens`; or a sampling field that needs a capability the engine lacks
                (`min_p`, `stop_strings`; a `seed` counts only where `Capability.SEED` is claimed). Nothing is
                generated then.
        """

    @abstractmethod
    def layout(self) -> Sequence[WeightLayout]:
        """What the replica wants: one layout per place that weights are delivered to. An engine that loads whole
        tensors itself returns one, with a box per tensor; one with `Capability.SHARDED_UPDATE`, one per worker that
        takes its own part (`WeightLayout.worker`): either all of them name a worker, or none does. A worker on
        another node than this process says so (`WeightLayout.is_apart`)."""

    @abstractmethod
    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        """Replaces the weights.

        While samples run and are not paused, an engine either refuses with a WeightSyncError, before it asks for the
        first item and without harm to them, or lets each go on under the new weights, with versions and log-probs that
        say so. It takes the items one at a time (memory stays bounded by one bucket), loads them, drops every cache
        that was made with the old weights, and only then serves `version`. Items come in any order of names; those of
        one name come together. A version is a name: the same one may come again with other weights, and a lower one.

        An item's tensor is cut along any dimensions, its memory may have gaps or be transposed, and it is the source's
        again as soon as the next item is asked for: an engine copies what it keeps. What the source raises comes out
        of `update_weights`. Values that are not finite may be refused by a WeightSyncError; an engine that takes them
        makes no samples of them (see `generate`), and serves as ever after the next update.

        All or nothing: once the first item was asked for, an error leaves the engine without weights. Its host refuses
        `generate` and `resume` until an update succeeds, so it may have written some of them in place.

        Args:
            shards: values in any float dtype, on CPU or the engine's device; of tied tensors only the one that
                `layout()` holds.
            version: what outputs carry from now on.

        Raises:
            WeightSyncError: a tensor of `layout()` was not covered, one is unknown, a shape does not fit, or samples
                run and are not paused.
        """

    def receive_weights(self, deliveries: Sequence[Delivery], version: int) -> SyncReceipt:
        """Replaces the weights as `update_weights` does, all or nothing, by having every worker take its own part in
        its own process, all of them at once. `rlsdk.kit.delivery` runs a delivery and checks what it brings.

        Asked only of engines whose `layout()` names workers; those still take whole tensors by `update_weights`.

        Args:
            deliveries: one per worker, in the order of `layout()`.
            version: what outputs carry from now on.

        Raises:
            WeightSyncError: as `update_weights`; or the copies of workers that hold the same differ.
        """
        raise UnsupportedCapabilityError(f"{type(self).__name__} does not support {Capability.SHARDED_UPDATE.value!r}")

    def num_decoded(self) -> int | None:
        """Tokens sampled since `initialize`, over all calls; None: unknown. It never blocks and costs next to nothing:
        hosts compare it with what it was some time ago to tell a slow engine from one that hangs."""
        return None

    def kv_used(self) -> float | None:
        """Share of the memory for keys and values that running samples hold, 0 to 1; None: unknown. It never blocks and
        costs next to nothing: hosts send fewer samples at once to a replica whose memory is full."""
        return None

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Ends these requests (None: all), also of a paused engine. Returns at once and takes effect before the next
        decoding step. Each sample is still yielded, with what it has (perhaps no token). Unknown ids are ignored.

        It applies to the calls of `generate` that have begun (a call begins when its first sample is asked for). A call
        that is being admitted is aborted whole or not at all. Calls that begin later are not touched."""
        raise UnsupportedCapabilityError(f"{type(self).__name__} does not support {Capability.ABORT.value!r}")

    def pause(self) -> None:
        """Stops decoding before the next step and keeps unfinished requests; calls of `generate` wait meanwhile."""
        raise UnsupportedCapabilityError(f"{type(self).__name__} does not support {Capability.PARTIAL_ROLLOUT.value!r}")

    def resume(self, *, keep_cache: bool = False) -> None:
        """Continues what `pause` kept, under the weights now served: keys and values of older weights are computed
        again, tokens and log-probs that were sampled stay as they are.

        Args:
            keep_cache: the samples that were paused go on with the keys and values that they have; no other sample
                sees them. Only asked of engines that claim `Capability.STALE_CACHE`.
        """
        raise UnsupportedCapabilityError(f"{type(self).__name__} does not support {Capability.PARTIAL_ROLLOUT.value!r}")

    def sleep(self, level: int = 1) -> None:
        """Frees device memory: level 1 keeps weights on the host, level 2 drops them. Parts of the engine may be asleep
        already, at the other level too."""
        raise UnsupportedCapabilityError(f"{type(self).__name__} does not support {Capability.SLEEP.value!r}")

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Takes memory back, in stages: `weights`, then (after the sync) `kv_cache`, so the peaks never add up."""
        raise UnsupportedCapabilityError(f"{type(self).__name__} does not support {Capability.SLEEP.value!r}")

    def close(self) -> None:  # noqa: B027 - a working default: many engines hold nothing that needs closing
        """Leaves no process, port, file or shared memory behind. Safe to call twice."""

"""RolloutEngine: serves a model. One object per replica."""

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

    An engine with tensor parallelism starts its own workers on `RankContext.bundles`; the caller sees one object.
    `generate` is an asynchronous generator; every other method blocks. `abort`, `pause`, `resume`, `num_decoded` and
    `kv_used` may be called from any thread while `generate` runs. The others are called on the thread that runs
    `generate`, inside the running event loop, while calls of `generate` are suspended: they must not start or run an
    event loop.

    The host checks the order of calls (`rlsdk.kit.guards.guarded_rollout`), so engines need not. It never calls:
    `generate` or `resume` while a part is asleep, or without complete weights (none have arrived yet, `sleep(2)`
    dropped them, an update failed); `update_weights` or `update_adapter` while the weights are asleep; `sleep` while a
    call of `generate` runs; `wake` for a part that is awake; anything but `close` after `close`.

    With `ModelSpec.adapter` (`Capability.ADAPTER_SYNC`), `layout` and `update_weights` are of the weights below the
    adapter, and weights are complete only with an adapter: after the start, after each `update_weights` and after
    `sleep(2)` the host calls `update_adapter` before anything is generated. `sleep(1)` keeps the adapter.
    """

    @abstractmethod
    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        """Starts the engine. With `spec.load_weights` it serves version 0; without, it has no weights yet.

        Raises:
            ConfigError: it cannot serve this model or these sizes (names what it can serve), or the files of the model
                lack a tensor that it would load.
        """

    @abstractmethod
    def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        """Yields each sample as it finishes, in any order: `n` per request, each exactly once. The engine chooses the
        order in which waiting samples begin.

        If the engine claims `Capability.ABORT`, `generate` may be called while another call runs (from the same event
        loop); the new requests are then decoded together with the running ones. It returns to the event loop between
        decoding steps, so that other calls and blocking methods can run; they also go on while this call's caller
        handles a sample.

        A caller may stop early: it closes the generator, or is cancelled. The engine then drops the unfinished samples:
        once `aclose` returns, the call decodes nothing more, holds no slot and blocks no update. Yielded outputs belong
        to the caller: their arrays do not change afterwards.

        Raises:
            RlsdkError: logits are not finite. They are never sampled from; the calls that they affect end.
            ConfigError: an empty prompt; prompt and `response_ids` that leave no room for one more token, by
                `max_model_tokens` or `max_tokens`; an `adapter_version` that is not kept; or a field that needs a
                capability the engine lacks (`min_p`, `stop_strings`, `prompt_log_probs`, `adapter_version`; without
                `Capability.SEED` a `seed` is ignored). Nothing is generated then, and other calls are not affected.
        """

    @abstractmethod
    def layout(self) -> Sequence[WeightLayout]:
        """The weights that the replica needs: one layout per destination. An engine that loads whole tensors itself
        returns one layout, with a box per tensor. An engine with `Capability.SHARDED_UPDATE` returns one per worker
        that receives its own part (`WeightLayout.worker`); either all layouts name a worker, or none does. For a worker
        on another node than this process, `WeightLayout.is_apart` is True. The same at every call, also while parts are
        asleep."""

    @abstractmethod
    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        """Replaces the weights.

        If samples are running and not paused, an engine either raises a WeightSyncError before it requests the first
        item, without affecting the samples, or continues each sample under the new weights, with matching versions and
        log-probs. It takes the items one at a time (memory stays bounded by one bucket), loads them, drops every cache
        that the old weights computed, and only then serves `version`. Names come in any order; all items of one name
        are consecutive. A version is only a label: the same or a lower one may come again with different weights.

        An item's tensor may be a slice along any dimensions, non-contiguous or transposed. The source reuses its memory
        when the next item is requested: an engine copies what it keeps. Exceptions of the source propagate out of
        `update_weights`. An engine may refuse non-finite values with a WeightSyncError; if it accepts them, it never
        samples from them (see `generate`), and works normally after the next update.

        All or nothing: an error after the first item was requested leaves the engine without weights. The host refuses
        `generate` and `resume` until an update succeeds, so loading in place is allowed.

        Args:
            shards: values in any float dtype, on CPU or the engine's device; of tied tensors only the one in
                `layout()`.
            version: the policy version of later outputs.

        Raises:
            WeightSyncError: a tensor of `layout()` is not covered, a tensor is unknown, a shape does not fit, or
                samples are running and not paused.
        """

    def receive_weights(self, deliveries: Sequence[Delivery], version: int) -> SyncReceipt:
        """Replaces the weights as `update_weights` does, all or nothing, but every worker receives its own part in its
        own process, in parallel. `rlsdk.kit.weights.delivery` runs a delivery and checks what arrives.

        Only called if `layout()` names workers; such engines must still accept whole tensors in `update_weights`.

        Args:
            deliveries: one per worker, in the order of `layout()`.
            version: the policy version of later outputs.

        Raises:
            WeightSyncError: as `update_weights`; or workers that hold the same box have different values.
        """
        raise UnsupportedCapabilityError(f"{type(self).__name__} does not support {Capability.SHARDED_UPDATE.value!r}")

    def adapter_layout(self) -> Sequence[WeightLayout]:
        """As `layout`, of the tensors of the adapter that the replica serves (`WeightPart.ADAPTER`), in the dtype in
        which it computes with them. One layout, without a worker."""
        raise UnsupportedCapabilityError(f"{type(self).__name__} does not support {Capability.ADAPTER_SYNC.value!r}")

    def update_adapter(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        """Replaces the adapter, and serves `version` with it; the weights below stay as they are. Otherwise as
        `update_weights`: shards, errors, all or nothing.

        If samples are running, an engine either raises a WeightSyncError before it requests the first item, or each
        of them finishes under the adapter that it began with, and says so by its versions. What was cached under an
        older adapter is never read for samples that begin later.

        With `Capability.ADAPTER_VERSIONS` the newest `RolloutSpec.adapter_versions` adapters stay: requests may name
        each of them, and none is refused because samples of those run. It is called as before, between two turns of the
        engine's loop, with all shards at hand: decoding stops for as long as it takes. A sample of an older version may
        still run when that version makes room for a new one; it finishes. A version that comes again replaces the
        adapter of that version. `update_weights` drops them all, and an engine may refuse it while samples run, also
        paused ones.

        Returns:
            A receipt with a fingerprint of every tensor of `adapter_layout`, over the memory that the model computes
            with: a tensor that no layer computes with has none.

        Raises:
            WeightSyncError: as `update_weights`.
        """
        raise UnsupportedCapabilityError(f"{type(self).__name__} does not support {Capability.ADAPTER_SYNC.value!r}")

    def num_decoded(self) -> int | None:
        """Tokens sampled since `initialize`, over all calls; None: unknown. Never blocks and is cheap: hosts poll it to
        tell a slow engine from a hanging one."""
        return None

    def kv_used(self) -> float | None:
        """Fraction of the KV cache that running samples use, 0 to 1; None: unknown. Never blocks and is cheap: hosts
        send fewer samples at once to a replica whose cache is full."""
        return None

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Ends these requests (None: all). Returns at once and takes effect before the next decoding step; a paused
        engine yields its samples in the pause. Each is still yielded, with what it has (perhaps no token). Unknown ids
        are ignored.

        It applies to the calls of `generate` that have begun (a call begins when its first sample is asked for). A call
        that is being admitted is aborted whole or not at all. Calls that begin later are not touched."""
        raise UnsupportedCapabilityError(f"{type(self).__name__} does not support {Capability.ABORT.value!r}")

    def pause(self) -> None:
        """Stops decoding before the next step and keeps unfinished requests; calls of `generate` wait meanwhile.
        Safe to call twice: one `resume` continues everything."""
        raise UnsupportedCapabilityError(f"{type(self).__name__} does not support {Capability.PARTIAL_ROLLOUT.value!r}")

    def resume(self, *, keep_cache: bool = False) -> None:
        """Continues what `pause` kept, under the current weights: the KV cache of older weights is recomputed, sampled
        tokens and log-probs stay unchanged.

        Args:
            keep_cache: paused samples continue with their existing KV cache; no other sample uses it. Only set for
                engines that claim `Capability.STALE_CACHE`.
        """
        raise UnsupportedCapabilityError(f"{type(self).__name__} does not support {Capability.PARTIAL_ROLLOUT.value!r}")

    def sleep(self, level: int = 1) -> None:
        """Frees device memory: level 1 keeps weights on the host, level 2 drops them. Parts of the engine may already
        be asleep, also at the other level."""
        raise UnsupportedCapabilityError(f"{type(self).__name__} does not support {Capability.SLEEP.value!r}")

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Allocates device memory again, in stages: `weights`, then (after the sync) `kv_cache`, so that the peaks do
        not add up."""
        raise UnsupportedCapabilityError(f"{type(self).__name__} does not support {Capability.SLEEP.value!r}")

    def close(self) -> None:  # noqa: B027 - a working default: many engines hold nothing that needs closing
        """Leaves no process, thread, port, file, shared or device memory behind. Calls of `generate` that still run, or
        are paused, end with an error. Safe to call twice, before `initialize`, and after an `initialize` that
        raised."""

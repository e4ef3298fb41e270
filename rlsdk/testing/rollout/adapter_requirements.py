"""Requirements: an adapter that is sent alone is served, by every layer and at once, and by nothing that began before.

The reference is plain transformers whose weights are `W + scale * B A`: no adapter library is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from rlsdk.interfaces import (
    AdapterSpec,
    Box,
    Capability,
    ConfigError,
    GenerationOutput,
    WeightShard,
    WeightSyncError,
    fingerprint,
)
from rlsdk.kit.guards.guarded_rollout import GuardedRolloutEngine
from rlsdk.testing.rollout.lab import RolloutLab, collect, whole_shards
from rlsdk.testing.rollout.plain_model import PlainModel
from rlsdk.testing.suites.requirements import Measured, requirement

ADAPTER = AdapterSpec(rank=8, alpha=6.0)
HEAD = AdapterSpec(rank=8, alpha=6.0, targets=("lm_head",))
MANY = 9
"""Versions one after the other: more than engines keep at once."""
SIZE = 0.1
"""Standard deviation of A and B."""


def values_of(engine: GuardedRolloutEngine, seed: int) -> dict[str, Tensor]:
    """Random A and B, as an engine's layout asks for them."""
    generator = torch.Generator().manual_seed(seed)
    metas = [meta for layout in engine.adapter_layout() for meta in layout.tensors]
    return {meta.name: torch.randn(meta.shape, generator=generator) * SIZE for meta in metas}


def with_adapter(
    state: Mapping[str, Tensor], values: Mapping[str, Tensor], spec: AdapterSpec = ADAPTER
) -> dict[str, Tensor]:
    """Weights with an adapter added."""
    made = dict(state)
    for name, a in values.items():
        module, _, kind = name.rpartition(".lora_")
        if kind == "A.weight":
            low = values[f"{module}.lora_B.weight"].double() @ a.double()
            made[f"{module}.weight"] = (state[f"{module}.weight"].double() + spec.scale * low).to(a.dtype)
    return made


class AdapterSyncRequirements:
    """Mixed into `RolloutConformance`."""

    @requirement("adapter.served", needs=Capability.ADAPTER_SYNC, since=(2, 1), basic=True)
    def test_adapter_served(self, lab: RolloutLab, measured: Measured) -> None:
        """An adapter is served completely, beside weights that came before it: log-probs are those of `W + scale * B
        A`, the receipt has a fingerprint of every tensor and the adapter's effect, and samples carry its version.
        `adapter_layout` lists A and B of every linear layer but the output layer, each whole."""
        requests = [lab.ask(f"r{at}", lab.prompt(8 + at, 210), 3, max_tokens=20) for at in range(2)]
        with adapting(lab) as engine:
            state, values = lab.changed(1), values_of(engine, 1)
            linears = {n.removesuffix(".weight") for n, t in state.items() if t.dim() == 2}
            linears = {n for n in linears if n.startswith("model.layers.")}
            named = {name.rpartition(".lora_")[0] for name in values}
            measured.none("layers without an adapter, or that are none", sorted(linears ^ named))
            engine.update_weights(whole_shards(state), 3)
            receipt = engine.update_adapter(whole_shards(values), 4)
            wanted = {name: fingerprint(t, Box.whole(tuple(t.shape))) for name, t in values.items()}
            measured.none("fingerprints that differ", [n for n in wanted if receipt.fingerprints.get(n) != wanted[n]])
            measured.equal("version", receipt.version, 4)
            measured.equal("bytes", receipt.num_bytes, sum(t.nbytes for t in values.values()))
            if receipt.effect is not None:
                measured.at_least("effect on logits", receipt.effect, 1e-3)
            outputs = lab.run(requests, engine)
            measured.none("other versions", [o.versions for o in outputs if {run.version for run in o.versions} != {4}])
            right = lab.plain.with_state(with_adapter(state, values))
            measured.at_most(
                "largest difference of log-probs", lab.worst(requests, outputs, right), lab.suite.tolerance
            )

    @requirement("adapter.each_layer", needs=Capability.ADAPTER_SYNC, since=(2, 1))
    def test_adapter_each_layer(self, lab: RolloutLab, measured: Measured) -> None:
        """An adapter that changes one layer alone takes effect, for every layer."""
        with adapting(lab) as engine:
            engine.update_weights(whole_shards(lab.base), 0)
            values, stale = values_of(engine, 2), []
            for at, name in enumerate(n for n in values if ".lora_B." in n):
                alone = {n: t if n == name or ".lora_A." in n else torch.zeros_like(t) for n, t in values.items()}
                engine.update_adapter(whole_shards(alone), at + 1)
                request = lab.ask("r", lab.prompt(12, 220 + at), 1, max_tokens=3)
                right = lab.plain.with_state(with_adapter(lab.base, alone))
                worst = lab.worst([request], lab.run([request], engine), right)
                if worst > lab.suite.tolerance:
                    stale.append(f"{name}: log-probs differ by {worst:.2g}")
            measured.none("layers without effect", stale)

    @requirement("adapter.replaced", needs=Capability.ADAPTER_SYNC, since=(2, 1))
    def test_adapter_replaced(self, lab: RolloutLab, measured: Measured) -> None:
        """Adapters that replace one another, more than an engine keeps at once, are each served at once: nothing that
        was cached under an older one is read, not even for an earlier prompt, and no request waits for one that has
        gone. A version may come again with other values."""
        prompt = lab.prompt(64, 230)
        requests = [lab.ask("whole", prompt, 2, max_tokens=6), lab.ask("longer", (*prompt, 9, 10), 1, max_tokens=6)]
        with adapting(lab) as engine:
            engine.update_weights(whole_shards(lab.base), 0)
            wrong = []
            for at, version in enumerate([*range(1, MANY), MANY - 1]):
                values = values_of(engine, 10 + at)
                engine.update_adapter(whole_shards(values), version)
                right = lab.plain.with_state(with_adapter(lab.base, values))
                worst = lab.worst(requests, lab.run(requests, engine), right)
                wrong += [f"version {version}: {worst:.2g}"] if worst > lab.suite.tolerance else []
            measured.none("versions whose log-probs differ", wrong)

    @requirement("adapter.running", needs=Capability.ADAPTER_SYNC, since=(2, 1))
    def test_adapter_running(self, lab: RolloutLab, measured: Measured) -> None:
        """An adapter that arrives while samples run is either refused before anything of it is read, or they finish
        under the one that they began with, and say so; later ones have the new one."""
        requests = [lab.ask(f"r{at}", lab.prompt(6, 240 + at), 2, max_tokens=96) for at in range(3)]
        with adapting(lab) as engine:
            engine.update_weights(whole_shards(lab.base), 0)
            first, second = values_of(engine, 30), values_of(engine, 31)
            engine.update_adapter(whole_shards(first), 1)
            read: list[str] = []

            def shards() -> Iterator[WeightShard]:
                for shard in whole_shards(second):
                    read.append(shard.name)
                    yield shard

            async def run() -> tuple[bool, list[GenerationOutput], list[GenerationOutput]]:
                task = await lab.under_way(requests, engine)
                refused = False
                try:
                    engine.update_adapter(shards(), 2)
                except WeightSyncError:
                    refused = True
                running = await task
                if refused:
                    engine.update_adapter(whole_shards(second), 2)
                return refused, running, await collect(engine, requests)

            refused, running, later = lab.wait(run())
            measured.record("refused while samples run", float(refused))
            measured.none("items read of an update that was refused", read if refused else [])
            for name, outputs, version, values in (("running", running, 1, first), ("later", later, 2, second)):
                other = [o.versions for o in outputs if {run.version for run in o.versions} != {version}]
                measured.none(f"other versions, {name}", other)
                worst = lab.worst(requests, outputs, lab.plain.with_state(with_adapter(lab.base, values)))
                measured.at_most(f"largest difference of log-probs, {name}", worst, lab.suite.tolerance)

    @requirement("adapter.kept", needs=Capability.ADAPTER_SYNC, since=(2, 1))
    def test_adapter_kept(self, lab: RolloutLab, measured: Measured) -> None:
        """`sleep(1)` keeps the adapter and the weights below it; after new weights, and after `sleep(2)`, an adapter
        that comes again is served beside them."""
        request = lab.ask("r", lab.prompt(9, 250), 2, max_tokens=12)
        with adapting(lab) as engine:
            engine.update_weights(whole_shards(lab.base), 0)
            values, state = values_of(engine, 40), lab.changed(4)
            engine.update_adapter(whole_shards(values), 1)
            right = lab.plain.with_state(with_adapter(lab.base, values))
            if Capability.SLEEP in lab.spec.capabilities:
                engine.sleep(1)
                engine.wake()
            worst = lab.worst([request], lab.run([request], engine), right)
            measured.at_most("largest difference after sleep", worst, lab.suite.tolerance)
            right = lab.plain.with_state(with_adapter(state, values))
            for name in ("new weights", "sleep(2)"):
                if name == "sleep(2)" and Capability.SLEEP in lab.spec.capabilities:
                    engine.sleep(2)
                    engine.wake()
                engine.update_weights(whole_shards(state), 2)
                engine.update_adapter(whole_shards(values), 2)
                worst = lab.worst([request], lab.run([request], engine), right)
                measured.at_most(f"largest difference after {name}", worst, lab.suite.tolerance)

    @requirement("adapter.failed", needs=Capability.ADAPTER_SYNC, since=(2, 1))
    def test_adapter_failed(self, lab: RolloutLab, measured: Measured) -> None:
        """An adapter with a tensor missing, unknown or of another shape is refused (WeightSyncError), nothing is served
        then, and the next one is served without the weights below it being sent again."""
        request = lab.ask("r", lab.prompt(9, 260), 2, max_tokens=12)
        with adapting(lab) as engine:
            engine.update_weights(whole_shards(lab.base), 0)
            values = values_of(engine, 50)
            last = list(values)[-1]
            damaged = {
                "missing": {n: t for n, t in values.items() if n != last},
                "unknown": {**values, "model.layers.0.other.lora_A.weight": values[last]},
                "another shape": {**values, last: values[last][:, :-1]},
            }
            accepted = []
            for name, wrong in damaged.items():
                try:
                    engine.update_adapter(whole_shards(wrong), 1)
                    accepted.append(name)
                except WeightSyncError:
                    pass
            measured.none("damaged adapters that were accepted", accepted)
            engine.update_adapter(whole_shards(values), 2)
            right = lab.plain.with_state(with_adapter(lab.base, values))
            worst = lab.worst([request], lab.run([request], engine), right)
            measured.at_most("largest difference of log-probs", worst, lab.suite.tolerance)

    @requirement("adapter.head", needs=Capability.ADAPTER_SYNC, since=(2, 1))
    def test_adapter_head(self, lab: RolloutLab, measured: Measured) -> None:
        """An adapter of the output layer is served, or refused when the engine starts (ConfigError): never ignored."""
        request = lab.ask("r", lab.prompt(9, 270), 2, max_tokens=12)
        try:
            with adapting(lab, HEAD) as engine:
                values = values_of(engine, 60)
                engine.update_weights(whole_shards(lab.base), 0)
                engine.update_adapter(whole_shards(values), 1)
                right: PlainModel = lab.plain.with_state(with_adapter(lab.base, values, HEAD))
                worst = lab.worst([request], lab.run([request], engine), right)
                measured.at_most("largest difference of log-probs", worst, lab.suite.tolerance)
        except ConfigError as error:
            measured.record("refused", 1)
            measured.none("refusals that do not name the field", [] if "model.lora.targets" in str(error) else [error])


@contextmanager
def adapting(
    lab: RolloutLab, spec: AdapterSpec = ADAPTER, *, adapter_versions: int = 1
) -> Iterator[GuardedRolloutEngine]:
    """The engine with an adapter; a requirement that fails on it ends it."""
    try:
        yield lab.adapting(spec, adapter_versions)
    except BaseException:
        lab.drop_adapting()
        raise

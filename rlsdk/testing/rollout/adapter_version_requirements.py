"""Requirements: versions of an adapter are served side by side, each request under the one that it names.

The reference is that of `adapter_requirements`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from rlsdk.interfaces import Capability, ConfigError, GenerationOutput, GenerationRequest
from rlsdk.kit.guards.guarded_rollout import GuardedRolloutEngine
from rlsdk.testing.rollout.adapter_requirements import ADAPTER, adapting, values_of, with_adapter
from rlsdk.testing.rollout.lab import RolloutLab, collect, whole_shards
from rlsdk.testing.suites.requirements import Measured, requirement

VERSIONS = 3
"""Versions that the engine is to keep."""


class AdapterVersionRequirements:
    """Mixed into `RolloutConformance`."""

    @requirement("adapter_versions.named", needs=Capability.ADAPTER_VERSIONS, since=(2, 1), basic=True)
    def test_adapter_versions_named(self, lab: RolloutLab, measured: Measured) -> None:
        """Each request is served under the version that it names, though newer ones were published meanwhile, in one
        call and side by side, and says so; one that names none has the newest. What was cached under one version is
        never read under another, also for an equal prompt."""
        with keeping(lab) as (engine, values):
            prompt = lab.prompt(24, 310)
            requests = [under(lab.ask(f"r{v}", prompt, 2, max_tokens=10), v) for v in (*values, None)]
            outputs = lab.run(requests, engine)
            measured.equal("samples", len(outputs), 2 * len(requests))
            for request in requests:
                version = request.adapter_version or VERSIONS
                check(lab, measured, request, outputs, version, values[version])

    @requirement("adapter_versions.running", needs=Capability.ADAPTER_VERSIONS, since=(2, 1))
    def test_adapter_versions_running(self, lab: RolloutLab, measured: Measured) -> None:
        """An adapter that arrives while samples of every version that is kept run is taken, and they go on and finish
        under theirs; it is served at once."""
        with keeping(lab) as (engine, values):
            requests = [
                under(lab.ask(f"r{v}", lab.prompt(6, 320 + v), 2, max_tokens=96), v) for v in range(1, VERSIONS + 1)
            ]
            values[VERSIONS + 1] = values_of(engine, 80)

            async def run() -> tuple[list[GenerationOutput], list[GenerationOutput]]:
                task = await lab.under_way(requests, engine)
                engine.update_adapter(whole_shards(values[VERSIONS + 1]), VERSIONS + 1)
                again = [under(replace(requests[-1], request_id=f"n{v}"), v) for v in (VERSIONS, VERSIONS + 1)]
                return await task, await collect(engine, again)

            running, later = lab.wait(run())
            for version, request in enumerate(requests, 1):
                check(lab, measured, request, running, version, values[version])
            for version in (VERSIONS, VERSIONS + 1):
                check(lab, measured, replace(requests[-1], request_id=f"n{version}"), later, version, values[version])

    @requirement("adapter_versions.kept", needs=Capability.ADAPTER_VERSIONS, since=(2, 1))
    def test_adapter_versions_kept(self, lab: RolloutLab, measured: Measured) -> None:
        """As many versions as the specification says are kept, the newest ones. A request that names another one is
        refused by name (ConfigError), and nothing of its call is generated. A version that comes again replaces the
        one of its name; new weights end all of them."""
        with keeping(lab) as (engine, values):
            for seed in (90, 91):
                values[VERSIONS + 1] = values_of(engine, seed)
                engine.update_adapter(whole_shards(values[VERSIONS + 1]), VERSIONS + 1)
            prompt = lab.prompt(9, 330)

            def fault(version: int) -> list[str]:
                requests = [lab.ask("newest", prompt), under(lab.ask("named", prompt), version)]
                try:
                    return [f"version {version}: {len(lab.run(requests, engine))} samples"]
                except ConfigError as error:
                    said = str(error)
                    return [] if "named" in said and "adapter_version" in said and str(version) in said else [said]

            measured.none("versions that are not kept, and not refused by name", [*fault(1), *fault(VERSIONS + 2)])
            for version in range(2, VERSIONS + 2):
                request = under(lab.ask("r", prompt, max_tokens=6), version)
                check(lab, measured, request, lab.run([request], engine), version, values[version])
            engine.update_weights(whole_shards(lab.base), VERSIONS + 1)
            engine.update_adapter(whole_shards(values[1]), VERSIONS + 2)
            measured.none("versions of before new weights", fault(VERSIONS + 1))


def under(request: GenerationRequest, version: int | None) -> GenerationRequest:
    """The request, under this version."""
    return replace(request, adapter_version=version)


def check(
    lab: RolloutLab,
    measured: Measured,
    request: GenerationRequest,
    outputs: Sequence[GenerationOutput],
    version: int,
    values: Mapping[str, Tensor],
) -> None:
    """Checks the samples of one request: their version, and their log-probs under this adapter."""
    own = [output for output in outputs if output.request_id == request.request_id]
    other = [output.versions for output in own if {run.version for run in output.versions} != {version}]
    measured.none(f"other versions, {request.request_id}", other)
    measured.equal(f"samples, {request.request_id}", len(own), request.n)
    worst = lab.worst([request], own, lab.plain.with_state(with_adapter(lab.base, values)))
    measured.at_most(f"largest difference of log-probs, {request.request_id}", worst, lab.suite.tolerance)


@contextmanager
def keeping(lab: RolloutLab) -> Iterator[tuple[GuardedRolloutEngine, dict[int, dict[str, Tensor]]]]:
    """The engine with as many versions as it keeps, numbered from 1, and their values."""
    with adapting(lab, ADAPTER, adapter_versions=VERSIONS) as engine:
        engine.update_weights(whole_shards(lab.base), 0)
        values = {version: values_of(engine, 70 + version) for version in range(1, VERSIONS + 1)}
        for version, low in values.items():
            engine.update_adapter(whole_shards(low), version)
        yield engine, values

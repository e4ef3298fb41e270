"""Commands of rlsdk without a cluster: the same configuration, trainer and engines, all of them in this process.

    python -m benchmarks.recipes.in_process train --config run.yaml --model m1 --trainer.run_dir r --trainer.run_name a

Takes half the processor time of a run of half a minute, and comes to the same numbers. `train` has no warm start.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from rlsdk.cli.train import resolve
from rlsdk.config import PairTraining, Role, RunConfig, dump_config, load_config, pair_roles, sft_optim_spec
from rlsdk.config.role_names import ACTOR, ROLLOUT
from rlsdk.registry import Registry
from rlsdk.trainer.assemble import Materials, build_materials, pair_stage, rl_stage, sft_stage
from rlsdk.trainer.events import RunView
from rlsdk.trainer.in_process import InProcessStore, start_in_process
from rlsdk.trainer.loop import Trainer
from rlsdk.trainer.roles import placement_of, roles
from rlsdk.trainer.run import export_model
from rlsdk.trainer.session import Session, sharding_manager, start_roles
from rlsdk.trainer.stage import Stage
from rlsdk.trainer.turns import DeviceTurns, shared_pools


def main(command: str, arguments: Sequence[str]) -> None:
    """One command; metrics go into the run's folder, and what is no reinforcement learning leaves `model/` there."""
    registry = Registry.discover()
    config = resolve(arguments, device="cpu").config if command == "train" else load_config([], arguments, registry)
    run = Path(config.trainer.run_dir) / str(config.trainer.run_name)
    run.mkdir(parents=True)
    table = table_of(command, config)
    session = start(config, table, registry)
    with closing(build_materials(config, registry, run, RunView(), rewarded=command == "train")) as materials:
        stage = stage_of(command, config, registry, materials, session)
        with closing(stage):
            text = dump_config(config)
            Trainer(stage, session, tokenizer=materials.tokenizer, config_text=text, keep_checkpoints=1).fit()
        if command != "train":
            export_model(session, materials.tokenizer, run / "model")


def table_of(command: str, config: RunConfig) -> Sequence[Role]:
    if command == "train":
        return roles(config, "cpu")
    if command == "sft":
        return [role.with_optim(sft_optim_spec(config)) for role in roles(config, "cpu", needed=[ACTOR])]
    kind = PairTraining(command)
    return pair_roles(config, kind, roles(config, "cpu", needed=kind.role_names))


def start(config: RunConfig, table: Sequence[Role], registry: Registry) -> Session:
    """The roles, and the way of the weights where samples are made."""
    turns = DeviceTurns(shared=shared_pools(placement_of(config.placement, [role.name for role in table], "cpu")))
    make = functools.partial(start_in_process, registry=registry, seed=config.trainer.seed)
    groups, store = start_roles(table, make, turns), InProcessStore()
    if ROLLOUT not in groups:
        return Session(roles=groups, turns=turns, cluster=store)
    wait_s = config.deadlines.sync_s
    manager = sharding_manager(config.sharding, registry, groups[ACTOR], groups[ROLLOUT], timeout_s=wait_s)
    return Session(roles=groups, turns=turns, cluster=store, manager=manager)


def stage_of(command: str, config: RunConfig, registry: Registry, materials: Materials, session: Session) -> Stage:
    if command == "train":
        return rl_stage(config, registry, materials, session)
    if command == "sft":
        return sft_stage(config, materials, session)
    return pair_stage(config, PairTraining(command), materials, session)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

"""`rlsdk train` without a cluster: the same configuration, trainer and engines, all of them in this process.

    python -m benchmarks.recipes.in_process --config run.yaml --model m1 --trainer.run_dir runs --trainer.run_name a

Starts in a third of the time on a busy machine, and comes to the same numbers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from rlsdk.cli.train import resolve
from rlsdk.config import dump_config
from rlsdk.config.role_names import ACTOR, ROLLOUT
from rlsdk.trainer.assemble import build_materials, rl_stage
from rlsdk.trainer.events import RunView
from rlsdk.trainer.in_process import InProcessStore, start_in_process
from rlsdk.trainer.loop import Trainer
from rlsdk.trainer.roles import placement_of, roles
from rlsdk.trainer.session import Session, sharding_manager, start_roles
from rlsdk.trainer.turns import DeviceTurns, shared_pools


def train(arguments: Sequence[str]) -> None:
    """One run of reinforcement learning, without a warm start; metrics go into the run's folder."""
    resolved = resolve(arguments, device="cpu")
    config, registry, view = resolved.config, resolved.registry, RunView()
    run = Path(config.trainer.run_dir) / str(config.trainer.run_name)
    run.mkdir(parents=True)
    table = roles(config, "cpu")
    turns = DeviceTurns(shared=shared_pools(placement_of(config.placement, [role.name for role in table], "cpu")))
    make = functools.partial(start_in_process, registry=registry, seed=config.trainer.seed)
    groups = start_roles(table, make, turns)
    manager = sharding_manager(
        config.sharding, registry, groups[ACTOR], groups[ROLLOUT], timeout_s=config.deadlines.sync_s
    )
    session = Session(roles=groups, turns=turns, cluster=InProcessStore(), manager=manager)
    with (
        closing(build_materials(config, registry, run, view)) as materials,
        closing(rl_stage(config, registry, materials, session)) as stage,
    ):
        text = dump_config(config)
        Trainer(stage, session, tokenizer=materials.tokenizer, config_text=text, keep_checkpoints=1).fit()


if __name__ == "__main__":
    train(sys.argv[1:])

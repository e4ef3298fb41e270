"""Engines that a script's launcher or command names become backends with their options."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsdk.migrate.draft import Draft, Fate
from rlsdk.migrate.read import DRAFTS, migrate, script_of
from rlsdk.migrate.writing import run_file, summary

COMMAND = "accelerate launch --config_file conf/split.yaml sft.py --learning_rate 1e-5 --gradient_accumulation_steps 2"
STAGE = "deepspeed_config:\n  zero_stage: 3\n  offload_optimizer_device: cpu\n"


def launched(folder: Path, held: str) -> Draft:
    (folder / "conf").mkdir()
    (folder / "conf" / "split.yaml").write_text(held)
    (folder / "scripts").mkdir()
    (folder / "scripts" / "run_sft.sh").write_text(COMMAND)
    return migrate(folder / "scripts" / "run_sft.sh")


def test_a_launcher_file_names_the_backend_and_the_devices(tmp_path: Path) -> None:
    draft = launched(tmp_path, "distributed_type: DEEPSPEED\nnum_machines: 2\nnum_processes: 8\n" + STAGE)
    expected = {
        "train.backend": "deepspeed",
        "train.deepspeed.zero_stage": 3,
        "train.deepspeed.offload_optimizer": True,
        "placement.devices_per_node": 4,
        "placement.num_nodes": 2,
        "sft.rows_per_step": 8 * 8 * 2,  # rows of a device, by TRL's default, x devices x accumulated
    }
    assert {path: draft.fields.get(path) for path in expected} == expected
    (row,) = [row for row in draft.rows if row.name == "accelerate.config_file"]
    assert row.fate is Fate.OTHERWISE


@pytest.mark.parametrize(
    ("held", "named"),
    [
        ("distributed_type: FSDP\nnum_processes: 2\nparallelism_config:\n  parallelism_config_tp_size: 2\n", "tp_size"),
        (
            "distributed_type: DEEPSPEED\nnum_processes: 2\nparallelism_config:\n  parallelism_config_sp_size: 2\n",
            "sp_size",
        ),
        ("distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  zero_stage: 0\n", "zero_stage 0"),
    ],
)
def test_what_a_launcher_file_has_alone_is_refused(tmp_path: Path, held: str, named: str) -> None:
    draft = launched(tmp_path, held)
    (row,) = [row for row in draft.rows if row.name == "accelerate.config_file"]
    assert row.fate is Fate.REFUSED
    assert named in row.why
    assert named in run_file(draft)


@pytest.mark.parametrize("kind", ["cp", "sp"])
def test_a_launcher_files_split_of_rows_is_taken_over(tmp_path: Path, kind: str) -> None:
    held = f"num_processes: 4\nparallelism_config:\n  parallelism_config_{kind}_size: 2\n"
    draft = launched(tmp_path, f"distributed_type: FSDP\n{held}  parallelism_config_dp_shard_size: 2\n")
    (row,) = [row for row in draft.rows if row.name == "accelerate.config_file"]
    assert row.fate is Fate.OTHERWISE
    assert "train.fsdp.context_parallel: 2" in row.fields
    assert draft.fields["train.fsdp.context_parallel"] == 2
    # Only those that hold different rows count: 8 rows of TRL's default x 2 of 4 devices x 2 accumulated.
    assert draft.fields["sft.rows_per_step"] == 8 * 2 * 2


def test_a_launcher_file_that_is_not_there_is_named_with_what_is_not_known(tmp_path: Path) -> None:
    script = tmp_path / "run_sft.sh"
    script.write_text(COMMAND)
    draft = migrate(script)
    assert "train.backend" not in draft.fields
    (row,) = [row for row in draft.rows if row.name == "accelerate.config_file"]
    assert row.fate is Fate.REFUSED
    assert "give --devices N" in row.why


OPENRLHF = (
    "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m --data.prompt_dataset rows.jsonl "
    "--actor.num_nodes 1 --actor.num_gpus_per_node 4 --ref.num_nodes 1 --ref.num_gpus_per_node {ref} "
    "--vllm.num_engines {engines} --vllm.tensor_parallel_size 2 --vllm.enforce_eager {colocate} --ds.zero_stage {stage}"
)


def openrlhf(**sizes: object) -> Draft:
    given = {"ref": 4, "engines": 2, "colocate": "--train.colocate_all", "stage": 3, **sizes}
    script = script_of(OPENRLHF.format(**given), "run.sh")
    return DRAFTS[script.peer](script)


def fates(draft: Draft) -> dict[str, Fate]:
    return {row.name: row.fate for row in draft.rows}


def test_roles_that_share_the_devices_of_the_actor_are_taken_over() -> None:
    draft = openrlhf()
    assert draft.fields["train.backend"] == "deepspeed"
    assert draft.fields["train.deepspeed.zero_stage"] == 3
    assert draft.fields["rollout.vllm.enforce_eager"] is True
    shared = ("ref.num_nodes", "ref.num_gpus_per_node", "vllm.num_engines")
    assert {fates(draft)[name] for name in shared} == {Fate.TAKEN}
    assert summary(draft)[Fate.REFUSED] == 0


@pytest.mark.parametrize(
    ("sizes", "name", "fate"),
    [
        ({"ref": 2}, "ref.num_gpus_per_node", Fate.DECIDED),
        ({"engines": 1}, "vllm.num_engines", Fate.DECIDED),
        ({"colocate": ""}, "vllm.num_engines", Fate.DECIDED),
        ({"colocate": ""}, "ref.num_nodes", Fate.DECIDED),
        ({"stage": 0}, "ds.zero_stage", Fate.REFUSED),
    ],
)
def test_other_places_are_not_called_the_same(sizes: dict[str, object], name: str, fate: Fate) -> None:
    assert fates(openrlhf(**sizes))[name] is fate


def test_options_of_an_engine_are_taken_over() -> None:
    text = "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name={} {}"
    names = "actor_rollout_ref.rollout.enforce_eager=True actor_rollout_ref.rollout.max_num_batched_tokens=2048"
    held = DRAFTS["verl"](script_of(text.format("vllm", names), "run.sh"))
    assert held.fields["rollout.vllm.enforce_eager"] is True
    assert held.fields["rollout.vllm.max_batched_tokens"] == 2048
    other = fates(DRAFTS["verl"](script_of(text.format("sglang", names), "run.sh")))
    assert other["actor_rollout_ref.rollout.enforce_eager"] is Fate.DECIDED


def test_devices_that_split_rows_are_taken_over() -> None:
    """verl counts the tokens of a pass on each of them."""
    text = "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.ulysses_sequence_parallel_size={} {}"
    dynamic = "actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1000"
    held = DRAFTS["verl"](script_of(text.format(4, dynamic), "run.sh"))
    assert held.fields["train.backend"] == "fsdp"
    assert held.fields["train.fsdp.context_parallel"] == 4
    assert held.fields["train.micro_batch_tokens"] == 4 * 1000
    megatron = f"actor_rollout_ref.actor.strategy=megatron {dynamic}"
    other = DRAFTS["verl"](script_of(text.format(4, megatron), "run.sh"))
    assert fates(other)["actor_rollout_ref.actor.ulysses_sequence_parallel_size"] is Fate.REFUSED
    assert other.fields["train.micro_batch_tokens"] == 1000


def test_a_ring_names_the_backend_that_splits_rows() -> None:
    text = OPENRLHF.format(ref=4, engines=2, colocate="--train.colocate_all", stage=3)
    script = script_of(f"{text} --ds.ring_attn_size 2", "run.sh")
    held = DRAFTS[script.peer](script)
    assert held.fields["train.backend"] == "fsdp"
    assert held.fields["train.fsdp.context_parallel"] == 2
    assert not any(path.startswith("train.deepspeed") for path in held.fields)
    assert (fates(held)["ds.ring_attn_size"], fates(held)["ds.zero_stage"]) == (Fate.OTHERWISE, Fate.DECIDED)

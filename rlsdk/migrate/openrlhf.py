"""OpenRLHF: the flags of its commands, of today and of before, as fields of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsdk.migrate.common import (
    SHARDED,
    AdapterNames,
    check_group,
    put_adapter,
    put_devices,
    put_rewards,
    put_schedule,
    put_warmup,
)
from rlsdk.migrate.draft import Draft, Fate, Script
from rlsdk.migrate.openrlhf_objective import put_objective
from rlsdk.migrate.openrlhf_tables import DECIDED, DEFAULTS, REFUSED, SAME

PEER = "OpenRLHF"
ADAPTER = AdapterNames(
    rank="ds.lora.rank", alpha="ds.lora.alpha", targets="ds.lora.target_modules", dropout="ds.lora.dropout"
)
ENGINE_FLAG = "vllm.num_engines"


def draft_of(script: Script) -> Draft:
    """The run file of a command's settings, with a row for each."""
    draft = Draft(script=script, defaults=DEFAULTS[script.command])
    _model_and_data(draft)
    if script.command == "train":
        _sampled(draft)
    else:
        _rows(draft)
    put_adapter(draft, ADAPTER)
    _sharding(draft)
    _shared_devices(draft)
    _saving(draft)
    draft.same(SAME)
    draft.decide(DECIDED)
    draft.refuse(REFUSED)
    draft.done()
    return draft


ZERO: Mapping[str, str] = {
    "ds.zero_stage": "train.deepspeed.zero_stage",
    "ds.adam_offload": "train.deepspeed.offload_optimizer",
}
"""Settings of its engine -> options of the backend that has it."""
RING = "ds.ring_attn_size"
"""Devices that split a row."""


def _sharding(draft: Draft) -> None:
    """The stage of ZeRO and where the optimizer is: those of OpenRLHF's own engine, if a command names them. Where
    devices split rows, the backend is the one that does that."""
    ring = draft.value(RING)
    if isinstance(ring, int) and ring > 1:
        why = "attention heads are exchanged, where keys went round a ring: the size must divide them"
        draft.put("train.backend", SHARDED, note="shards the model over the devices, and splits rows")
        draft.put(f"train.{SHARDED}.context_parallel", ring, RING, fate=Fate.OTHERWISE, why=why)
        for name in ZERO:
            if draft.gives(name):
                draft.row(Fate.DECIDED, name, f"backend {SHARDED} shards weights, gradients and moments, as stage 3")
        return
    names = [name for name in ZERO if draft.gives(name)]
    if not names or draft.fields.get("train.backend") is None:
        return
    draft.put("train.backend", "deepspeed", note=f"{PEER}'s own engine, for {', '.join(names)}")
    for name in names:
        if name == "ds.zero_stage" and draft.value(name) not in (1, 2, 3):
            draft.row(Fate.REFUSED, name, "expected 1, 2 or 3: the optimizer's state is always split")
        else:
            draft.put(ZERO[name], draft.value(name), name)


def _shared_devices(draft: Draft) -> None:
    """Devices of roles that share those of the actor, as they do here."""
    if not draft.value("train.colocate_all") or "placement.preset" in draft.fields:
        return
    for role in ("ref", "critic", "reward"):
        for end in ("num_nodes", "num_gpus_per_node"):
            name = f"{role}.{end}"
            given = name in draft.script.settings and name not in {row.name for row in draft.rows}
            if given and draft.value(name) == draft.value(f"actor.{end}"):
                draft.row(Fate.TAKEN, name, "the actor's devices, which all roles share")
    engines, each = draft.value(ENGINE_FLAG), draft.value("vllm.tensor_parallel_size")
    total = draft.value("actor.num_nodes"), draft.value("actor.num_gpus_per_node")
    if all(isinstance(size, int) for size in (engines, each, *total)) and engines * each == total[0] * total[1]:
        draft.row(Fate.TAKEN, ENGINE_FLAG, "as many as the actor's devices hold, as here")


def _model_and_data(draft: Draft) -> None:
    name = "actor.model_name_or_path" if draft.script.command == "train" else "model.model_name_or_path"
    draft.put("model.path", draft.value(name), name)
    source = draft.gives("data.prompt_dataset", "data.dataset")
    if source:
        found = [part for part in str(draft.value(source)).split(",") if part]
        many = len(found) > 1
        draft.put(
            "data.mixture" if many else "data.train", [{"source": part} for part in found] if many else found[0], source
        )
    if "eval.dataset" in draft.script.settings:
        draft.put("data.eval", str(draft.value("eval.dataset")), "eval.dataset")
    for name, field in (("data.prompt_split", "data.options"), ("data.dataset_split", "data.options"),
                        ("eval.split", "data.eval_options")):  # fmt: skip
        if name in draft.script.settings:
            draft.put(field, {"split": str(draft.value(name))}, name)
    if "data.max_samples" in draft.script.settings:
        draft.put("data.num_train_rows", int(draft.value("data.max_samples")), "data.max_samples")
    draft.take(["data.label_key", "data.output_key", "train.seed"])
    for name in ("data.input_key", "data.prompt_key"):
        if draft.value(name):
            draft.put("data.prompt_field", str(draft.value(name)), name)
    template = draft.value("data.input_template")
    if "data.input_template" in draft.script.settings and isinstance(template, str):
        named = template.replace("{}", "{prompt}")
        why = "the prompt's place is called {prompt}"
        draft.put("data.prompt_template", named, "data.input_template", fate=Fate.OTHERWISE, why=why)
    chat = draft.value("data.apply_chat_template")
    draft.put("data.chat_template", "always" if chat else "never", "data.apply_chat_template")
    for name in ("ds.param_dtype", "ds.bf16"):
        if name in draft.script.settings:
            is_half = str(draft.value(name)) in ("bf16", "True")
            why = "the optimizer has a float32 copy" if is_half else "no loss scaling: bfloat16"
            fate = Fate.OTHERWISE if is_half else Fate.REFUSED
            draft.put("model.dtype", "bfloat16" if is_half else None, name, fate=fate, why=why)
    draft.take(["actor.gradient_checkpointing_enable", "model.gradient_checkpointing_enable"])


def _limits(draft: Draft) -> None:
    """One limit for the whole row in OpenRLHF, two here."""
    length = int(draft.value("data.max_len"))
    answer, prompt = draft.value("rollout.max_new_tokens"), draft.value("data.prompt_max_len")
    why = "OpenRLHF's limit is for prompt and answer together; here each of the two has one"
    rest = length - int(answer) if answer and int(answer) < length else length
    if draft.script.command != "train":
        rest = length
    ours = int(prompt) if prompt else rest
    draft.put("data.max_prompt_tokens", ours, "data.max_len", fate=Fate.OTHERWISE, why=why)
    if answer:
        draft.put("rollout.max_response_tokens", int(answer), "rollout.max_new_tokens")
    else:
        draft.put("rollout.max_response_tokens", length, note=f"{PEER}: data.max_len; {why}")
    if "data.prompt_max_len" in draft.script.settings:
        draft.row(Fate.TAKEN, "data.prompt_max_len", "", ["data.max_prompt_tokens"])


def _sampled(draft: Draft) -> None:
    _limits(draft)
    prompts, samples = int(draft.value("rollout.batch_size")), int(draft.value("rollout.n_samples_per_prompt"))
    batch, epochs = int(draft.value("train.batch_size")), int(draft.value("train.max_epochs"))
    draft.put("trainer.prompts_per_step", prompts, "rollout.batch_size")
    draft.put("trainer.samples_per_prompt", samples, "rollout.n_samples_per_prompt")
    updates = max(prompts * samples // batch, 1)
    why = f"{prompts} prompts x {samples} samples / {batch} samples in an update = {updates} optimizer steps a step"
    draft.put("trainer.updates_per_step", updates, "train.batch_size", fate=Fate.OTHERWISE, why=why)
    draft.put("trainer.epochs_per_step", epochs, "train.max_epochs")
    draft.put("trainer.epochs", float(draft.value("train.num_episodes")), "train.num_episodes")
    _passes(draft, 1)
    nodes, each = draft.value("actor.num_nodes"), draft.value("actor.num_gpus_per_node")
    put_devices(draft, nodes, each, "actor.num_gpus_per_node", "actor.num_nodes")
    draft.put("train.backend", SHARDED, note="shards the model over the devices")
    if draft.gives(ENGINE_FLAG):
        engine = ENGINE_FLAG.partition(".")[0]
        draft.put("rollout.backend", engine, note=f"{PEER}: {engine}.*")
        for theirs, ours in (
            ("gpu_memory_utilization", "gpu_memory_utilization"),
            ("enable_prefix_caching", "enable_prefix_caching"),
            ("enforce_eager", "enforce_eager"),
        ):
            if draft.gives(f"{engine}.{theirs}"):
                draft.put(f"rollout.{engine}.{ours}", draft.value(f"{engine}.{theirs}"), f"{engine}.{theirs}")
    draft.take(["vllm.tensor_parallel_size", "rollout.temperature"])
    if "rollout.top_p" in draft.script.settings:
        draft.put("rollout.top_p", float(draft.value("rollout.top_p")), "rollout.top_p")
    put_objective(draft)
    _rewards(draft)
    check_group(draft, "rollout.n_samples_per_prompt")
    _optimizer(draft, "actor.", "train.optim")
    _schedule(draft)
    _evaluation(draft)


def _passes(draft: Draft, each: int) -> None:
    tokens, rows = "train.max_tokens_per_gpu", "train.micro_batch_size"
    dynamic = bool(draft.value("train.dynamic_batch_enable"))
    if dynamic:
        draft.put("train.micro_batch_tokens", int(draft.value(tokens, 16192)), tokens)
    else:
        draft.put(
            "train.micro_batch_rows", int(draft.value(rows)) * each, rows, why="a pair is two rows" if each > 1 else ""
        )
    for name in ("train.dynamic_batch_enable", tokens, rows):
        if name in draft.script.settings and name not in {row.name for row in draft.rows}:
            draft.row(
                Fate.TAKEN if name.endswith("enable") else Fate.DECIDED,
                name,
                f"dynamic batches are {'on' if dynamic else 'off'}",
            )


def _rewards(draft: Draft) -> None:
    rewards: list[tuple[str, Any]] = []
    for name in ("reward.model_name_or_path", "reward.remote_url"):
        value = draft.value(name)
        if value is None and name in draft.script.settings:
            draft.row(Fate.REFUSED, name, "the text does not tell its value; set rewards or reward_models", stops=True)
        if value is None:
            continue
        for part in str(value).split(","):
            rewards.append((name, f"{part}:reward_func" if part.endswith(".py") else part))
    put_rewards(draft, rewards)
    if any(".py:" in value for _, value in rewards):
        why = "reward_func(queries, prompts, labels) is called otherwise here: give it a form of docs/rewards.md"
        draft.row(Fate.OTHERWISE, "reward.remote_url", why, ["rewards"], stops=True)


def _schedule(draft: Draft) -> None:
    if draft.value("train.async_enable"):
        depth = int(draft.value("train.async_queue_size", 1))
        draft.put("schedule.max_staleness", depth, "train.async_enable", fate=Fate.OTHERWISE,
                  why="samples are at most this many steps old; the rollout has devices of its own")  # fmt: skip
        draft.put(
            "placement.preset", "colocate_actor_ref", note="an asynchronous run: the rollout has devices of its own"
        )
    elif "train.async_enable" in draft.script.settings:
        draft.row(Fate.TAKEN, "train.async_enable", "off, as here")


def _evaluation(draft: Draft) -> None:
    if int(draft.value("eval.steps")) <= 0:
        for name in ("eval.temperature", "eval.n_samples_per_prompt"):
            if name in draft.script.settings:
                draft.row(Fate.TAKEN, name, "has no effect: nothing is evaluated")
        return
    draft.put("eval.temperature", float(draft.value("eval.temperature")), "eval.temperature")
    draft.put("eval.samples_per_prompt", int(draft.value("eval.n_samples_per_prompt")), "eval.n_samples_per_prompt")


def _rows(draft: Draft) -> None:
    """SFT, DPO and reward models."""
    _limits(draft)
    section = "sft" if draft.script.command == "sft" else "preferences"
    each_step = "sft.rows_per_step" if section == "sft" else "preferences.pairs_per_step"
    draft.put(each_step, int(draft.value("train.batch_size")), "train.batch_size")
    draft.put(f"{section}.epochs", float(draft.value("train.max_epochs")), "train.max_epochs")
    _passes(draft, 1 if section == "sft" else 2)
    draft.put(f"{section}.lr", float(draft.value("adam.lr")), "adam.lr")
    names = [name for name in ("launcher.nproc_per_node", "launcher.num_gpus") if draft.gives(name)]
    put_devices(draft, 1, draft.value(names[0]) if names else 1, *names)
    if draft.fields.get("placement.devices_per_node", 1) > 1:
        draft.put("train.backend", SHARDED, note="shards the model over the devices")
    _optimizer(draft, "", section)
    draft.take(["model.beta", "model.label_smoothing", "model.nll_loss_coef", "data.chosen_key", "data.rejected_key"])
    if "model.ipo_enable" in draft.script.settings:
        draft.put("preferences.loss", "ipo" if draft.value("model.ipo_enable") else "sigmoid", "model.ipo_enable")
    draft.only("model.loss_type", ("sigmoid",), "the loss is Bradley-Terry's")
    if "ref.model_name_or_path" in draft.script.settings:
        draft.put("ref.path", str(draft.value("ref.model_name_or_path")), "ref.model_name_or_path")


def _optimizer(draft: Draft, prefix: str, section: str) -> None:
    if draft.script.command == "train":
        draft.put("train.optim.lr", float(draft.value("actor.adam.lr")), "actor.adam.lr")
    draft.put("train.optim.betas", [float(beta) for beta in draft.value(f"{prefix}adam.betas")], f"{prefix}adam.betas")
    put_schedule(draft, f"{prefix}lr_scheduler")
    draft.put("train.optim.min_lr_ratio", float(draft.value(f"{prefix}min_lr_ratio")), f"{prefix}min_lr_ratio")
    put_warmup(draft, None, f"{prefix}lr_warmup_ratio", share=float(draft.value(f"{prefix}lr_warmup_ratio")),
               path=f"{section}.warmup_steps")  # fmt: skip
    for name, field in (("adam.weight_decay", "weight_decay"), ("adam.eps", "eps"), ("max_norm", "max_grad_norm")):
        if f"{prefix}{name}" in draft.script.settings:
            draft.put(f"train.optim.{field}", float(draft.value(f"{prefix}{name}")), f"{prefix}{name}")
    draft.only(f"{prefix}optim", ("adam",), "the optimizer is AdamW: train.optim.*")


def _saving(draft: Draft) -> None:
    section = {"train": "trainer", "sft": "sft"}.get(draft.script.command, "preferences")
    fields: Mapping[str, str] = {"ckpt.save_steps": f"{section}.save_every_steps", "eval.steps": "eval.every_steps"}
    for name, field in fields.items():
        value = int(draft.value(name))
        if value <= 0:
            draft.fields[field] = None
            draft.notes[field] = f"{PEER}: {name} off" + ("; the last step is always saved" if "save" in name else "")
            if name in draft.script.settings:
                draft.row(Fate.TAKEN, name, "", [field])
        else:
            draft.put(field, value, name)
    if "ckpt.output_dir" in draft.script.settings:
        draft.put("trainer.run_dir", str(draft.value("ckpt.output_dir")), "ckpt.output_dir")
    if "ckpt.max_num" in draft.script.settings:
        draft.put("trainer.keep_checkpoints", int(draft.value("ckpt.max_num")), "ckpt.max_num")
    trackers = {"logger.wandb.key": "wandb", "logger.tensorboard_dir": "tensorboard"}
    given = [tracker for name, tracker in trackers.items() if draft.gives(name)]
    if given:
        draft.fields["tracking.trackers"] = ["jsonl", *given]
        draft.notes["tracking.trackers"] = f"{PEER}: {', '.join(filter(draft.gives, trackers))}"
    for name in filter(draft.gives, trackers):
        # Whatever its value, which may be a variable of the environment.
        draft.row(Fate.DECIDED, name, "the run's folder always has all metrics", ["tracking.trackers"])

"""verl: its overrides and YAML files as fields of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from rlsdk.interfaces import BackendKind
from rlsdk.migrate.common import (
    SHARDED,
    AdapterNames,
    check_group,
    counted_in_steps,
    put_adapter,
    put_devices,
    put_schedule,
    put_trackers,
)
from rlsdk.migrate.draft import Draft, Fate, Script
from rlsdk.migrate.verl_objective import (
    put_kl,
    put_objective,
    put_optimizer,
    put_verl_rewards,
    put_warmup_of,
)
from rlsdk.migrate.verl_tables import (
    DECIDED,
    DEFAULTS,
    ENGINE_SFT,
    MEGATRON_MODULES,
    REFUSED,
    SAME,
    TAKEN,
    A,
    R,
)
from rlsdk.registry import FIRST_PARTY

PEER = "verl"


def draft_of(script: Script) -> Draft:
    """The run file of a command's settings, with a row for each."""
    module = script.trainer.removesuffix(".py").rpartition(".")[2]
    draft = Draft(script=script, defaults=DEFAULTS[ENGINE_SFT if module == ENGINE_SFT else script.command])
    if script.command == "sft":
        _answers(draft)
    else:
        _sampled(draft)
    put_adapter(draft, ADAPTER if script.command == "train" else ADAPTER_OF_SFT)
    put_adapter(draft, ADAPTER_OF_MEGATRON)
    _saving(draft)
    _as_the_policy(draft)
    draft.same(SAME)
    draft.decide({**DECIDED, "torchrun.*": "the run starts its own processes"})
    draft.refuse(REFUSED)
    draft.done()
    return draft


def _adapter_names(section: str) -> AdapterNames:
    return AdapterNames(
        rank=f"{section}.lora_rank",
        alpha=f"{section}.lora_alpha",
        targets=f"{section}.target_modules",
        dropout=f"{section}.lora_dropout",
    )


ADAPTER, ADAPTER_OF_SFT = _adapter_names("actor_rollout_ref.model"), _adapter_names("model")
ADAPTER_OF_MEGATRON = AdapterNames(
    rank="actor_rollout_ref.model.lora.rank",
    alpha="actor_rollout_ref.model.lora.alpha",
    targets="actor_rollout_ref.model.lora.target_modules",
    dropout="actor_rollout_ref.model.lora.dropout",
    usual_alpha=32.0,
    modules=MEGATRON_MODULES,
)


AS_POLICY: Mapping[str, str] = {
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": f"{A}.use_dynamic_bsz",
    f"{R}.log_prob_use_dynamic_bsz": f"{A}.use_dynamic_bsz",
    "critic.use_dynamic_bsz": f"{A}.use_dynamic_bsz",
    **{
        f"{role}.{end}": f"{A}.{theirs}"
        for role, end in (("actor_rollout_ref.ref", "log_prob"), (R, "log_prob"), ("critic", "ppo"))
        for end, theirs in (
            (f"{end}_micro_batch_size_per_gpu", "ppo_micro_batch_size_per_gpu"),
            (f"{end}_micro_batch_size", "ppo_micro_batch_size"),
            (f"{end}_max_token_len_per_gpu", "ppo_max_token_len_per_gpu"),
        )
    },
}
"""Settings of another role -> the policy's setting that counts for it here."""


def _as_the_policy(draft: Draft) -> None:
    """Settings of other models that have the policy's value, which they have here by default."""
    for name in draft.script.settings:
        known = AS_POLICY.get(name)
        for role in ("actor_rollout_ref.ref.", "critic."):
            known = known or (f"{A}.{name.removeprefix(role)}" if name.startswith(role) else None)
        theirs = draft.script.settings.get(known or "")
        is_new = name not in {row.name for row in draft.rows}
        if theirs is not None and theirs.value == draft.script.settings[name].value and is_new:
            draft.row(Fate.TAKEN, name, "as the policy's, by default")


def _data(draft: Draft) -> None:
    for name, field in (("data.train_files", "data.train"), ("data.val_files", "data.eval")):
        value = draft.value(name)
        files = value if isinstance(value, list) else [value]
        if name not in draft.script.settings:
            continue
        if value is None:
            draft.row(Fate.TAKEN, name, "", [field], stops=field == "data.train")
            continue
        if len(files) == 1:
            draft.put(field, str(files[0]), name)
        elif field == "data.train":
            draft.put("data.mixture", [{"source": str(file)} for file in files], name, fate=Fate.OTHERWISE,
                      why="sources are drawn from evenly: data.mixture.*.weight")  # fmt: skip
        else:
            draft.put("eval.sets", {set_name: {"data": str(file)} for set_name, file in _sets(files)}, name)
    for name, field in (
        ("data.train_max_samples", "data.num_train_rows"),
        ("data.val_max_samples", "data.num_eval_rows"),
    ):
        if name in draft.script.settings:
            count = draft.value(name)
            draft.put(field, int(count) if isinstance(count, int) and count > 0 else None, name)
    for name in ("data.shuffle",):
        if name in draft.script.settings:
            draft.put(name, bool(draft.value(name)), name)
    for name in ("data.seed", "trainer.seed"):
        if name in draft.script.settings and isinstance(draft.value(name), int):
            draft.put("trainer.seed", int(draft.value(name)), name)


def _sets(files: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """A name for each file: that of its folder or its own, with a number where both are taken."""
    names: set[str] = set()
    for file in files:
        path = PurePosixPath(str(file))
        found = [re.sub(r"[^\w-]+|^[^A-Za-z]+", "", text)[:40] for text in (path.parent.name, path.stem)]
        choices = [*filter(None, found), *(f"set{number}" for number in range(1, len(files) + 1))]
        name = next(choice for choice in choices if choice not in names)
        names.add(name)
        yield name, file


def _sampled(draft: Draft) -> None:
    draft.put("model.path", draft.value("actor_rollout_ref.model.path"), "actor_rollout_ref.model.path")
    _data(draft)
    draft.take(TAKEN)
    top_k = f"{R}.top_k"
    draft.only(top_k, (-1, 0), "") if draft.value(top_k) in (-1, 0, None) else draft.take([top_k])
    _batches(draft)
    _engines(draft)
    put_objective(draft)
    _steps(draft, "trainer")
    put_optimizer(draft)
    put_kl(draft)
    put_verl_rewards(draft)
    check_group(draft, f"{R}.n")
    _evaluation(draft)


def _batches(draft: Draft) -> None:
    prompts, mini = int(draft.value("data.train_batch_size")), int(draft.value(f"{A}.ppo_mini_batch_size"))
    draft.put("trainer.prompts_per_step", prompts, "data.train_batch_size")
    updates = max(prompts // mini, 1)
    why = f"{prompts} prompts / {mini} prompts in a mini-batch = {updates} optimizer step{'s' * (updates > 1)} a step"
    draft.put("trainer.updates_per_step", updates, f"{A}.ppo_mini_batch_size", fate=Fate.OTHERWISE, why=why)
    rows, old = f"{A}.ppo_micro_batch_size_per_gpu", f"{A}.ppo_micro_batch_size"
    dynamic, tokens = draft.value(f"{A}.use_dynamic_bsz"), f"{A}.ppo_max_token_len_per_gpu"
    if dynamic or not draft.gives(rows, old):
        each, size = int(draft.value(tokens)), _split_of(draft)
        why = f"{each} tokens x {size} devices that split rows" if size > 1 else ""
        draft.put("train.micro_batch_tokens", each * size, tokens, why=why)
        for name in (rows, old):
            if name in draft.script.settings:
                draft.row(Fate.DECIDED, name, "has no effect with use_dynamic_bsz")
    else:
        name = draft.gives(rows, old) or rows
        size = int(draft.value(name) or 1)
        total = int(draft.value("trainer.n_gpus_per_node")) if name == old else 1
        draft.put("train.micro_batch_rows", max(size // total, 1), name)
        if tokens in draft.script.settings:
            draft.row(Fate.DECIDED, tokens, "has no effect without use_dynamic_bsz")
    if f"{A}.use_dynamic_bsz" in draft.script.settings:
        field = "train.micro_batch_tokens" if dynamic else "train.micro_batch_rows"
        draft.row(Fate.TAKEN, f"{A}.use_dynamic_bsz", "", [field])


def _steps(draft: Draft, section: str) -> None:
    steps = draft.value("trainer.total_training_steps")
    if isinstance(steps, int) and steps > 0:
        draft.put(f"{section}.steps", steps, "trainer.total_training_steps")
        if "trainer.total_epochs" in draft.script.settings:
            draft.row(Fate.DECIDED, "trainer.total_epochs", "total_training_steps counts, as in verl")
    else:
        draft.put(f"{section}.epochs", float(draft.value("trainer.total_epochs")), "trainer.total_epochs")


def _engines(draft: Draft) -> None:
    """Devices, the train backend with its parallel sizes, and the rollout backend with its share of memory."""
    put_devices(draft, draft.value("trainer.nnodes"), draft.value("trainer.n_gpus_per_node"),
                "trainer.n_gpus_per_node", "trainer.nnodes")  # fmt: skip
    sizes, backend = _sizes(draft), _backend(draft)
    if f"{A}.strategy" in draft.script.settings or not sizes:
        draft.put("train.backend", backend, f"{A}.strategy")
    else:
        draft.put("train.backend", backend, note=f"verl: {A}.{backend}.*")
    if backend == SHARDED:
        _context(draft)
    for setting, option in sizes.get(backend, {}).items():
        value = draft.value(setting)
        draft.put(f"train.{backend}.{option}", int(value) if value else None, setting)
    if (
        "tensor_parallel" in sizes.get(backend, {}).values()
        and draft.fields.get(f"train.{backend}.tensor_parallel", 1) > 1
    ):
        draft.put(f"train.{backend}.sequence_parallel", True, note="as verl, with tensor parallelism")
    engine = str(draft.value(f"{R}.name") or "")
    if engine in FIRST_PARTY[BackendKind.ROLLOUT]:
        draft.put("rollout.backend", engine, f"{R}.name")
        _engine_arguments(draft, engine)
        share = next((path for path in MEMORY_SHARES if path.startswith(f"rollout.{engine}.")), None)
        if share and draft.gives(f"{R}.gpu_memory_utilization"):
            draft.put(share, float(draft.value(f"{R}.gpu_memory_utilization")), f"{R}.gpu_memory_utilization")
        for end, option in ENGINE_OPTIONS.items():
            if option.startswith(f"rollout.{engine}.") and draft.value(f"{R}.{end}") is not None:
                draft.put(option, draft.value(f"{R}.{end}"), f"{R}.{end}")
    elif f"{R}.name" in draft.script.settings:
        draft.row(Fate.REFUSED, f"{R}.name", "no engine of this name: `rlsdk plugins list`")


ULYSSES = (f"{A}.ulysses_sequence_parallel_size", "ulysses_sequence_parallel_size")
"""Devices that split a row in its sharded engine."""


def _context(draft: Draft) -> None:
    """Devices that split a row; verl's other engines do not read them."""
    for name in ULYSSES:
        if draft.gives(name) and isinstance(size := draft.value(name), int):
            draft.put(f"train.{SHARDED}.context_parallel", size, name)


def _split_of(draft: Draft) -> int:
    """Number of devices that split a row."""
    name = draft.gives(*ULYSSES)
    size = draft.value(name) if name and _backend(draft) == SHARDED else 1
    return size if isinstance(size, int) else 1


def _sizes(draft: Draft) -> Mapping[str, Mapping[str, str]]:
    """Backend -> settings of its parallel sizes -> its options."""
    return {name: theirs for name in FIRST_PARTY[BackendKind.TRAIN] if (theirs := _parallel(draft, name))}


def _backend(draft: Draft) -> str:
    """The train backend that the settings name, or have sizes for."""
    given = str(draft.value(f"{A}.strategy") or draft.value("--config-name") or "")
    uses = next((name for name in FIRST_PARTY[BackendKind.TRAIN] if name in given), None)
    return uses or next(iter(_sizes(draft)), SHARDED)


MEMORY_SHARES = ("rollout.vllm.gpu_memory_utilization", "rollout.sglang.memory_share")
"""Options of rollout engines for their share of a GPU's memory."""
ENGINE_OPTIONS: Mapping[str, str] = {
    "enforce_eager": "rollout.vllm.enforce_eager",
    "max_num_batched_tokens": "rollout.vllm.max_batched_tokens",
}
"""Settings of a rollout engine -> the option of the backend that has it."""
PARALLEL: Mapping[str, str] = {
    "tensor_model_parallel_size": "tensor_parallel",
    "pipeline_model_parallel_size": "pipeline_parallel",
    "virtual_pipeline_model_parallel_size": "virtual_stages",
    "context_parallel_size": "context_parallel",
    "expert_model_parallel_size": "expert_parallel",
}


def _engine_arguments(draft: Draft, engine: str) -> None:
    """Arguments that go to the engine's constructor unchanged."""
    prefix = f"{R}.engine_kwargs.{engine}."
    names = [
        name
        for name in draft.script.settings
        if name.startswith(prefix) and "." not in name.removeprefix(prefix) and draft.value(name) is not None
    ]
    if names:
        draft.put("rollout.engine_kwargs", {name.removeprefix(prefix): draft.value(name) for name in names}, *names)


def _parallel(draft: Draft, backend: str) -> Mapping[str, str]:
    """Settings of a backend's parallel sizes -> its options."""
    return {
        f"{A}.{backend}.{theirs}": ours for theirs, ours in PARALLEL.items() if draft.gives(f"{A}.{backend}.{theirs}")
    }


def _evaluation(draft: Draft) -> None:
    prefix = f"{R}.val_kwargs."
    samples, is_sampled = draft.value(f"{prefix}n", 1), draft.value(f"{prefix}do_sample")
    temperature = draft.value(f"{prefix}temperature")
    if _is_off(draft.value("trainer.test_freq")):
        for name in (f"{prefix}{end}" for end in ("n", "do_sample", "temperature", "top_p", "top_k")):
            if name in draft.script.settings:
                draft.row(Fate.TAKEN, name, "has no effect: nothing is evaluated")
        return
    for end in ("n", "do_sample", "temperature"):
        if f"{prefix}{end}" in draft.script.settings:
            draft.row(Fate.TAKEN, f"{prefix}{end}", "", ["eval.samples_per_prompt", "eval.temperature", "eval.greedy"])
    sampled = bool(is_sampled) and temperature != 0
    draft.put(
        "eval.samples_per_prompt", int(samples) if sampled else 0, note="verl: rollout.val_kwargs n and do_sample"
    )
    draft.put("eval.greedy", not sampled, note="verl: rollout.val_kwargs do_sample")
    if sampled and temperature:
        draft.put("eval.temperature", float(temperature), note="verl: rollout.val_kwargs.temperature")
    _filters(draft, prefix, sampled=sampled)
    _give_to_sets(draft)


def _give_to_sets(draft: Draft) -> None:
    """Each set has its own sampling, in place of that of `eval`."""
    if "eval.sets" not in draft.fields:
        return
    fields = ("greedy", "samples_per_prompt", "temperature", "top_p", "top_k")
    given = {name: draft.fields.pop(f"eval.{name}") for name in fields if f"eval.{name}" in draft.fields}
    own = {"temperature": 0.0} if given.pop("greedy") else given
    for part in draft.fields["eval.sets"].values():
        part.update(own)


def _filters(draft: Draft, prefix: str, *, sampled: bool) -> None:
    """Filters of an evaluation's samples; -1 is off in verl, as 0 is here."""
    for end, kind in (("top_p", float), ("top_k", int)):
        name = f"{prefix}{end}"
        value = draft.value(name)
        if name not in draft.script.settings:
            continue
        if sampled and value not in (-1, 0, 1.0, None):
            draft.put(f"eval.{end}", kind(value), name)
        else:
            draft.row(Fate.TAKEN, name, "off, as here" if sampled else "has no effect: responses are greedy")


def _is_off(value: Any) -> bool:
    return not isinstance(value, int) or isinstance(value, bool) or value <= 0


def _saving(draft: Draft) -> None:
    section = "sft" if draft.script.command == "sft" else "trainer"
    for name, field in (
        ("trainer.save_freq", f"{section}.save_every_steps"),
        ("trainer.test_freq", "eval.every_steps"),
    ):
        value = draft.value(name)
        if _is_off(value):
            draft.fields[field] = None
            draft.notes[field] = f"verl: {name} off" + ("; the last step is always saved" if "save" in name else "")
            if name in draft.script.settings:
                draft.row(Fate.TAKEN, name, "", [field])
        else:
            draft.put(field, counted_in_steps(value, 1), name)
    if draft.fields.get("eval.every_steps", 1) is None:
        draft.fields.pop("eval.at_start", None)
    name = "trainer.experiment_name"
    if name in draft.script.settings:
        text = str(draft.script.settings[name].value)
        is_name = re.fullmatch(r"[\w.-]+", text) is not None
        draft.put("trainer.run_name", text if is_name else None, name)
    if "trainer.logger" in draft.script.settings:
        put_trackers(draft, "trainer.logger")


def _answers(draft: Draft) -> None:
    """Supervised training."""
    draft.put("model.path", draft.value("model.partial_pretrain") or draft.value("model.path"),
              *[name for name in ("model.partial_pretrain", "model.path") if draft.gives(name)])  # fmt: skip
    _data(draft)
    for name, field in (("data.prompt_key", "data.prompt_field"), ("data.response_key", "data.answer_field"),
                        ("model.enable_gradient_checkpointing", "train.activation_checkpointing"),
                        ("model.trust_remote_code", "model.trust_remote_code"), ("optim.lr", "sft.lr"),
                        ("optim.weight_decay", "train.optim.weight_decay"), ("optim.betas", "train.optim.betas"),
                        ("optim.clip_grad", "train.optim.max_grad_norm"),
                        ("trainer.default_local_dir", "trainer.run_dir"),
                        ("data.train_batch_size", "sft.rows_per_step"),
                        ("data.micro_batch_size_per_gpu", "train.micro_batch_rows"),
                        ("data.micro_batch_size", "train.micro_batch_rows")):  # fmt: skip
        if draft.value(name) is not None:
            draft.put(field, draft.value(name), name)
    length = int(draft.value("data.max_length"))
    why = "verl's limit is for prompt and answer together; here each of the two has it"
    draft.put("data.max_prompt_tokens", length, "data.max_length", fate=Fate.OTHERWISE, why=why)
    draft.put("rollout.max_response_tokens", length, note=f"verl: data.max_length; {why}")
    _steps(draft, "sft")
    schedules = ("optim.lr_scheduler", "optim.lr_scheduler_type", "optim.warmup_style")
    put_schedule(draft, draft.gives(*schedules) or schedules[0])
    put_warmup_of(draft, "optim", "sft")
    each = draft.gives("torchrun.nproc_per_node")
    devices = draft.value(each) if each else draft.value("trainer.n_gpus_per_node")
    nodes = draft.gives("torchrun.nnodes", "trainer.nnodes")
    put_devices(draft, draft.value(nodes) if nodes else 1, devices, each or "trainer.n_gpus_per_node",
                *([nodes] if nodes else []))  # fmt: skip
    draft.put("train.backend", SHARDED, *(["model.strategy"] if draft.gives("model.strategy") else []),
              note="shards the model over the devices")  # fmt: skip
    _context(draft)

"""TRL: its trainers' arguments as fields of a run."""

from __future__ import annotations

import math
from typing import Any

from rlsdk.config import RunConfig
from rlsdk.migrate.common import (
    SHARDED,
    AdapterNames,
    counted_in_steps,
    put_adapter,
    put_devices,
    put_rewards,
    put_schedule,
    put_trackers,
    put_warmup,
)
from rlsdk.migrate.draft import Draft, Fate, Script, here
from rlsdk.migrate.launcher import put_launcher
from rlsdk.migrate.trl_objective import put_engine, put_objective
from rlsdk.migrate.trl_pairs import DISTILLATION, put_distillation, put_pairs
from rlsdk.migrate.trl_tables import DECIDED, DEFAULTS, REFUSED, SAME, TAKEN, TAKEN_SAMPLED

PEER = "TRL"
SAMPLING = ("GRPOTrainer", "RLOOTrainer")
ADAPTER = AdapterNames(
    rank="lora_r",
    alpha="lora_alpha",
    targets="lora_target_modules",
    dropout="lora_dropout",
    usual_rank=16,
    usual_alpha=32.0,
    usual_dropout=0.05,
)
"""Of its command line."""
PEFT = AdapterNames(
    rank="LoraConfig.r",
    alpha="LoraConfig.lora_alpha",
    targets="LoraConfig.target_modules",
    dropout="LoraConfig.lora_dropout",
    usual_rank=8,
    usual_alpha=8.0,
)
"""Of PEFT's own class."""
DTYPES = ("dtype", "torch_dtype", "from_pretrained.dtype", "from_pretrained.torch_dtype", "bf16", "fp16")


def draft_of(script: Script) -> Draft:
    """The run file of a script's settings, with a row for each."""
    draft = Draft(script=script, defaults=DEFAULTS[script.trainer])
    _model_and_data(draft)
    draft.take(TAKEN)
    put_adapter(draft, ADAPTER, "use_peft", scaling="use_rslora")
    put_adapter(draft, PEFT, "peft_config", scaling="LoraConfig.use_rslora")
    if script.trainer in SAMPLING:
        _sampled(draft)
    elif script.trainer == DISTILLATION:
        put_distillation(draft, _devices(draft))
    else:
        put_pairs(draft, _devices(draft))
    _optimizer(draft)
    _saving(draft)
    draft.same(SAME)
    draft.decide(DECIDED)
    draft.refuse(REFUSED)
    draft.done()
    return draft


def _model_and_data(draft: Draft) -> None:
    model = _told(draft, "trainer.model", "model_name_or_path")
    for name, field in (
        ("tokenizer_name_or_path", "model.tokenizer"),
        ("from_pretrained.revision", "model.revision"),
        ("from_pretrained.trust_remote_code", "model.trust_remote_code"),
        ("dataset_prompt_column", "data.prompt_field"),
        ("system_prompt", "data.system_prompt"),
    ):
        if name in draft.script.settings:
            draft.put(field, draft.value(name), name)
    for name in ("trainer.model", "model_name_or_path"):
        if name in draft.script.settings:
            value = draft.value(name)
            if model not in (None, name):
                draft.row(Fate.DECIDED, name, f"the model is that of {model}")
            else:
                draft.put("model.path", value if isinstance(value, str) else None, name)
    _dtype(draft)
    _model_kwargs(draft)
    paths = ("train_dataset.path", "dataset_name", "dataset_id_or_path")
    configs, splits = ("train_dataset.name", "dataset_config"), ("train_dataset.split", "dataset_train_split")
    _data(draft, "train", paths, configs, splits)
    _data(draft, "eval", ("eval_dataset.path",), ("eval_dataset.name",), ("eval_dataset.split", "dataset_test_split"))
    for name in ("train_dataset", "eval_dataset"):
        if name in draft.script.settings:
            field = "data.train" if name == "train_dataset" else "data.eval"
            draft.row(Fate.REFUSED, name, f"made by the script: write its rows with `.to_json('rows.jsonl')` and name "
                      f"that file in {field}", stops=name == "train_dataset")  # fmt: skip
    for name, setting in draft.script.settings.items():
        if ": user message" in name:
            draft.put("data.prompt_field", setting.value, name)
        elif ": system message" in name:
            draft.put("data.system_prompt", setting.value, name)
        elif ": " in name and not name.startswith("data: "):
            draft.put("data.answer_field", setting.value, name)
    if draft.script.trainer in SAMPLING and "data.prompt_field" not in draft.fields:
        draft.put("data.prompt_field", "prompt", note="TRL's prompts are in the column `prompt`")


def _told(draft: Draft, *names: str) -> str | None:
    """The first of these settings whose value the text tells; the first that is given if none does."""
    return next((name for name in names if isinstance(draft.value(name), str)), draft.gives(*names))


def _dtype(draft: Draft) -> None:
    for name in DTYPES:
        if name not in draft.script.settings:
            continue
        value = str(draft.value(name)).rpartition(".")[2].lower()
        found = {
            "bfloat16": "bfloat16",
            "float32": "float32",
            "auto": "auto",
            "none": "auto",
            "float16": "float16",
        }.get(value)
        if name in ("bf16", "fp16"):
            found = {"bf16": "bfloat16", "fp16": "float16"}[name] if value == "true" else "auto"
        if found == "float16":
            draft.row(Fate.REFUSED, name, "no loss scaling: bfloat16 is used on a GPU", ["model.dtype"])
        else:
            draft.put("model.dtype", None if found == "auto" else found, name, fate=Fate.OTHERWISE,
                      why="weights have a float32 copy in the optimizer, passes compute in this dtype")  # fmt: skip


def _model_kwargs(draft: Draft) -> None:
    """What the model is built with."""
    name = "model_init_kwargs"
    given = draft.value(name)
    if name not in draft.script.settings:
        return
    kinds = {str(key): value for key, value in given.items()} if isinstance(given, dict) else {"": given}
    if draft.script.command == "reward-model" and kinds.get("num_labels") == 1:
        del kinds["num_labels"]  # so it is here
    if set(kinds) - {"dtype", "torch_dtype", "attn_implementation", "revision", "use_cache", "trust_remote_code"}:
        return
    dtype = str(kinds.get("dtype", kinds.get("torch_dtype")))
    if dtype in ("bfloat16", "float32"):
        draft.put("model.dtype", dtype, name, fate=Fate.OTHERWISE, why="the optimizer has a float32 copy")
    else:
        draft.row(Fate.DECIDED, name, "its parts come from settings of their own, or are the engine's choice")


def _data(draft: Draft, which: str, paths: tuple[str, ...], configs: tuple[str, ...], splits: tuple[str, ...]) -> None:
    """A data set of the hub or of files."""
    field, options = f"data.{which}", "data.options" if which == "train" else "data.eval_options"
    name, config, split = (_told(draft, *names) for names in (paths, configs, splits))
    for other in (*paths, *configs, *splits):
        if other in draft.script.settings and other not in (name, config, split):
            draft.row(Fate.DECIDED, other, f"the script loads {draft.value(name) if name else 'its data'} itself")
    source = draft.value(name) if name else None
    if not isinstance(source, str):
        for other in filter(None, (name, config, split)):
            why = f"says nothing without a data set: set {field}"
            draft.row(Fate.REFUSED if which == "train" else Fate.DECIDED, other, why, stops=other == name)
        return
    file = _file(draft, source, which)
    draft.put(field, file or source, *filter(None, (name,)))
    values = {}
    for key, given in (("config", config), ("split", split)):
        value = draft.value(given) if given else None
        if given and (file or (isinstance(value, str) and "[" in value) or not isinstance(value, str)):
            _part(draft, given, value, which, is_file=bool(file))
        elif given:
            values[key] = value
    if values:
        draft.fields[options] = values
        for given in filter(None, (config, split)):
            if draft.value(given) in values.values():
                draft.row(Fate.TAKEN, given, "", [options])


def _file(draft: Draft, source: str, which: str) -> str | None:
    """The file in `load_dataset("json", data_files="rows.jsonl")`."""
    name = f"{'train' if which == 'train' else 'eval'}_dataset.data_files"
    value = draft.value(name)
    if isinstance(value, dict):
        value = value.get("train") or value.get("test")
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if source in ("json", "csv", "parquet") and isinstance(value, str):
        draft.row(Fate.TAKEN, name, "", [f"data.{which}: {value!r}"])
        return value
    return source if source.endswith((".jsonl", ".json", ".csv", ".parquet")) else None


def _part(draft: Draft, name: str, value: Any, which: str, *, is_file: bool) -> None:
    if is_file:
        draft.row(Fate.DECIDED, name, "a file has all of its rows; data.num_train_rows takes the first ones")
    elif isinstance(value, str):
        draft.row(Fate.REFUSED, name, "no part of a split: data.num_train_rows takes the first rows" if which == "train"
                  else "no part of a split: data.num_eval_rows takes the first rows")  # fmt: skip
    else:
        draft.row(Fate.DECIDED, name, "the data set has one")


def _devices(draft: Draft) -> int:
    """Devices and nodes of the launcher; returns the number of devices, or groups of them, that hold different rows."""
    name = draft.gives("devices", "accelerate.num_processes", "torchrun.nproc_per_node")
    held = draft.script.launch
    total = draft.value(name) if name else held.get("num_processes", 1)
    nodes = draft.gives("accelerate.num_machines", "torchrun.nnodes")
    machines = draft.value(nodes) if nodes else held.get("num_machines", 1)
    count = int(machines) if str(machines).isdigit() else 1
    of_all = name == "accelerate.num_processes" or (name is None and "num_processes" in held)
    each = max(int(total) // count, 1) if of_all else total
    found = put_devices(draft, count, each, *filter(None, (name, nodes)))
    if found > 1:
        draft.put("train.backend", SHARDED, note="shards the model over the devices")
    put_launcher(draft)
    return found // int(draft.fields.get(f"train.{SHARDED}.context_parallel", 1))


def _sampled(draft: Draft) -> None:
    draft.take(TAKEN_SAMPLED)
    _environment(draft)
    _batches(draft, _devices(draft))
    put_objective(draft)
    put_engine(draft)
    rewards = [
        (name, value)
        for name, one in draft.script.settings.items()
        if name.split(".")[0] == "reward_funcs"
        for value in (one.value if isinstance(one.value, list) else [one.value])
    ]
    weights = draft.value("reward_weights") or []
    put_rewards(draft, rewards, weights)
    if "reward_weights" in draft.script.settings:
        draft.row(Fate.TAKEN, "reward_weights", "", ["rewards.*.weight"])
    model = draft.gives("reward_model_name_or_path")
    if model:
        put_rewards(draft, [(model, draft.value(model))])
    draft.only("top_k", (0, -1, None), "", stops=False) if draft.value("top_k") in (0, -1, None) else draft.take(
        ["top_k"]
    )
    draft.only("min_p", (None, 0), "") if not draft.value("min_p") else draft.take(["min_p"])
    draft.only("repetition_penalty", (1, 1.0, None), "tokens are sampled from the policy itself")


def _environment(draft: Draft) -> None:
    """An environment class, which rlsdk takes in the form that it has for TRL."""
    name, turns = "trainer.environment_factory", "max_tool_calling_iterations"
    if isinstance(calls := draft.value(turns), int):
        why = "rounds of calls, and the last answer"
        draft.put("rollout.max_turns", calls + 1, turns, fate=Fate.OTHERWISE, why=why)
    value = draft.value(name)
    if not isinstance(value, str):
        return
    why = "the class is used as it is"
    if value.startswith(f"{draft.script.source}:"):
        of_class = value.rpartition(":")[2]
        draft.functions.append(of_class)
        value = f"{draft.script.rewards_file}:{of_class}"
        why += f", copied with what it uses: importing {draft.script.source} would need {PEER}"
    draft.put("rollout.environment", value, name, why=why)
    prompt, answer = draft.value("max_prompt_length"), draft.value("max_completion_length")
    if isinstance(answer, int):
        room = (RunConfig().data.max_prompt_tokens if prompt is None else int(prompt)) + answer
        why = f"{PEER}'s completion has the tokens of all turns and tool answers"
        draft.put("rollout.max_model_tokens", room, note=f"prompt and completion: {why}")


def _batches(draft: Draft, devices: int) -> None:
    """Prompts of a step, and its optimizer steps, from TRL's sizes per device."""
    rows, accumulation = (
        int(draft.value("per_device_train_batch_size")),
        int(draft.value("gradient_accumulation_steps")),
    )
    samples, epochs = int(draft.value("num_generations")), int(draft.value("num_iterations"))
    whole = draft.value("generation_batch_size")
    held = draft.value("steps_per_generation") or (whole // (rows * devices) if whole else accumulation)
    held = max(int(held), 1)
    per_step = rows * devices * max(held, accumulation)
    updates = max(held // accumulation, 1)
    prompts = max(per_step // samples, 1)
    shown = (
        f"{rows} rows x {devices} device{'s' * (devices > 1)} x {max(held, accumulation)} passes / {samples} samples"
    )
    names = [name for name in ("per_device_train_batch_size", "steps_per_generation", "generation_batch_size",
                               "gradient_accumulation_steps") if name in draft.script.settings]  # fmt: skip
    names = names or ["per_device_train_batch_size"]
    draft.put(
        "trainer.prompts_per_step", prompts, *names, fate=Fate.OTHERWISE, why=f"{shown} = {prompts} prompts a step"
    )
    counted = f"{held} passes / {accumulation} accumulated = {updates} optimizer step{'s' * (updates > 1)} a step"
    draft.put("trainer.updates_per_step", updates, note=counted)
    draft.put("train.micro_batch_rows", rows, note="TRL: per_device_train_batch_size, rows in one pass of a device")
    steps = draft.value("max_steps")
    each = updates * epochs
    if isinstance(steps, int | float) and steps > 0:
        count = max(math.ceil(steps / each), 1)
        why = f"{steps} optimizer steps / {each} a step" if each > 1 else ""
        draft.put("trainer.steps", count, "max_steps", fate=Fate.OTHERWISE if each > 1 else Fate.TAKEN, why=why)
        if "num_train_epochs" in draft.script.settings:
            draft.row(Fate.DECIDED, "num_train_epochs", "max_steps counts, as in TRL")
    else:
        draft.put("trainer.epochs", float(draft.value("num_train_epochs")), "num_train_epochs")
        if "max_steps" in draft.script.settings:
            draft.row(Fate.TAKEN, "max_steps", "off: the number of epochs counts")


def _optimizer(draft: Draft) -> None:
    put_schedule(draft, "lr_scheduler_type")
    _put_least_rate(draft)
    warm, ratio = draft.value("warmup_steps"), draft.value("warmup_ratio")
    if ratio and not warm:
        put_warmup(draft, None, "warmup_ratio", share=float(ratio))
    elif isinstance(warm, int | float) and 0 < warm < 1:
        put_warmup(draft, None, "warmup_steps", share=float(warm))
    else:
        put_warmup(draft, int(warm or 0), *[name for name in ("warmup_steps", "warmup_ratio") if draft.gives(name)])
    norm = draft.gives("max_grad_norm")
    if norm:
        value = draft.value(norm)
        draft.put("train.optim.max_grad_norm", float(value) if value else None, norm)
    betas = [float(draft.value("adam_beta1", 0.9)), float(draft.value("adam_beta2", 0.999))]
    if draft.gives("adam_beta1", "adam_beta2"):
        draft.put("train.optim.betas", betas, "adam_beta1", "adam_beta2")
    draft.only("optim", ("adamw_torch", "adamw_torch_fused", "adamw_hf"), "the optimizer is AdamW with float32 state")
    draft.put("trainer.seed", int(draft.value("seed")), "seed")


def _put_least_rate(draft: Draft) -> None:
    """The rate at which a decay ends: a share of the peak, or a rate."""
    name = "lr_scheduler_kwargs"
    kwargs = draft.value(name)
    if name not in draft.script.settings:
        return
    given = kwargs if isinstance(kwargs, dict) else {}
    share, rate = given.get("min_lr_rate", given.get("min_lr_ratio")), given.get("min_lr")
    if isinstance(share, int | float):
        draft.put("train.optim.min_lr_ratio", float(share), name)
    elif isinstance(rate, int | float):
        peak = float(draft.value("learning_rate"))
        draft.put("train.optim.min_lr_ratio", rate / peak, name, fate=Fate.OTHERWISE, why=f"{rate:g} of {peak:g}")
    else:
        draft.row(Fate.REFUSED, name, "only min_lr and min_lr_rate: train.optim.min_lr_ratio")


def _saving(draft: Draft) -> None:
    each = draft.fields.get("trainer.updates_per_step", 1) * draft.fields.get("trainer.epochs_per_step", 1)
    field = here("save_steps", draft.script.command) or ""
    strategy, every = draft.value("save_strategy"), draft.value("save_steps")
    names = [name for name in ("save_strategy", "save_steps") if name in draft.script.settings]
    steps = counted_in_steps(every, each)
    if strategy == "no":
        draft.fields[field] = None
        draft.notes[field] = "TRL: save_strategy no; the last step is always saved"
        for name in names:
            draft.row(Fate.TAKEN, name, "", [field])
    elif strategy == "epoch" or steps is None:
        for name in names:
            draft.row(Fate.REFUSED, name, f"checkpoints are counted in steps: set {field}")
    else:
        why = f"{every} optimizer steps / {each} a step" if each > 1 else ""
        draft.put(field, steps, *(names or ["save_steps"]), fate=Fate.OTHERWISE if why else Fate.TAKEN, why=why)
    draft.take(["save_total_limit", "output_dir"])
    _evaluation(draft, each)
    if draft.gives("report_to"):
        put_trackers(draft, "report_to")


def _evaluation(draft: Draft, each: int) -> None:
    strategy, every = draft.value("eval_strategy"), draft.value("eval_steps")
    names = [name for name in ("eval_strategy", "evaluation_strategy", "eval_steps") if name in draft.script.settings]
    strategy = draft.value("evaluation_strategy") or strategy
    steps = counted_in_steps(every, each)
    if strategy == "no" or (strategy == "steps" and steps is None and every is None):
        draft.fields["eval.every_steps"] = None if strategy == "no" else draft.fields.get("eval.every_steps")
        draft.notes["eval.every_steps"] = "TRL: eval_strategy no" if strategy == "no" else "TRL: as often as it logs"
        if strategy != "no":
            del draft.fields["eval.every_steps"]
        for name in names:
            draft.row(Fate.TAKEN if strategy == "no" else Fate.DECIDED, name, "", ["eval.every_steps"])
    elif strategy == "steps" and steps is not None:
        why = f"{every} optimizer steps / {each} a step" if each > 1 else ""
        draft.put("eval.every_steps", steps, *names, fate=Fate.OTHERWISE if why else Fate.TAKEN, why=why)
    else:
        for name in names:
            draft.row(Fate.REFUSED, name, "evaluations are counted in steps: set eval.every_steps")
    if "eval_on_start" in draft.script.settings and draft.fields.get("eval.every_steps", 1) is None:
        draft.fields.pop("eval.at_start", None)

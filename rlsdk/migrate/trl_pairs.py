"""TRL's trainers on answers and on pairs: supervised training, preferences, reward models; and distillation, which
may also be on the student's own samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from rlsdk.migrate.common import SUPERVISED
from rlsdk.migrate.draft import Draft, Fate, Script, here

DISTILLATION = "GKDTrainer"
OBJECTIVE = "algorithm.distillation.objective"
DIVERGENCE = "algorithm.distillation.divergence"
NAMES = ("trainer.teacher_model", "teacher_model_name_or_path")


def put_pairs(draft: Draft, devices: int) -> None:
    """Batches, lengths and losses of SFT, DPO and its kin, and reward models."""
    rows, accumulation = (
        int(draft.value("per_device_train_batch_size")),
        int(draft.value("gradient_accumulation_steps")),
    )
    field = here("batch_size", draft.script.command) or ""
    total = rows * devices * accumulation
    names = [
        name for name in ("per_device_train_batch_size", "gradient_accumulation_steps") if name in draft.script.settings
    ]
    why = f"{rows} rows x {devices} device{'s' * (devices > 1)} x {accumulation} accumulated = {total} a step"
    draft.put(field, total, *(names or ["per_device_train_batch_size"]), fate=Fate.OTHERWISE, why=why)
    per_row = 1 if draft.script.command in (*SUPERVISED, "kto", "process-reward") else 2
    draft.put("train.micro_batch_rows", rows * per_row, note="TRL: per_device_train_batch_size"
              + ("; a pair is two rows" if per_row == 2 else ""))  # fmt: skip
    steps, epochs = draft.value("max_steps"), draft.value("num_train_epochs")
    if isinstance(steps, int | float) and steps > 0:
        draft.put(here("max_steps", draft.script.command) or "", int(steps), "max_steps")
        if "num_train_epochs" in draft.script.settings:
            draft.row(Fate.DECIDED, "num_train_epochs", "max_steps counts, as in TRL")
    else:
        draft.put(here("epochs", draft.script.command) or "", float(epochs), "num_train_epochs")
        if "max_steps" in draft.script.settings:
            draft.row(Fate.TAKEN, "max_steps", "off: the number of epochs counts")
    _lengths(draft)
    if draft.script.trainer in PREFERENCES:
        PREFERENCES[draft.script.trainer](draft)
    draft.take(["center_rewards_coefficient"])
    draft.only("completion_only_loss", (True, None), "the loss is over answers only")
    draft.only("assistant_only_loss", (True,), "the loss is over what the assistant says only")
    draft.only("truncation_mode", ("keep_start",), "long answers are dropped or cut at their end: long_answers")
    if "eos_token" in draft.script.settings:
        draft.put("rollout.stop_token_ids", [str(draft.value("eos_token"))], "eos_token")
    if draft.script.trainer == "SFTTrainer":
        draft.only("loss_type", ("nll",), "the loss is the negative log-likelihood")


def _lengths(draft: Draft) -> None:
    """One limit for the whole row in TRL, two here."""
    length = draft.value("max_length")
    name = draft.gives("max_length", "max_seq_length") or "max_length"
    length = draft.value(name) or length
    why = "TRL's limit is for prompt and answer together; here each of the two has it"
    prompt, answer = draft.value("max_prompt_length"), draft.value("max_completion_length")
    if isinstance(length, int | float):
        draft.put("data.max_prompt_tokens", int(prompt or length), name, fate=Fate.OTHERWISE, why=why)
        draft.put("rollout.max_response_tokens", int(answer or length), note=f"{draft.script.peer}: {name}; {why}")
        section = "sft" if draft.script.command in SUPERVISED else "preferences"
        draft.put(f"{section}.long_answers", "cut", note="as TRL, which cuts rows at max_length")
    for given, field in (
        ("max_prompt_length", "data.max_prompt_tokens"),
        ("max_completion_length", "rollout.max_response_tokens"),
    ):
        if given in draft.script.settings:
            draft.row(Fate.TAKEN, given, "", [field])


def _dpo(draft: Draft) -> None:
    draft.take(["beta", "label_smoothing"])
    given = draft.value("loss_type")
    kinds = [str(kind) for kind in (given if isinstance(given, list | tuple) else [given])]
    weights = draft.value("loss_weights") or [1.0] * len(kinds)
    main = [kind for kind in kinds if kind in ("sigmoid", "ipo", "hinge")]
    if len(main) != 1 or set(kinds) - {*main, "sft"}:
        draft.row(
            Fate.REFUSED,
            "loss_type",
            "expected sigmoid, ipo or hinge, with sft beside it: preferences.loss",
            stops=False,
        )
        return
    draft.put("preferences.loss", main[0], "loss_type")
    if "sft" in kinds:
        ratio = float(weights[kinds.index("sft")]) / float(weights[kinds.index(main[0])])
        draft.put("preferences.sft_coef", ratio, "loss_weights", fate=Fate.OTHERWISE, why="relative to the first loss")
    draft.take(["rpo_alpha"])
    draft.only("f_divergence_type", ("reverse_kl",), "the divergence is the reverse KL")


def _cpo(draft: Draft) -> None:
    """CPO, and SimPO, which TRL has as a loss type of it."""
    draft.take(["beta", "label_smoothing"])
    loss = {"sigmoid": "cpo", "simpo": "simpo"}.get(str(draft.value("loss_type")))
    if loss is None:
        draft.row(Fate.REFUSED, "loss_type", "without a reference: simpo, orpo and cpo, preferences.loss", stops=False)
        return
    draft.put("preferences.loss", loss, "loss_type", note="CPOTrainer: no reference model")
    draft.put("preferences.sft_coef", float(draft.value("cpo_alpha")), "cpo_alpha",
              note="TRL: cpo_alpha")  # fmt: skip
    if loss == "simpo":
        draft.put("preferences.target_margin", float(draft.value("simpo_gamma")), "simpo_gamma",
                  note="TRL: simpo_gamma")  # fmt: skip
    elif draft.gives("simpo_gamma"):
        draft.row(Fate.TAKEN, "simpo_gamma", "has no effect on this loss")
    draft.only("alpha", (0, 0.0), "the reward of AlphaPO is not among the losses")


def _orpo(draft: Draft) -> None:
    draft.put("preferences.loss", "orpo", note="ORPOTrainer; its supervised loss is over the answers' tokens here")
    draft.take(["beta"])


def _kto(draft: Draft) -> None:
    draft.take(["beta", "desirable_weight", "undesirable_weight"])
    draft.only("loss_type", ("kto",), "KTO without its estimate of the KL is not among the losses")


def _prm(draft: Draft) -> None:
    draft.put("preferences.step_separator", str(draft.value("step_separator")), "step_separator",
              note="TRL has a separator behind the last step, too, and two labels in place of one number")  # fmt: skip
    draft.only("train_on_last_step_only", (False,), "all labelled steps are learned; null labels leave steps out")


PREFERENCES: Mapping[str, Callable[[Draft], None]] = {
    "DPOTrainer": _dpo,
    "CPOTrainer": _cpo,
    "ORPOTrainer": _orpo,
    "KTOTrainer": _kto,
    "PRMTrainer": _prm,
}
"""Trainer -> what its loss takes."""


def command_of(script_lmbda: object, seq_kd: object) -> str:
    """The command for a share of the student's own samples: `distill` for none, and for the teacher's samples."""
    return "distill" if script_lmbda == 0 or seq_kd is True else "train"


def put_distillation(draft: Draft, devices: int) -> None:
    """Teacher, divergence, samples and batches."""
    _teacher(draft)
    _divergence(draft)
    if draft.script.command == "distill":
        put_pairs(draft, devices)
        _given(draft)
    else:
        _on_policy(draft, devices)


def _teacher(draft: Draft) -> None:
    name = draft.gives(*NAMES)
    for other in NAMES:
        if other in draft.script.settings:
            value = draft.value(other) if other == name else None
            known = [{"path": value}] if isinstance(value, str) else None
            draft.put("teachers", known, other)
    if name is None:
        draft.row(Fate.REFUSED, NAMES[-1], "no teacher is named: set teachers", stops=True)
    if "teacher_model_init_kwargs" in draft.script.settings:
        draft.row(Fate.DECIDED, "teacher_model_init_kwargs", "teachers.0 has dtype, revision, backend and options")


def _divergence(draft: Draft) -> None:
    draft.put(OBJECTIVE, "exact", note="TRL: GKDTrainer compares the whole vocabulary")
    beta = float(draft.value("beta"))
    kind = {0.0: "forward", 1.0: "reverse"}.get(beta, "jsd")
    draft.put(DIVERGENCE, kind, "beta", why="beta 0 is the forward KL, 1 the reverse KL")
    if kind == "jsd":
        draft.put("algorithm.distillation.beta", beta, "beta")


def _given(draft: Draft) -> None:
    """`rlsdk distill`: nothing is sampled."""
    if draft.value("seq_kd") is True:
        why = (
            "the teacher's own answers: first `rlsdk generate TEACHER --keep all --output rows.jsonl`, and name that "
            "file in data.train"
        )
        draft.row(Fate.REFUSED, "seq_kd", why, stops=True)
    else:
        draft.only("seq_kd", (False,), "")
    if "lmbda" in draft.script.settings:
        of_teacher = draft.value("seq_kd") is True and draft.value("lmbda") != 0
        fate = Fate.OTHERWISE if of_teacher else Fate.TAKEN
        draft.row(fate, "lmbda", "all answers are given" if of_teacher else "0: given answers, `rlsdk distill`")
    for name in ("temperature", "max_new_tokens"):
        if name in draft.script.settings:
            draft.row(Fate.DECIDED, name, "nothing is sampled")


def _on_policy(draft: Draft, devices: int) -> None:
    """`rlsdk train`: one sample of each prompt, and one optimizer step on each batch of them."""
    share = float(draft.value("lmbda"))
    why = "1: all samples are the student's own"
    if share != 1.0:
        why = (
            f"all samples are the student's own, where TRL takes {1 - share:g} of the batches from the rows' answers; "
        )
        why += "`rlsdk distill` learns these: run it before"
    draft.put("algorithm.recipe", "on_policy_distillation", "lmbda",
              fate=Fate.TAKEN if share == 1.0 else Fate.OTHERWISE, why=why)  # fmt: skip
    draft.only("seq_kd", (False,), "")
    rows = int(draft.value("per_device_train_batch_size"))
    accumulation = int(draft.value("gradient_accumulation_steps"))
    names = [
        name for name in ("per_device_train_batch_size", "gradient_accumulation_steps") if name in draft.script.settings
    ]
    total = rows * devices * accumulation
    why = f"{rows} rows x {devices} device{'s' * (devices > 1)} x {accumulation} accumulated = {total} a step"
    names = names or ["per_device_train_batch_size"]
    draft.put("trainer.prompts_per_step", total, *names, fate=Fate.OTHERWISE, why=why)
    draft.put("trainer.samples_per_prompt", 1, note="TRL: one completion of each prompt")
    draft.put("trainer.updates_per_step", 1, note="TRL: new completions for each optimizer step")
    draft.put("train.micro_batch_rows", rows, note="TRL: per_device_train_batch_size")
    steps = draft.value("max_steps")
    if isinstance(steps, int | float) and steps > 0:
        draft.put("trainer.steps", int(steps), "max_steps")
        if "num_train_epochs" in draft.script.settings:
            draft.row(Fate.DECIDED, "num_train_epochs", "max_steps counts, as in TRL")
    else:
        draft.put("trainer.epochs", float(draft.value("num_train_epochs")), "num_train_epochs")
        if "max_steps" in draft.script.settings:
            draft.row(Fate.TAKEN, "max_steps", "off: the number of epochs counts")
    temperature = float(draft.value("temperature"))
    draft.put("rollout.temperature", temperature, "temperature", fate=Fate.OTHERWISE,
              why="both models' logits are divided by it in the divergence, too; in TRL only in sampling")  # fmt: skip
    draft.put("rollout.max_response_tokens", int(draft.value("max_new_tokens")), "max_new_tokens")
    name = draft.gives("max_length", "max_seq_length") or "max_length"
    if (length := draft.value(name) or draft.value("max_length")) is not None:
        draft.put("data.max_prompt_tokens", int(length), name, fate=Fate.OTHERWISE,
                  why="TRL's limit is for prompt and answer of the row")  # fmt: skip


def with_command(script: Script) -> Script:
    """The script with the command that its share of own samples asks for."""
    if script.trainer != DISTILLATION:
        return script
    given = {name: one.value for name, one in script.settings.items()}
    return replace(script, command=command_of(given.get("lmbda"), given.get("seq_kd")))

"""TRL's trainers on answers and on pairs: supervised training, preferences, reward models."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlsdk.migrate.draft import Draft, Fate, here


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
    per_row = 1 if draft.script.command in ("sft", "kto", "process-reward") else 2
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
        section = "sft" if draft.script.command == "sft" else "preferences"
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

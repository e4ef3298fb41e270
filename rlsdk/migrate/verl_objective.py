"""verl: what its samplers optimise, with which rewards, KL and learning rate."""

from __future__ import annotations

from typing import Any

from rlsdk.migrate.common import put_rewards, put_schedule, put_warmup
from rlsdk.migrate.draft import Draft, Fate
from rlsdk.migrate.verl_tables import AGGREGATIONS, ESTIMATORS, KL, LOSSES, WITHOUT_GROUP, A, R


def put_objective(draft: Draft) -> None:
    name = "algorithm.adv_estimator"
    estimator = ESTIMATORS.get(str(draft.value(name)))
    if estimator is None:
        draft.row(
            Fate.REFUSED, name, f"expected one of {', '.join(ESTIMATORS)}; algorithm.advantage takes one of yours"
        )
    divides = draft.value("algorithm.norm_adv_by_std_in_grpo")
    chosen = "dr_grpo" if estimator == "grpo" and not divides else estimator
    alone = WITHOUT_GROUP.get(chosen or "") if draft.value(f"{R}.n") == 1 else None
    if alone:
        why = "one sample a prompt (rollout.n): verl compares it with no other, so that its score is the advantage"
        draft.put("algorithm.advantage", alone, name, fate=Fate.OTHERWISE, why=why)
    elif chosen:
        draft.put("algorithm.advantage", chosen, name)
    draft.only("algorithm.norm_adv_by_std_in_grpo", (True, False), "")
    options = {key: float(draft.value(f"algorithm.{key}", 1.0)) for key in ("gamma", "lam")}
    if estimator == "gae":
        draft.put("algorithm.advantage_options", options, "algorithm.gamma", "algorithm.lam")
    else:
        draft.only("algorithm.gamma", (1, 1.0), "this estimator does not discount")
        draft.only("algorithm.lam", (1, 1.0), "this estimator has no lambda")
    loss_name = f"{A}.policy_loss.loss_mode"
    loss = LOSSES.get(str(draft.value(loss_name, "vanilla")))
    if loss is None:
        draft.row(Fate.REFUSED, loss_name, f"expected one of {', '.join(LOSSES)}; algorithm.loss takes one of yours")
    draft.put("algorithm.loss", loss or "ppo_clip", *([loss_name] if loss else []))
    _clip(draft, loss or "ppo_clip")
    aggregation = AGGREGATIONS.get(str(draft.value(f"{A}.loss_agg_mode")))
    if aggregation:
        draft.put("algorithm.loss_aggregation", aggregation, f"{A}.loss_agg_mode")
    if estimator == "gae":
        _critic(draft)
    else:
        for name in [name for name in draft.script.settings if name.startswith("critic.")]:
            draft.row(Fate.DECIDED, name, f"no critic with {draft.value('algorithm.adv_estimator')}")


def _clip(draft: Draft, loss: str) -> None:
    names = [f"{A}.clip_ratio{end}" for end in ("_low", "_high", "", "_c")]
    both = float(draft.value(names[2]))
    low, high = (float(draft.value(name, both)) for name in names[:2])
    options: dict[str, Any] = {"clip_low": low, "clip_high": high}
    if loss == "ppo_clip":
        options["dual_clip"] = float(draft.value(names[3]))
    if loss in ("sapo", "gpg"):
        for name in names:
            draft.only(name, (), "this loss does not clip")
    else:
        draft.put("algorithm.loss_options", options, *names)
    for name, ours in ((f"{A}.tau_pos", "tau_positive"), (f"{A}.tau_neg", "tau_negative")):
        if name in draft.script.settings:
            if loss == "sapo":
                draft.fields.setdefault("algorithm.loss_options", {})[ours] = float(draft.value(name))
            draft.row(Fate.TAKEN if loss == "sapo" else Fate.DECIDED, name, "", ["algorithm.loss_options"])


def _critic(draft: Draft) -> None:
    draft.put("critic.optim.lr", float(draft.value("critic.optim.lr")), "critic.optim.lr")
    if "critic.model.path" in draft.script.settings:
        draft.put("critic.path", str(draft.value("critic.model.path")), "critic.model.path")
    share = draft.gives("critic.optim.lr_warmup_steps_ratio")
    if share:
        put_warmup_of(draft, "critic.optim", "critic.optim")
    if "critic.optim.weight_decay" in draft.script.settings:
        draft.put(
            "critic.optim.weight_decay", float(draft.value("critic.optim.weight_decay")), "critic.optim.weight_decay"
        )
    if "critic.cliprange_value" in draft.script.settings:
        draft.put("algorithm.value_clip", float(draft.value("critic.cliprange_value")), "critic.cliprange_value")
    else:
        draft.put("algorithm.value_clip", 0.5, note="verl: critic.cliprange_value, by default")


def put_kl(draft: Draft) -> None:
    in_loss, in_reward = draft.value(f"{A}.use_kl_loss"), draft.value("algorithm.use_kl_in_reward")
    coef = {"loss": f"{A}.kl_loss_coef", "reward": "algorithm.kl_ctrl.kl_coef"}
    kind = {"loss": f"{A}.kl_loss_type", "reward": "algorithm.kl_penalty"}
    used = "loss" if in_loss else "reward" if in_reward else ""
    if in_loss and in_reward:
        draft.row(Fate.REFUSED, "algorithm.use_kl_in_reward", "the KL is in the loss or in the reward, not in both")
    elif "algorithm.use_kl_in_reward" in draft.script.settings:
        draft.put("algorithm.kl_in_reward", bool(in_reward) or None, "algorithm.use_kl_in_reward")
    if f"{A}.use_kl_loss" in draft.script.settings:
        draft.row(Fate.TAKEN, f"{A}.use_kl_loss", "", ["algorithm.kl_coef" if in_loss else "algorithm.kl_coef: 0.0"])
    for where in ("loss", "reward"):
        estimator = KL.get(str(draft.value(kind[where])).removesuffix("+"))
        if where == used:
            draft.put("algorithm.kl_coef", float(draft.value(coef[where])), coef[where])
            field = "algorithm.kl_estimator" if where == "loss" else "algorithm.kl_reward_estimator"
            if estimator is None or (where == "loss" and estimator == "k1"):
                draft.row(Fate.REFUSED, kind[where], f"its gradient is not that of a KL: {field} k2, k3 or low_var_kl")
            else:
                draft.put(field, estimator, kind[where])
            continue
        for name in (coef[where], kind[where]):
            if name in draft.script.settings:
                draft.row(Fate.TAKEN, name, f"has no effect: the KL is not in the {where}")
    for name in ("type", "horizon", "target_kl"):
        full = f"algorithm.kl_ctrl.{name}"
        if full in draft.script.settings:
            adaptive = draft.value("algorithm.kl_ctrl.type") == "adaptive" and used == "reward"
            field = {"horizon": "algorithm.kl_horizon", "target_kl": "algorithm.kl_target"}.get(name, "")
            draft.put(field, float(draft.value(full)), full) if field and adaptive else draft.row(Fate.TAKEN, full, "")


def put_optimizer(draft: Draft) -> None:
    for name in (f"{A}.optim.lr_scheduler_type", f"{A}.optim.warmup_style", f"{A}.optim.lr_decay_style"):
        if name in draft.script.settings:
            put_schedule(draft, name)
    put_warmup_of(draft, f"{A}.optim", "train.optim")


def put_warmup_of(draft: Draft, theirs: str, ours: str) -> None:
    steps, share = draft.value(f"{theirs}.lr_warmup_steps"), draft.value(f"{theirs}.lr_warmup_steps_ratio")
    path = f"{ours}.warmup_steps"
    if isinstance(steps, int) and steps >= 0:
        put_warmup(draft, steps, f"{theirs}.lr_warmup_steps", path=path)
    elif f"{theirs}.lr_warmup_steps" in draft.script.settings:
        draft.row(Fate.TAKEN, f"{theirs}.lr_warmup_steps", "off, as here")
    if share and path not in draft.fields:
        _put_share(draft, float(share), f"{theirs}.lr_warmup_steps_ratio", path)
    elif f"{theirs}.lr_warmup_steps_ratio" in draft.script.settings:
        draft.row(Fate.TAKEN, f"{theirs}.lr_warmup_steps_ratio", "no warm-up by share")


def _put_share(draft: Draft, share: float, name: str, path: str) -> None:
    """A warm-up as a share of all steps, which verl rounds down."""
    section = path.removesuffix(".warmup_steps")
    total = draft.fields.get("sft.steps" if section == "sft" else "trainer.steps")
    if total is None:
        why = "rounded up here, down in verl"
        draft.put(f"{section}.warmup_ratio", share, name, fate=Fate.OTHERWISE, why=why)
        return
    if section != "sft":
        total *= draft.fields.get("trainer.updates_per_step", 1) * draft.fields.get("trainer.epochs_per_step", 1)
    why = f"{share:g} of {total} optimizer steps, rounded down"
    draft.put(path, int(share * total), name, fate=Fate.OTHERWISE, why=why)


def put_verl_rewards(draft: Draft) -> None:
    """What gives a sample its score, and which groups are replaced."""
    path, name = "custom_reward_function.path", "custom_reward_function.name"
    model = "reward_model.model.path"
    rewards: list[tuple[str, Any]] = []
    if draft.value(path):
        function = draft.value(name, "compute_score")
        rewards.append((path, f"{draft.value(path)}:{function}"))
        if name in draft.script.settings:
            draft.row(Fate.TAKEN, name, "", ["rewards.0"])
    elif not draft.value("reward_model.enable"):
        files = f"{draft.value('data.train_files')}".lower()
        known = next((grader for grader in ("gsm8k", "math") if grader in files), None)
        if known:
            draft.put("rewards", [{"name": known}], "data.train_files", fate=Fate.OTHERWISE,
                      why="verl chooses a grader by each row's data_source")  # fmt: skip
        else:
            draft.row(Fate.REFUSED, "data.train_files", "verl chooses a grader by each row's data_source: name one in "
                      "rewards (gsm8k, math, code, file.py:fn)", stops=True)  # fmt: skip
    if model in draft.script.settings:
        rewards.append((model, draft.value(model)))
    put_rewards(draft, rewards)
    buffer = "reward_model.reward_kwargs.overlong_buffer_cfg."
    if draft.value(f"{buffer}enable"):
        draft.put("algorithm.lengths.soft_tokens", int(draft.value(f"{buffer}len") or 1), f"{buffer}len")
        draft.put(
            "algorithm.lengths.soft_factor",
            float(draft.value(f"{buffer}penalty_factor", 1.0)),
            f"{buffer}penalty_factor",
        )
        draft.row(Fate.TAKEN, f"{buffer}enable", "", ["algorithm.lengths.soft_tokens"])
    for end in ("enable", "len", "penalty_factor"):
        if f"{buffer}{end}" in draft.script.settings and not draft.value(f"{buffer}enable"):
            draft.row(Fate.TAKEN, f"{buffer}{end}", "off: no overlong punishment")
    filtering = "algorithm.filter_groups."
    for end, field in (("enable", "enabled"), ("max_num_gen_batches", "max_groups"), ("metric", "")):
        full = f"{filtering}{end}"
        if full in draft.script.settings:
            value = draft.value(full)
            is_on = bool(draft.value(f"{filtering}enable"))
            if not field or not is_on:
                draft.row(Fate.TAKEN if not is_on else Fate.DECIDED, full, "groups are judged by the whole score")
            else:
                draft.put(
                    f"algorithm.dynamic_sampling.{field}", value if field == "enabled" else max(float(value), 1.0), full
                )

"""OpenRLHF: what its samplers optimise, with which KL and correction."""

from __future__ import annotations

from rlsdk.migrate.draft import Draft, Fate
from rlsdk.migrate.openrlhf_tables import CORRECTIONS, ESTIMATORS


def put_objective(draft: Draft) -> None:
    name = "algo.advantage.estimator"
    found = ESTIMATORS.get(str(draft.value(name)))
    if found is None:
        draft.row(
            Fate.REFUSED, name, f"expected one of {', '.join(ESTIMATORS)}; algorithm.advantage takes one of yours"
        )
    else:
        draft.put("algorithm.advantage", found[0], name, fate=Fate.OTHERWISE if found[1] else Fate.TAKEN, why=found[1])
    gamma, lam = float(draft.value("algo.advantage.gamma")), float(draft.value("algo.advantage.lambd"))
    options = {"gae": {"gamma": gamma, "lam": lam}, "reinforce_plus_plus": {"gamma": gamma}}.get(
        found[0] if found else ""
    )
    for name in ("algo.advantage.gamma", "algo.advantage.lambd"):
        if options is not None and not (name.endswith("lambd") and "lam" not in options):
            draft.put("algorithm.advantage_options", options, name)
        elif name in draft.script.settings:
            draft.only(name, (1, 1.0), "this estimator does not discount")
    loss = {"ppo": "ppo_clip", "gspo": "gspo"}.get(str(draft.value("actor.policy_loss_type", "ppo")), "ppo_clip")
    draft.put("algorithm.loss", loss, *(["actor.policy_loss_type"] if draft.gives("actor.policy_loss_type") else []),
              note="OpenRLHF: actor.policy_loss_type")  # fmt: skip
    draft.put("algorithm.loss_aggregation", "sequence_mean" if loss == "gspo" else "token_mean", note="as OpenRLHF")
    both = draft.value("actor.eps_clip_low_high")
    low, high = both if isinstance(both, list) and len(both) == 2 else (draft.value("actor.eps_clip"),) * 2
    dual = draft.value("actor.dual_clip")
    clip = {"clip_low": float(low), "clip_high": float(high), **({"dual_clip": float(dual)} if dual else {})}
    names = ("actor.eps_clip", "actor.eps_clip_low_high", "actor.dual_clip")
    if low > 0 and high > 0:
        draft.put("algorithm.loss_options", clip, *names)
    else:
        for name in filter(draft.gives, names):
            why = "a ratio that may not change at all: expected a number above 0, such as 0.2"
            draft.row(Fate.REFUSED, name, why, ["algorithm.loss_options"])
    if draft.value(name_of_estimator := "algo.advantage.estimator") == "gae":
        draft.put("critic.optim.lr", float(draft.value("critic.adam.lr")), "critic.adam.lr")
        draft.put("algorithm.value_clip", float(draft.value("critic.value_clip")), "critic.value_clip")
        if draft.value("critic.model_name_or_path"):
            draft.put("critic.path", str(draft.value("critic.model_name_or_path")), "critic.model_name_or_path")
    else:
        for name in [name for name in draft.script.settings if name.startswith("critic.") and ".num_" not in name]:
            draft.row(Fate.DECIDED, name, f"no critic with {draft.value(name_of_estimator)}")
    if draft.value("actor.entropy_coef") is not None:
        draft.put("algorithm.entropy_coef", float(draft.value("actor.entropy_coef")), "actor.entropy_coef")
    _kl(draft)
    draft.only(
        "algo.advantage.no_std_norm", (False,), "the estimator decides what is normalised: algorithm.advantage dr_grpo"
    )
    if "algo.dynamic_filtering_enable" in draft.script.settings:
        draft.put(
            "algorithm.dynamic_sampling.enabled",
            bool(draft.value("algo.dynamic_filtering_enable")),
            "algo.dynamic_filtering_enable",
        )
    length = draft.value("reward.overlong_buffer_len")
    if length:
        draft.put("algorithm.lengths.soft_tokens", int(length), "reward.overlong_buffer_len")
        draft.put("algorithm.lengths.soft_factor", float(draft.value("reward.overlong_penalty_factor", 1.0)),
                  "reward.overlong_penalty_factor")  # fmt: skip
    if draft.value("train.enable_ema"):
        draft.put("train.ema_decay", float(draft.value("train.ema_beta", 0.992)), "train.enable_ema", "train.ema_beta")


def _kl(draft: Draft) -> None:
    coef, in_loss = float(draft.value("algo.kl.init_coef")), bool(draft.value("algo.kl.use_loss"))
    draft.put("algorithm.kl_coef", coef, "algo.kl.init_coef")
    estimator = str(draft.value("algo.kl.estimator"))
    if in_loss:
        draft.row(Fate.TAKEN, "algo.kl.use_loss", "", ["algorithm.kl_in_reward: False"])
        if estimator == "k1":
            draft.row(Fate.REFUSED, "algo.kl.estimator", "k1 has no gradient of a KL: algorithm.kl_estimator k2 or k3")
        else:
            draft.put("algorithm.kl_estimator", estimator if coef else None, "algo.kl.estimator")
    elif coef:
        draft.put("algorithm.kl_in_reward", True, *(["algo.kl.use_loss"] if draft.gives("algo.kl.use_loss") else []),
                  note="OpenRLHF: the KL is in the reward without algo.kl.use_loss")  # fmt: skip
        draft.put("algorithm.kl_reward_estimator", estimator, "algo.kl.estimator")
    for name, field in (("algo.kl.target", "algorithm.kl_target"), ("algo.kl.horizon", "algorithm.kl_horizon")):
        if draft.value(name) is not None and name in draft.script.settings:
            draft.put(field, float(draft.value(name)) if not in_loss and coef else None, name)
    if "algo.kl.estimator" in draft.script.settings and not any(row.name == "algo.kl.estimator" for row in draft.rows):
        draft.row(Fate.TAKEN, "algo.kl.estimator", "has no effect: no KL")
    correction, kind = (
        draft.value("algo.advantage.is_correction_enable"),
        draft.value("algo.advantage.is_correction_type", "tis"),
    )
    names = [f"algo.advantage.is_correction_{end}" for end in ("enable", "type", "threshold")]
    bounds = draft.value(names[2])
    lower, upper = bounds if isinstance(bounds, list) and len(bounds) == 2 else (0.5, 5.0)
    if correction:
        mode, level = CORRECTIONS.get(str(kind), ("truncate", "token"))
        draft.put("algorithm.correction.mode", mode, *names[:2])
        draft.put("algorithm.correction.level", level, note=f"OpenRLHF: {names[1]}")
        draft.put("algorithm.correction.upper", float(upper), names[2])
        draft.put("algorithm.correction.lower", float(lower), note=f"OpenRLHF: {names[2]}")
        draft.put(
            "algorithm.old_log_probs", "always", note="as OpenRLHF: the ratio is to log-probs of the train engine"
        )
    else:
        for name in names:
            if name in draft.script.settings:
                draft.row(Fate.TAKEN, name, "off, as here")

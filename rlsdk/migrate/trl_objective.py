"""TRL: what its samplers optimise, and the engine that samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsdk.migrate.draft import Draft, Fate

ENGINE_FLAG = "use_vllm"
LOSSES: Mapping[str, tuple[str, str]] = {
    "grpo": ("ppo_clip", "sequence_mean"),
    "bnpo": ("ppo_clip", "token_mean"),
    "dapo": ("ppo_clip", "token_mean"),
    "dr_grpo": ("ppo_clip", "sequence_sum"),
    "cispo": ("cispo", "token_mean"),
    "sapo": ("sapo", "sequence_mean"),
}
"""TRL's loss_type -> our loss and aggregation."""


def put_objective(draft: Draft) -> None:
    if draft.script.trainer == "RLOOTrainer":
        draft.put("algorithm.advantage", "rloo", note="TRL: RLOOTrainer")
        draft.put(
            "algorithm.loss_aggregation", "sequence_token_sum", note="TRL: RLOO's ratio is that of the whole response"
        )
        draft.only(
            "normalize_advantages", (False,), "advantages are not normalised: algorithm.advantage takes one of your own"
        )
        loss, kind = "ppo_clip", "rloo"
    else:
        kind = str(draft.value("loss_type"))
        loss = _loss(draft, kind)
        _advantage(draft)
    _clip(draft, loss, kind)
    beta = draft.value("beta") or 0.0
    draft.put("algorithm.kl_coef", float(beta), "beta")
    if beta and draft.script.trainer == "RLOOTrainer":
        draft.put("algorithm.kl_in_reward", True, note="TRL: RLOO subtracts the KL from the reward")
    if "entropy_coef" in draft.script.settings:
        draft.put("algorithm.entropy_coef", float(draft.value("entropy_coef")), "entropy_coef")
    quantile = draft.gives("top_entropy_quantile")
    if quantile:
        share = float(draft.value(quantile))
        draft.put("algorithm.entropy_share", share if share < 1 else None, quantile)
    draft.take(["mask_truncated_completions"])


def _loss(draft: Draft, kind: str) -> str:
    found = LOSSES.get(kind)
    is_sequence = draft.value("importance_sampling_level") == "sequence"
    if found is None:
        draft.row(
            Fate.REFUSED, "loss_type", f"expected one of {', '.join(LOSSES)}; algorithm.loss takes one of your own"
        )
        return "ppo_clip"
    loss = "gspo" if is_sequence else found[0]
    draft.put("algorithm.loss", loss, *(["importance_sampling_level"] if is_sequence else ["loss_type"]))
    draft.put("algorithm.loss_aggregation", found[1], "loss_type")
    if not is_sequence:
        draft.only("importance_sampling_level", ("token",), "")
    return loss


def _advantage(draft: Draft) -> None:
    scale = {True: "group", False: "none"}.get(draft.value("scale_rewards"), draft.value("scale_rewards"))
    if scale == "none":
        draft.put("algorithm.advantage", "dr_grpo", "scale_rewards", why="the mean is subtracted, nothing is divided")
    else:
        draft.put("algorithm.advantage", "grpo", note="TRL: GRPOTrainer")
        options = {"eps": 1e-4, **({"scale": "batch"} if scale == "batch" else {})}
        draft.put("algorithm.advantage_options", options, "scale_rewards", why="TRL adds 1e-4 to the deviation")


def _clip(draft: Draft, loss: str, kind: str) -> None:
    low = float(draft.value("epsilon"))
    high = float(draft.value("epsilon_high") or low)
    if loss == "cispo":
        options: dict[str, Any] = {"clip_high": round(high - 1, 12)} if high > 1 else {}
        why = "TRL bounds the ratio itself, rlsdk its excess over 1"
        draft.put("algorithm.loss_options", options or None, "epsilon_high", fate=Fate.OTHERWISE, why=why)
        draft.only("epsilon", (), "CISPO has no lower bound, in TRL as here")
    elif loss == "sapo":
        options = {ours: draft.value(name) for ours, name in (("tau_positive", "sapo_temperature_pos"),
                   ("tau_negative", "sapo_temperature_neg")) if draft.gives(name)}  # fmt: skip
        draft.put("algorithm.loss_options", options or None, "sapo_temperature_pos", "sapo_temperature_neg")
        for name in ("epsilon", "epsilon_high"):
            draft.only(name, (), "SAPO does not clip, in TRL as here")
    else:
        delta = draft.value("delta")
        options = {"clip_low": low, "clip_high": high, **({"dual_clip": float(delta)} if delta else {})}
        draft.put("algorithm.loss_options", options, "epsilon", "epsilon_high", "delta")
    for name in ("sapo_temperature_pos", "sapo_temperature_neg"):
        if loss != "sapo" and name in draft.script.settings:
            draft.row(Fate.DECIDED, name, f"has no effect with loss_type {kind}")


def put_engine(draft: Draft) -> None:
    """The rollout engine, and the correction for its log-probs, which TRL makes with vLLM only."""
    engine = ENGINE_FLAG.removeprefix("use_")
    uses = bool(draft.value(ENGINE_FLAG))
    if ENGINE_FLAG in draft.script.settings:
        draft.put("rollout.backend", engine if uses else None, ENGINE_FLAG)
    name = "vllm_gpu_memory_utilization"
    if draft.value(name) is not None and uses:
        draft.put(f"rollout.{engine}.gpu_memory_utilization", float(draft.value(name)), name)
    mode = str(draft.value("vllm_importance_sampling_mode") or "sequence_mask")
    names = ["vllm_importance_sampling_" + end for end in ("correction", "mode", "clip_max", "clip_min")]
    names = [name for name in (*names, "vllm_importance_sampling_cap") if name in draft.script.settings]
    level, _, how = mode.partition("_")
    if uses and draft.value("vllm_importance_sampling_correction", True) and how in ("mask", "truncate"):
        upper = draft.value("vllm_importance_sampling_clip_max") or draft.value("vllm_importance_sampling_cap") or 3.0
        draft.put("algorithm.correction.mode", how, note="TRL corrects the log-probs of vLLM by default")
        draft.put("algorithm.correction.level", level, note=f"TRL: vllm_importance_sampling_mode {mode}")
        draft.put("algorithm.correction.upper", float(upper), note="TRL: vllm_importance_sampling_clip_max")
        draft.put("algorithm.old_log_probs", "always", note="as TRL: the ratio is to log-probs of the train engine")
        for name in names:
            draft.row(Fate.TAKEN, name, "", [f"algorithm.correction.{end}" for end in ("mode", "level", "upper")])
        lower = draft.value("vllm_importance_sampling_clip_min")
        if lower:
            draft.put("algorithm.correction.lower", float(lower), note="TRL: vllm_importance_sampling_clip_min")
    else:
        for name in names:
            draft.row(
                Fate.TAKEN if not uses or not draft.value(name) else Fate.DECIDED, name, "no correction, as by default"
            )
    if not uses:
        for name in ("vllm_gpu_memory_utilization", "vllm_enable_sleep_mode", "vllm_mode"):
            if name in draft.script.settings and name not in {row.name for row in draft.rows}:
                draft.row(Fate.DECIDED, name, "has no effect without use_vllm")

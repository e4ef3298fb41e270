"""The fields of a batch: what each one holds, of which dtype, and what one element of it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Per(StrEnum):
    """What one element of a field belongs to."""

    TOKEN = "token"
    """Flat `[N]`, or `[N, ...]`."""
    ROW = "row"
    """`[B]`, or `[B, ...]`."""
    SAMPLE = "sample"
    """As `ROW`, and equal on all rows of a sample."""


@dataclass(frozen=True, kw_only=True)
class FieldSpec:
    """One known field of a batch."""

    per: Per
    dtype: str
    doc: str


def _token(dtype: str, doc: str) -> FieldSpec:
    return FieldSpec(per=Per.TOKEN, dtype=dtype, doc=doc)


def _row(dtype: str, doc: str) -> FieldSpec:
    return FieldSpec(per=Per.ROW, dtype=dtype, doc=doc)


def _sample(dtype: str, doc: str) -> FieldSpec:
    return FieldSpec(per=Per.SAMPLE, dtype=dtype, doc=doc)


SCHEMA: Mapping[str, FieldSpec] = {
    "input_ids": _token("int64", "Prompt, response and tool tokens."),
    "response_mask": _token("bool", "True on tokens that the policy sampled; prompt and tool tokens are False."),
    "rollout_log_probs": _token("float32", "As the rollout engine returned them at sampling; 0 off the mask."),
    "old_log_probs": _token("float32", "Recomputed by the train engine with the weights before this update."),
    "ref_log_probs": _token("float32", "Under the frozen reference policy."),
    "teacher_log_probs": _token(
        "float32", "Under the frozen teacher; NaN on rows that it does not teach. `teacher_log_probs.NAME` of several."
    ),
    "teacher_states": _token(
        "float32",
        "`[N, H]`: hidden states of the teacher, for the output `divergence`; H is the largest of several teachers', "
        "with zeros behind the states of the others.",
    ),
    "teacher_index": _token(
        "int64", "Number of the teacher of the token's row (`TrainEngine.load_teacher`), equal in a row; -1: none."
    ),
    "teacher_top_ids": _token("int64", "`[N, k]`: the teacher's most probable tokens, for the output `divergence`."),
    "teacher_top_log_probs": _token("float32", "`[N, k]`: their log-probs, at the teacher's temperature."),
    "teacher_weight": _token("float32", "Weight of the token's divergence from the teacher; 0 where it has none."),
    "values": _token("float32", "Of the critic, before this update."),
    "token_level_rewards": _token("float64", "Reward of each token, KL penalty included where one is set."),
    "advantages": _token("float32", "Weight of each token in the policy gradient; 0 off the mask."),
    "returns": _token("float32", "Target of the critic."),
    "token_scores": _token("float64", "Reward of single tokens, where a reward gives them; beside `scores`."),
    "entropy": _token("float32", "Of the policy before this update, in nats."),
    "rollout_weight": _token(
        "float32", "Importance weight of the train policy against the rollout policy; no gradient."
    ),
    "loss_weight": _token(
        "float32",
        "Share of each token in the mini-batch loss, 0 off the mask. Normalised over the whole mini-batch, so a loss "
        "is sum(loss_weight * per-token loss) however rows are cut.",
    ),
    "row_id": _row("int64", "Identity of the row within its step; unique, and kept by every operation."),
    "uid": _sample(
        "int64",
        "Which prompt the row answers; equal within a group. Rows of a group may differ in their prompt tokens.",
    ),
    "sample": _sample(
        "int64",
        "Which sample of its group the row belongs to: rows of equal `uid` and `sample` are one sample, in the order "
        "of their `row_id`. Without this field each row is a sample.",
    ),
    "chain": _row(
        "int64",
        "Which chain of its sample the row belongs to: rows of a chain follow one another in time, in the order of "
        "their `row_id`. Present where a sample has several.",
    ),
    "row_scale": _row(
        "float64", "Factor of the row's loss, which the normaliser counts. Present where one differs from 1."
    ),
    "chain_scores": _row(
        "float64",
        "Score of the row's chain: `scores` and what the chain alone got. Present where chains have scores of their "
        "own: estimators then compare each chain with the same chain of the group's other samples.",
    ),
    "scores": _sample(
        "float64", "Reward of the whole sample, before any KL penalty. Equal scores may differ by rounding."
    ),
    "policy_version": _row(
        "int64", "Version of the policy that sampled the row's first token; -1 where none was sampled."
    ),
    "truncated": _sample("bool", "True where the response hit its token limit."),
    "valid": _sample("bool", "False where the reward failed: the sample is counted and carries no gradient."),
    "trained": _row("bool", "False where the sample's score counts for its group, but the row's tokens carry no loss."),
    "has_advantage": _sample(
        "bool",
        "False where no token of the sample has an advantage. Present where samples have several rows, which may be in "
        "different micro-batches.",
    ),
    "baseline_scores": _sample("float64", "Score of a greedy response to the same prompt; NaN where it has none."),
    "chosen": _row("bool", "Preference pairs: True on the better row of a `uid`. KTO: True on a desirable row."),
    "margin": _row("float32", "Preference pairs: by how much the better row is to win; read on that row."),
    "row_weight": _row(
        "float32", "Share of the row's pair in the mini-batch loss; equal on both rows. KTO: of the row."
    ),
    "step_labels": _token(
        "float32",
        "Process rewards: label, 0 to 1, of the step that ends before this token; NaN where no labelled step ends.",
    ),
    "step_weight": _token("float32", "Share of the step that ends before this token in the mini-batch loss; else 0."),
    "log_ratio_estimate": _row(
        "float32",
        "KTO: mean over the mini-batch of log policy/reference of answers to other prompts; equal on all rows.",
    ),
}
"""Every field that the core reads or writes. Other names are allowed; only their length is checked."""

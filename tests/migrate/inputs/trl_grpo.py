"""A script as people write them: a system prompt, two rewards, and everything in one file."""

import re

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

SYSTEM = "Think, then give the answer as a number."
GROUP = 8
NUMBER = re.compile(r"-?\d+")


def last_number(text):
    found = NUMBER.findall(text)
    return found[-1] if found else ""


def is_right(completions, answer, **kwargs):
    return [float(last_number(c[-1]["content"]) == a) for c, a in zip(completions, answer, strict=True)]


def is_short(completions, **kwargs):
    return [1.0 if len(c[-1]["content"]) < 400 else 0.0 for c in completions]


def to_prompt(row):
    return {"prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}]}


rows = load_dataset("json", data_files="rows.jsonl", split="train").map(to_prompt)
args = GRPOConfig(
    output_dir="out/grpo",
    learning_rate=5e-6,
    adam_beta2=0.99,
    weight_decay=0.1,
    warmup_ratio=0.1,
    lr_scheduler_type="cosine",
    max_grad_norm=0.1,
    per_device_train_batch_size=GROUP,
    gradient_accumulation_steps=2,
    steps_per_generation=4,
    num_generations=GROUP,
    num_iterations=2,
    max_prompt_length=256,
    max_completion_length=2 * 64,
    max_steps=100,
    beta=0.04,
    epsilon=0.2,
    epsilon_high=0.28,
    loss_type="dr_grpo",
    scale_rewards=False,
    reward_weights=[1.0, 0.2],
    temperature=0.9,
    mask_truncated_completions=True,
    bf16=True,
    use_vllm=False,
    logging_steps=1,
    report_to=["wandb", "trackio"],
    save_steps=40,
    eval_strategy="no",
    seed=7,
    push_to_hub=True,
    a_setting_of_tomorrow=3,
)
trainer = GRPOTrainer(model="model", reward_funcs=[is_right, is_short], args=args, train_dataset=rows)
trainer.train()

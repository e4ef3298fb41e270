"""Distillation as people write it with TRL."""

from datasets import load_dataset
from trl.experimental.gkd import GKDConfig, GKDTrainer

args = GKDConfig(
    output_dir="out",
    learning_rate=2e-5,
    lmbda=1.0,
    beta=0.25,
    temperature=0.8,
    max_new_tokens=256,
    max_length=512,
    seq_kd=False,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=8,
    max_steps=30,
    teacher_model_init_kwargs={"dtype": "bfloat16"},
)
trainer = GKDTrainer(
    model="model", teacher_model="teacher", args=args, train_dataset=load_dataset("json", data_files="rows.jsonl")
)
trainer.train()

"""A process reward model as people write it with TRL."""

from datasets import load_dataset
from trl import PRMConfig, PRMTrainer

args = PRMConfig(
    output_dir="out",
    learning_rate=2e-5,
    step_separator="\n\n",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,
    max_length=512,
    max_steps=30,
    train_on_last_step_only=False,
)
trainer = PRMTrainer(model="model", args=args, train_dataset=load_dataset("json", data_files="rows.jsonl"))
trainer.train()

"""KTO as people write it with TRL."""

from datasets import load_dataset
from trl import KTOConfig, KTOTrainer

args = KTOConfig(
    output_dir="out",
    learning_rate=5e-7,
    beta=0.2,
    desirable_weight=1.33,
    undesirable_weight=0.9,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=8,
    max_length=512,
    max_steps=30,
    loss_type="kto",
)
trainer = KTOTrainer(model="model", args=args, train_dataset=load_dataset("json", data_files="rows.jsonl"))
trainer.train()

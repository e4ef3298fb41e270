from datasets import load_dataset
from trl import RewardConfig, RewardTrainer

if __name__ == "__main__":
    args = RewardConfig(
        output_dir="out/rm",
        center_rewards_coefficient=0.01,
        learning_rate=1e-5,
        max_steps=10,
        max_length=256,
        per_device_train_batch_size=4,
        gradient_checkpointing=False,
        load_in_4bit=True,
    )
    trainer = RewardTrainer(model="model", args=args, train_dataset=load_dataset("rows", split="train[:5%]"))
    trainer.train()

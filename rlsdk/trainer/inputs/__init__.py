"""What a run reads before it takes a device: rows, answers, tokenizer, rewards and judges."""

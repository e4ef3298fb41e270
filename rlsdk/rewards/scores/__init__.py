"""What a reward is and what it gives: definitions, outcomes of a sample, results of a batch, scorers."""

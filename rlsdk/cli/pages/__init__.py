"""Commands that show runs: a report, a comparison, a live page, notes."""

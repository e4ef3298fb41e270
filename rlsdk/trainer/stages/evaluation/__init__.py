"""Evaluation on rows that are never trained on: settings, schedule, metrics and progress."""

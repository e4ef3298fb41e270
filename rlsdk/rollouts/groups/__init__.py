"""Groups: sampled, graded, assembled in the background, and packed into batches."""

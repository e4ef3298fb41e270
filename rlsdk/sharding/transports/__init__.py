"""Ways to move a bucket's bytes between two processes, each behind one contract, and the table of them."""

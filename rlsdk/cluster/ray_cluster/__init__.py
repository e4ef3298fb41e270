"""A Ray cluster: started for one run or joined, guarded, ended, and what its nodes have."""

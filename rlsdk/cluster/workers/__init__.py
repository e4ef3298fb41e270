"""The process of one device: the hosts in it, their threads, and what they reach from there."""

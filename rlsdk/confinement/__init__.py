"""Runs code of others in a process without rights: Landlock, seccomp, limits, an environment without secrets."""

"""`rlsdk environments`: checks an environment, and begins one."""

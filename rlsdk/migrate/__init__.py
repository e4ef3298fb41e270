"""Scripts, commands and recipes of other trainers as run files of rlsdk; what could not be expressed is named.

A reader (`python_script`, `shell`) turns text into settings by name, without running anything. A peer's module (`trl`,
`verl`, `openrlhf`) turns settings into fields of a run, and gives each setting a row that says what became of it.
"""

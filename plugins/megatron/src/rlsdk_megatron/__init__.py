"""Megatron-Core train backend of rlsdk."""

import warnings

__version__ = "0.1.0"

# At import and at work it tells, of packages for GPUs, that they are not there; the options of this backend decide.
warnings.filterwarnings("ignore", module=r"megatron\.core", category=UserWarning)

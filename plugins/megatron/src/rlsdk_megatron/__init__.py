"""Megatron-Core train backend of rlsdk."""

import warnings

__version__ = "0.1.0"

# Megatron-Core warns about missing GPU packages; this backend's options determine which of them are used.
warnings.filterwarnings("ignore", module=r"megatron\.core", category=UserWarning)

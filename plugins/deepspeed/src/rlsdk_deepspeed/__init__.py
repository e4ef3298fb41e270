"""DeepSpeed train backend of rlsdk."""

__version__ = "0.1.0"

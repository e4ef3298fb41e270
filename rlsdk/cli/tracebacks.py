"""How a user asks for tracebacks of errors."""

FLAG = "--traceback"
VARIABLE = "RLSDK_TRACEBACK"

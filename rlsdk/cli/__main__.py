"""`python -m rlsdk.cli`: the command line, for use if the script is not on PATH."""

from __future__ import annotations

from rlsdk.cli import main

if __name__ == "__main__":
    main()

"""Replaces a raylet's agent that nobody needs. A program: it lives as long as who started it, whatever it is given as
arguments, and imports next to nothing."""

from __future__ import annotations

import os
import time

_LOOK_S = 1.0


def main() -> None:
    raylet = os.getppid()
    while os.getppid() == raylet:
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    main()

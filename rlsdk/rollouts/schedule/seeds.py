"""Seeds are derived from names and numbers, never from a generator's state."""

from __future__ import annotations

import hashlib


def request_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part; the same on every machine and in every run."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1

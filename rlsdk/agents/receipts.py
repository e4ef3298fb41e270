"""Digests of rows, for receipts: equal where ids, mask, log-probs and versions are, to the bit."""

from __future__ import annotations

import hashlib

from rlsdk.interfaces import Trajectory


def row_digest(row: Trajectory) -> str:
    """Hexadecimal digest of a row."""
    digest = hashlib.blake2b(digest_size=16)
    for span in row.spans:
        digest.update(len(span).to_bytes(8, "little") + bytes([span.sampled]))
        digest.update(span.token_ids.astype("<i4").tobytes())
        if span.log_probs is not None:
            digest.update(span.log_probs.astype("<f4").tobytes())
        for run in span.versions:
            digest.update(run.version.to_bytes(8, "little", signed=True) + run.num_tokens.to_bytes(8, "little"))
    return digest.hexdigest()

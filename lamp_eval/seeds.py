"""Seeds that depend on the user and the query alone, never on their order or on what ran before."""

from __future__ import annotations

import hashlib


def user_seed(seed: int, user_id: str) -> int:
    """A 32-bit seed from the run's seed and a user's id."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{user_id}".encode()).digest()[:4], "big")


def query_seed(seed: int, user_id: str, query_id: str) -> int:
    """A 32-bit seed from the user's seed and a query's id; the same in all arms."""
    return user_seed(user_seed(seed, user_id), query_id)

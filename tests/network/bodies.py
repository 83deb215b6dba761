"""Bytes to serve, and what tests with obstore may leave."""

import pytest

OBSTORE_KEEPS = pytest.mark.may_leave(
    descriptors=r" tcp \S+ -> 127\.0\.0\.1:\d+$",
    reason="about once in 500 times obstore keeps its last connection after its store is gone",
)


def numbered(size: int) -> bytes:
    return b"".join(n.to_bytes(4, "big") for n in range(size // 4 + 1))[:size]

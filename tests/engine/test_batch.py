from __future__ import annotations

import pytest

from app.engine.graphs import batch_sizes


@pytest.mark.parametrize("limit", [1, 3, 16, 33, 64, 100, 512])
def test_padded_batch_sizes_cover_every_count_up_to_the_limit(limit: int) -> None:
    sizes = batch_sizes(limit)
    assert sizes == tuple(sorted(set(sizes))) and sizes[-1] == limit
    assert all(any(count <= size < count + 32 for size in sizes) for count in range(1, limit + 1))

"""Under `invariance` a row's bits depend on nothing beside it, on Triton as served on CUDA."""

from __future__ import annotations

import pytest
import torch

from kernels.fixed_linear import linear_fixed
from kernels.fused_experts import fused_experts
from kernels.head_projection import project_heads
from kernels.mla_decode import mla_decode, mla_decode_reference
from kernels.row_linear import linear_rows, linear_rows_reference
from tests.kernels.cases import CUDA, Target, assert_bitwise_equal, assert_close, generator
from tests.kernels.conftest import TRITON_ON_CPU

BLOCK_SIZE, RANK, ROPE = 64, 32, 16
TOLERANCE = 1e-5


pytestmark = pytest.mark.usefixtures("invariant")


@pytest.fixture(
    params=[*TRITON_ON_CPU, pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)],
)
def triton_target(request: pytest.FixtureRequest) -> Target:
    """The torch path does not ask: on a CPU rows always keep their bits."""
    found: Target = request.param
    return found


@pytest.mark.parametrize("num_rows", [0, 1, 3, 65])
def test_linear_matches_its_reference_and_rows_alone(num_rows: int, triton_target: Target) -> None:
    random = generator(num_rows)
    x = triton_target.place(torch.randn(num_rows, 75, generator=random))[:, :70]
    weight = triton_target.place(torch.randn(131, 70, generator=random))
    bias = triton_target.place(torch.randn(131, generator=random))
    out = linear_rows(x, weight, bias, backend=triton_target.backend)
    assert_bitwise_equal(out, linear_fixed(x, weight, bias))
    assert_close(out, linear_rows_reference(x, weight, bias), TOLERANCE)
    for row in range(0, num_rows, 32):
        assert_bitwise_equal(linear_fixed(x[row : row + 1], weight, bias), out[row : row + 1])


def attend(target: Target, q: torch.Tensor, cache: torch.Tensor, tables: torch.Tensor, lens: list[int],
           query_lens: list[int] | None = None) -> torch.Tensor:  # fmt: skip
    starts = None
    if query_lens is not None:
        starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32).to(q.device)
    context_lens = torch.tensor(lens, dtype=torch.int32, device=q.device)
    out = mla_decode(q, cache, tables, context_lens, 0.2, RANK, query_starts=starts, backend=target.backend)
    assert_close(out, mla_decode_reference(q, cache, tables, context_lens, 0.2, RANK, query_starts=starts), TOLERANCE)
    return out


def test_attention_splits_a_row_by_its_own_length_alone(triton_target: Target) -> None:
    """1, 17 and 40 tiles make one, two and three segments; then one sequence's rows as decodes and as a chunk."""
    random, num_blocks = generator("attention"), 40
    cache = triton_target.place(torch.randn(num_blocks, BLOCK_SIZE, RANK + ROPE, generator=random))
    q = triton_target.place(torch.randn(4, 2, RANK + ROPE, generator=random))
    table = triton_target.place(torch.randperm(num_blocks, generator=random).to(torch.int32))
    lens = [5, 17 * BLOCK_SIZE - 3, 0, 40 * BLOCK_SIZE]
    together = attend(triton_target, q, cache, table.expand(4, -1).contiguous(), lens)
    for row, length in enumerate(lens):
        alone = attend(triton_target, q[row : row + 1], cache, table[None], [length])
        assert_bitwise_equal(alone, together[row : row + 1])
    ends = [1030, 1031, 1032]
    chunk = attend(triton_target, q, cache, table[None], ends[-1:], [3])
    assert not chunk[3].any(), "padding"
    for row, length in enumerate(ends):
        assert_bitwise_equal(
            attend(triton_target, q[row : row + 1], cache, table[None], [length]), chunk[row : row + 1]
        )


def test_experts_and_heads_have_one_tile_size(triton_target: Target) -> None:
    random = generator("experts")
    x = triton_target.place(torch.randn(70, 32, generator=random))
    gate_up = triton_target.place(torch.randn(3, 32, 32, generator=random))
    down = triton_target.place(torch.randn(3, 32, 16, generator=random))
    ids = triton_target.place(torch.randint(0, 3, (70, 2), generator=random).to(torch.int32))
    weights = triton_target.place(torch.rand(70, 2, generator=random))
    together = fused_experts(x, gate_up, down, ids, weights, backend=triton_target.backend)
    few = fused_experts(x[:2], gate_up, down, ids[:2], weights[:2], backend=triton_target.backend)
    assert_bitwise_equal(few, together[:2])
    heads, projection = x.view(70, 2, 16), triton_target.place(torch.randn(2, 16, 40, generator=random))
    together = project_heads(heads, projection, backend=triton_target.backend)
    assert_bitwise_equal(project_heads(heads[:1], projection, backend=triton_target.backend), together[:1])

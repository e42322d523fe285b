"""gather_blocks and copy_blocks: every case on three backends, bitwise."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kernels.blocks import copy_blocks, copy_blocks_reference, gather_blocks, gather_blocks_reference
from kernels.fp8_entry import Fp8Entry
from tests.kernels.cases import TORCH, Target, assert_bitwise_equal, generator


@dataclass(frozen=True)
class Case:
    name: str
    context_lens: tuple[int, ...]
    block_size: int = 16
    dim: int = 24
    num_padding: int = 0


CASES = (
    Case("no-sequences", ()),
    Case("one-token", (1,)),
    Case("block-edges", (15, 16, 17, 31, 32, 33)),
    Case("empty-among-others", (0, 0, 5, 0, 18, 0)),
    Case("all-empty", (0, 0)),
    Case("padding", (3, 20), num_padding=30),
    Case("odd-block-and-dim", (5, 22), block_size=7, dim=13),
    Case("served", (130, 64, 1), block_size=64, dim=576),
    Case("seventeen-sequences", tuple(range(17))),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gather(case: Case, target: Target) -> None:
    rng = generator(case.name)
    counts = [-(-length // case.block_size) for length in case.context_lens]
    order = torch.randperm(sum(counts) + 2, generator=rng)
    tables = torch.full((len(counts), max(counts, default=0) + 1), 2**30, dtype=torch.int32)
    used = 0
    for i, count in enumerate(counts):
        tables[i, :count] = order[used : used + count]
        used += count
    lens = torch.tensor(case.context_lens, dtype=torch.int32)
    key_starts = torch.cat([torch.zeros(1, dtype=torch.int32), lens.cumsum(0).to(torch.int32)])
    num_keys = sum(case.context_lens) + case.num_padding
    cache = torch.randn(sum(counts) + 2, case.block_size, case.dim, generator=rng)
    for dtype in (torch.float32, torch.float16):
        arguments = [target.place(tensor) for tensor in (cache.to(dtype), tables, lens, key_starts)]
        out = gather_blocks(*arguments, num_keys, backend=target.backend)
        assert_bitwise_equal(out, gather_blocks_reference(*arguments, num_keys))
        if case.dim % 4 == 0:
            check_fp8(arguments, num_keys, Fp8Entry(case.dim - 8, 8, dtype), target)


def check_fp8(arguments: list[torch.Tensor], num_keys: int, entry: Fp8Entry, target: Target) -> None:
    """Scales are powers of two and the latents far from fp16's ends: dequantising them is exact."""
    packed = target.place(entry.pack(arguments[0].cpu()))
    out = gather_blocks(packed, *arguments[1:], num_keys, entry=entry, backend=target.backend)
    assert_bitwise_equal(out, gather_blocks_reference(packed, *arguments[1:], num_keys, entry=entry))


@pytest.mark.parametrize(
    ("sources", "targets"), [((), ()), ((3,), (0,)), ((1, 1, 4), (5, 0, 2))], ids=["none", "one", "same-source-twice"]
)
@pytest.mark.parametrize("shape", [(7, 16, 24), (7, 5, 13), (6, 64, 576)], ids=str)
def test_copy(sources: tuple[int, ...], targets: tuple[int, ...], shape: tuple[int, int, int], target: Target) -> None:
    cache = target.place(torch.randn(shape, generator=generator(str(shape))))
    expected = cache.clone()
    ids = [target.place(torch.tensor(side, dtype=torch.int64)) for side in (sources, targets)]
    copy_blocks_reference(expected, *ids)
    copy_blocks(cache, *ids, backend=target.backend)
    assert_bitwise_equal(cache, expected)


def test_refuses_wrong_arguments() -> None:
    cache = torch.zeros(4, 16, 8)
    ids = torch.tensor([1])
    with pytest.raises(ValueError, match="target_ids: expected shape"):
        copy_blocks(cache, ids, torch.tensor([2, 3]), backend=TORCH.backend)
    with pytest.raises(ValueError, match=r"source_ids: expected torch\.int64"):
        copy_blocks(cache, ids.int(), ids)
    with pytest.raises(ValueError, match="cache: must be contiguous"):
        copy_blocks(cache.transpose(0, 1), ids, ids)
    lens = torch.tensor([1], dtype=torch.int32)
    with pytest.raises(ValueError, match="key_starts: expected shape"):
        gather_blocks(cache, lens.view(1, 1), lens, lens, 1)

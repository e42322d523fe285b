"""Move whole sequences and blocks of a paged cache: gather to a ragged tensor, copy block to block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import tuning
from kernels.checks import Backend, check_contiguous, check_dtype, check_shape, use_triton
from kernels.fp8_entry import Fp8Entry

_COPY_ELEMENTS = 4096


def gather_blocks_reference(
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    key_starts: torch.Tensor,
    num_keys: int,
    *,
    entry: Fp8Entry | None = None,
) -> torch.Tensor:
    """The definition (see gather_blocks), one token at a time."""
    cache = cache if entry is None else entry.unpack(cache)
    block_size = cache.shape[1]
    out = torch.zeros(num_keys, cache.shape[2], dtype=cache.dtype, device=cache.device)
    for i, context_len in enumerate(context_lens.tolist()):
        for t in range(context_len):
            out[key_starts[i] + t] = cache[block_tables[i, t // block_size], t % block_size]
    return out


def gather_blocks(
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    key_starts: torch.Tensor,
    num_keys: int,
    *,
    entry: Fp8Entry | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Copy every sequence's tokens out of the cache, one sequence after another.

        out[key_starts[i] + t] = cache[block_tables[i, t // block_size], t % block_size],  t < context_lens[i]

    Args:
        cache:        [num_blocks, block_size, D], contiguous, any dtype
        block_tables: [B, max_blocks] int32; entries past a sequence's blocks are never read
        context_lens: [B] int32
        key_starts:   [B + 1] int32: exclusive running sum of context_lens
        num_keys:     rows of the result, at least key_starts[B]; known to the host, so that nothing syncs
        entry:        what D bytes of an FP8 cache hold; then rows come out in entry.dtype, R + P wide
    Returns: [num_keys, D]; rows from key_starts[B] on are 0
    Raises:  ValueError on shape, dtype or stride
    """
    check_shape("cache", cache, (None, None, None))
    check_contiguous("cache", cache)
    check_shape("context_lens", context_lens, (block_tables.shape[0],))
    check_shape("key_starts", key_starts, (block_tables.shape[0] + 1,))
    for name, tensor in (("block_tables", block_tables), ("context_lens", context_lens), ("key_starts", key_starts)):
        check_dtype(name, tensor, torch.int32)
    if entry is not None:
        entry.check(cache)
    if not use_triton(cache, backend):
        return _gather_torch(cache, block_tables, context_lens, num_keys, entry)
    width = cache.shape[2] if entry is None else entry.rank + entry.rope_dim
    out = torch.empty(num_keys, width, dtype=cache.dtype if entry is None else entry.dtype, device=cache.device)
    if not out.numel():
        return out
    launch = tuning.find("gather_blocks", cache.device, row_bytes=cache.shape[2] * cache.element_size())
    grid = (triton.cdiv(num_keys, launch["tokens"]),)
    operands = (block_tables, key_starts, out, num_keys, block_tables.shape[0], block_tables.stride(0))
    options = {"BLOCK_SIZE": cache.shape[1], "TOKENS": launch["tokens"], "num_warps": launch["num_warps"]}
    if entry is None:
        _gather_kernel[grid](cache, *operands, DIM=width, BLOCK_DIM=triton.next_power_of_2(width), **options)
    else:
        parts = entry.views(cache)
        _gather_fp8_kernel[grid](
            *parts, *operands, *(part.stride(1) for part in parts), R=entry.rank, P=entry.rope_dim,
            BLOCK_R=triton.next_power_of_2(entry.rank), BLOCK_P=triton.next_power_of_2(entry.rope_dim), **options,
        )  # fmt: skip
    return out


def copy_blocks_reference(cache: torch.Tensor, source_ids: torch.Tensor, target_ids: torch.Tensor) -> None:
    """The definition (see copy_blocks)."""
    copies = [cache[source].clone() for source in source_ids.tolist()]
    for target, copied in zip(target_ids.tolist(), copies, strict=True):
        cache[target] = copied


def copy_blocks(
    cache: torch.Tensor, source_ids: torch.Tensor, target_ids: torch.Tensor, *, backend: Backend | None = None
) -> None:
    """cache[target_ids[i]] = cache[source_ids[i]], in place.

    Args:
        cache:      [num_blocks, ...], contiguous
        source_ids: [n] int64
        target_ids: [n] int64, distinct and none of them a source
    Raises: ValueError on shape, dtype or stride
    """
    check_contiguous("cache", cache)
    check_shape("source_ids", source_ids, (None,))
    check_shape("target_ids", target_ids, (source_ids.shape[0],))
    check_dtype("source_ids", source_ids, torch.int64)
    check_dtype("target_ids", target_ids, torch.int64)
    num_copies = source_ids.shape[0]
    block_elements = cache[0].numel() if cache.shape[0] else 0
    if not num_copies or not block_elements:
        return
    if not use_triton(cache, backend):
        cache.index_copy_(0, target_ids, cache.index_select(0, source_ids))
        return
    grid = (num_copies, triton.cdiv(block_elements, _COPY_ELEMENTS))
    _copy_kernel[grid](cache, source_ids, target_ids, block_elements, ELEMENTS=_COPY_ELEMENTS)


def _gather_torch(
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    num_keys: int,
    entry: Fp8Entry | None,
) -> torch.Tensor:
    block_size, dim = cache.shape[1:]
    out = cache.new_zeros(num_keys, dim)
    first = 0
    for i, context_len in enumerate(context_lens.tolist()):
        blocks = block_tables[i, : -(-context_len // block_size)].long()
        out[first : first + context_len] = cache.index_select(0, blocks).view(-1, dim)[:context_len]
        first += context_len
    return out if entry is None else entry.unpack(out)


@triton.jit
def _find_sequence(starts, num_sequences, position):
    """The last i with starts[i] <= position, for each position; num_sequences if all sequences end before it."""
    low = tl.zeros_like(position)
    high = tl.zeros_like(position) + num_sequences
    span = num_sequences
    while span > 0:
        middle = (low + high + 1) // 2
        is_at_or_after = tl.load(starts + middle) <= position
        low = tl.where(is_at_or_after, middle, low)
        high = tl.where(is_at_or_after, high, middle - 1)
        span = span // 2
    return low


@triton.jit
def _slots_of(block_tables, key_starts, row, in_out, num_sequences, table_stride, BLOCK_SIZE: tl.constexpr):
    """The cache slot of each row of the result, and whether it has one."""
    sequence = _find_sequence(key_starts, num_sequences, row)
    is_key = in_out & (sequence < num_sequences)
    token = row - tl.load(key_starts + sequence)
    entry = sequence.to(tl.int64) * table_stride + token // BLOCK_SIZE
    block = tl.load(block_tables + entry, mask=is_key, other=0).to(tl.int64)
    return block * BLOCK_SIZE + token % BLOCK_SIZE, is_key


@triton.jit(
    do_not_specialize=["num_keys", "num_sequences", "table_stride"], do_not_specialize_on_alignment=["block_tables"]
)
def _gather_kernel(
    cache,
    block_tables,
    key_starts,
    out,
    num_keys,
    num_sequences,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
):
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    in_out = row < num_keys
    slot, is_key = _slots_of(block_tables, key_starts, row, in_out, num_sequences, table_stride, BLOCK_SIZE)
    column = tl.arange(0, BLOCK_DIM)
    in_row = column < DIM
    values = tl.load(cache + slot[:, None] * DIM + column[None, :], mask=is_key[:, None] & in_row[None, :], other=0)
    target = out + row.to(tl.int64)[:, None] * DIM + column[None, :]
    tl.store(target, values, mask=in_out[:, None] & in_row[None, :])


@triton.jit(
    do_not_specialize=["num_keys", "num_sequences", "table_stride"], do_not_specialize_on_alignment=["block_tables"]
)
def _gather_fp8_kernel(
    latents,
    ropes,
    scales,
    block_tables,
    key_starts,
    out,
    num_keys,
    num_sequences,
    table_stride,
    latent_stride,
    rope_stride,
    scale_stride,
    BLOCK_SIZE: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    TOKENS: tl.constexpr,
):
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    in_out = row < num_keys
    slot, is_key = _slots_of(block_tables, key_starts, row, in_out, num_sequences, table_stride, BLOCK_SIZE)
    column = tl.arange(0, BLOCK_R)
    mask = is_key[:, None] & (column < R)[None, :]
    values = tl.load(latents + slot[:, None] * latent_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scales + slot * scale_stride, mask=is_key, other=0.0)
    values *= scale[:, None]
    target = out + row.to(tl.int64)[:, None] * (R + P)
    mask = in_out[:, None] & (column < R)[None, :]
    tl.store(target + column[None, :], values.to(out.dtype.element_ty), mask=mask)
    column = tl.arange(0, BLOCK_P)
    mask = is_key[:, None] & (column < P)[None, :]
    values = tl.load(ropes + slot[:, None] * rope_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    values *= scale[:, None]
    tl.store(
        target + R + column[None, :], values.to(out.dtype.element_ty), mask=in_out[:, None] & (column < P)[None, :]
    )


@triton.jit(do_not_specialize=["block_elements"])
def _copy_kernel(cache, source_ids, target_ids, block_elements, ELEMENTS: tl.constexpr):
    copy = tl.program_id(0)
    element = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    in_block = element < block_elements
    source = tl.load(source_ids + copy) * block_elements
    target = tl.load(target_ids + copy) * block_elements
    tl.store(cache + target + element, tl.load(cache + source + element, mask=in_block), mask=in_block)

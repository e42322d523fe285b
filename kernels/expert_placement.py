"""From the experts that tokens chose to the places where these lie; counts what each expert is chosen for."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.checks import Backend, check_contiguous, check_dtype, check_shape, use_triton


def place_experts_reference(
    ids: torch.Tensor, slots: torch.Tensor, table: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, out of place: (places, new counts)."""
    period, num_experts = table.shape
    lines = torch.arange(ids.shape[0], device=ids.device) % period
    is_chosen = (slots >= 0)[:, None] & (ids >= 0)
    places = table[lines[:, None], ids.clamp_min(0).long()].masked_fill(~is_chosen, -1)
    return places, counts + torch.bincount(ids[is_chosen].long(), minlength=num_experts)


@triton.jit(do_not_specialize=["num_pairs"])
def _place_kernel(
    ids_ptr, slots_ptr, table_ptr, counts_ptr, places_ptr, num_pairs,
    E: tl.constexpr, PERIOD: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = pair < num_pairs
    row = pair // TOP_K
    expert = tl.load(ids_ptr + pair, mask=exists, other=-1)
    is_chosen = exists & (expert >= 0) & (tl.load(slots_ptr + row, mask=exists, other=-1) >= 0)
    place = tl.load(table_ptr + (row % PERIOD) * E + expert, mask=is_chosen, other=-1)
    tl.store(places_ptr + pair, place, mask=exists)
    tl.atomic_add(counts_ptr + expert, 1, mask=is_chosen)


def place_experts(
    ids: torch.Tensor, slots: torch.Tensor, table: torch.Tensor, counts: torch.Tensor, *, backend: Backend | None = None
) -> torch.Tensor:
    """Look up where each chosen expert lies, and count the choices.

        places[n,j] = table[n % period, ids[n,j]] where slots[n] >= 0 and ids[n,j] >= 0, else -1
        counts[e]  += number of such pairs with ids[n,j] = e

    Args:
        ids:    [N, k] int32, below num_experts
        slots:  [N] int64; -1 marks a row of padding
        table:  [period, num_experts] int32
        counts: [num_experts] int64, changed in place
    Returns: [N, k] int32, freshly allocated
    Raises:  ValueError on shape, dtype or stride
    """
    check_shape("ids", ids, (None, None))
    check_shape("slots", slots, (ids.shape[0],))
    check_shape("table", table, (None, None))
    check_shape("counts", counts, (table.shape[1],))
    for name, tensor, dtype in (
        ("ids", ids, torch.int32), ("slots", slots, torch.int64),
        ("table", table, torch.int32), ("counts", counts, torch.int64),
    ):  # fmt: skip
        check_dtype(name, tensor, dtype)
        check_contiguous(name, tensor)
    if not use_triton(ids, backend):
        places, new_counts = place_experts_reference(ids, slots, table, counts)
        counts.copy_(new_counts)
        return places
    places = torch.empty_like(ids)
    block = 256
    if ids.numel():
        _place_kernel[(triton.cdiv(ids.numel(), block),)](
            ids, slots, table, counts, places, ids.numel(),
            E=table.shape[1], PERIOD=table.shape[0], TOP_K=ids.shape[1], BLOCK=block,
        )  # fmt: skip
    return places

"""Choose each token's experts and their weights: the routers of DeepSeek-V2 and V3."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from kernels import native
from kernels.checks import Backend, check_contiguous, check_dtype, check_shape, use_triton
from kernels.dependent_launch import dependent_launch, wait_for_previous

Scoring = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2_sum"]


def route_experts_reference(
    logits: torch.Tensor, bias: torch.Tensor | None, *, top_k: int, num_groups: int, top_groups: int,
    scoring: Scoring, group_score: GroupScore, normalize: bool, scale: float, num_shared: int = 0,
    slots: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The definition."""
    if scoring == "softmax":
        scores = logits.softmax(-1)
    else:
        # torch.sigmoid rounds differently in the vector loop and its scalar tail, exp does not.
        scores = torch.exp(-logits).add_(1).reciprocal_()
    choice = scores if bias is None else scores + bias
    if num_groups > 1:
        grouped = choice.unflatten(1, (num_groups, choice.shape[1] // num_groups))
        best = grouped.amax(-1) if group_score == "max" else grouped.topk(2).values.sum(-1)
        dropped = torch.ones_like(best, dtype=torch.bool).scatter_(1, _top(best, top_groups), False)
        choice = grouped.masked_fill(dropped[..., None], -torch.inf).flatten(1)
    ids = _top(choice, top_k)
    weights = scores.gather(1, ids)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    ids, weights = ids.int(), weights * scale if scale != 1.0 else weights
    if num_shared:
        num_tokens, num_experts = logits.shape
        shared = torch.arange(num_experts, num_experts + num_shared, dtype=torch.int32, device=logits.device)
        ids = torch.cat([ids, shared.expand(num_tokens, -1)], dim=1)
        weights = torch.nn.functional.pad(weights, (0, num_shared), value=1.0)
    if slots is not None:
        ids[slots < 0] = -1
    return ids, weights


def _top(values: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest of each row, best first; of equal values the lower index first (topk: either)."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :k]


def _cpu_route(
    logits: torch.Tensor, bias: torch.Tensor | None, *, top_k: int, num_groups: int, top_groups: int,
    scoring: Scoring, group_score: GroupScore, normalize: bool, scale: float, num_shared: int,
    slots: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    num_tokens, num_experts = logits.shape
    ids = torch.empty(num_tokens, top_k + num_shared, dtype=torch.int32)
    weights = torch.empty(num_tokens, top_k + num_shared)
    bias = logits.new_zeros(num_experts) if bias is None else bias
    slots = torch.empty(0, dtype=torch.int64) if slots is None else slots
    native.route(
        logits.numpy(), bias.numpy(), slots.numpy(), scoring == "softmax", num_groups, top_groups,
        group_score == "top2_sum", normalize, scale, top_k, ids.numpy(), weights.numpy(),
    )  # fmt: skip
    return ids, weights


@triton.jit
def _route_kernel(
    logits_ptr, bias_ptr, slots_ptr, ids_ptr, weights_ptr, scale,
    E: tl.constexpr, G: tl.constexpr, S: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
    K: tl.constexpr, SHARED: tl.constexpr, BLOCK_K: tl.constexpr, TOP_GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SLOTS: tl.constexpr, SOFTMAX: tl.constexpr, TOP2_SUM: tl.constexpr,
    NORMALIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token per program; its experts as a [groups, group size] tile, both padded to powers of two."""
    LOWEST: tl.constexpr = -3.4028234663852886e38  # of what may still be chosen; chosen and padding are -inf
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_G)
    member = tl.arange(0, BLOCK_S)
    expert = group[:, None] * S + member[None, :]
    exists = (group[:, None] < G) & (member[None, :] < S)
    wait_for_previous(PDL)
    logits = tl.load(logits_ptr + row * E + expert, mask=exists, other=-float("inf"))
    if SOFTMAX:
        scores = tl.exp(logits - tl.max(tl.max(logits, axis=1), axis=0))
        scores = scores / tl.sum(tl.sum(scores, axis=1), axis=0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias_ptr + expert, mask=exists, other=0.0)
    choice = tl.where(choice >= LOWEST, choice, LOWEST)  # NaN too: an id is in range whatever comes in
    choice = tl.where(exists, choice, -float("inf"))
    if G > 1:
        best, best_at = tl.max(choice, axis=1, return_indices=True, return_indices_tie_break_left=True)
        if TOP2_SUM:
            best += tl.max(tl.where(member[None, :] == best_at[:, None], -float("inf"), choice), axis=1)
        best = tl.where(group < G, tl.maximum(best, LOWEST), -float("inf"))
        kept = group < 0
        for _ in tl.static_range(TOP_GROUPS):
            _, at = tl.max(best, axis=0, return_indices=True, return_indices_tie_break_left=True)
            kept = kept | (group == at)
            best = tl.where(group == at, -float("inf"), best)
        choice = tl.where(kept[:, None], choice, -float("inf"))
    slot = tl.arange(0, BLOCK_K)
    ids = tl.zeros([BLOCK_K], tl.int32)
    weights = tl.zeros([BLOCK_K], tl.float32)
    flat_expert = tl.reshape(expert, [BLOCK_G * BLOCK_S])
    flat_scores = tl.reshape(scores, [BLOCK_G * BLOCK_S])
    flat_choice = tl.reshape(choice, [BLOCK_G * BLOCK_S])
    index = tl.arange(0, BLOCK_G * BLOCK_S)
    for i in tl.static_range(K):
        _, at = tl.max(flat_choice, axis=0, return_indices=True, return_indices_tie_break_left=True)
        chosen = index == at
        ids = tl.where(slot == i, tl.sum(tl.where(chosen, flat_expert, 0), axis=0), ids)
        weights = tl.where(slot == i, tl.sum(tl.where(chosen, flat_scores, 0.0), axis=0), weights)
        flat_choice = tl.where(chosen, -float("inf"), flat_choice)
    if NORMALIZE:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    ids = tl.where(slot < K, ids, E + slot - K)
    if HAS_SLOTS:
        ids = tl.where(tl.load(slots_ptr + row) < 0, -1, ids)
    weights = tl.where(slot < K, weights * scale, 1.0)
    tl.store(ids_ptr + row * (K + SHARED) + slot, ids, mask=slot < K + SHARED)
    tl.store(weights_ptr + row * (K + SHARED) + slot, weights, mask=slot < K + SHARED)


def route_experts(
    logits: torch.Tensor, bias: torch.Tensor | None, *, top_k: int, num_groups: int, top_groups: int,
    scoring: Scoring, group_score: GroupScore, normalize: bool, scale: float, num_shared: int = 0,
    slots: torch.Tensor | None = None, backend: Backend | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Choose top_k experts per token on score + bias; weigh them by the score alone.

        s = softmax(logits) or sigmoid(logits);  c = s + bias
        groups of E / num_groups experts: keep the top_groups best by max(c) or by the sum of their two best c
        ids = the top_k largest c of the kept groups;  weights = scale * s[ids] (/ (sum s[ids] + 1e-20) if normalize)

    Args:
        logits:     [N, E] fp32, contiguous, finite
        bias:       [E] fp32, or None
        num_groups: divides E; 1 means no groups, and top_groups is ignored
        num_shared: experts E, E + 1, ... that every token passes with weight 1, named after the chosen ones
        slots:      [N] int64, or None; a row whose slot is negative is padding and gets -1 for every expert
    Returns: ids [N, top_k + num_shared] int32, best choice first, and weights [N, top_k + num_shared] fp32.
        Ties go to the lower group and the lower expert id. A row does not depend on the others.
    Raises:  ValueError on shape, dtype, or a top_k that the kept groups cannot fill
    Accuracy: ids exact up to rounding of s; weights 1e-6 relative
    Source:  DeepSeek-V2 section 2.1.2, https://arxiv.org/abs/2405.04434; V3 section 2.1.2 and its group-limited
        noaux_tc gate, https://arxiv.org/abs/2412.19437
    """
    check_shape("logits", logits, (None, None))
    check_dtype("logits", logits, torch.float32)
    check_contiguous("logits", logits)
    num_experts = logits.shape[1]
    if bias is not None:
        check_shape("bias", bias, (num_experts,))
        check_dtype("bias", bias, torch.float32)
    if slots is not None:
        check_shape("slots", slots, (logits.shape[0],))
        check_dtype("slots", slots, torch.int64)
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"num_groups: must divide the {num_experts} experts, got {num_groups}")
    group_size = num_experts // num_groups
    if num_groups > 1 and (not 1 <= top_groups <= num_groups or (group_score == "top2_sum" and group_size < 2)):
        raise ValueError(
            f"top_groups: {top_groups} of {num_groups} groups of {group_size} cannot be chosen by {group_score}"
        )
    selectable = num_experts if num_groups == 1 else top_groups * group_size
    if not 1 <= top_k <= selectable:
        raise ValueError(f"top_k: must be between 1 and the {selectable} selectable experts, got {top_k}")
    if not use_triton(logits, backend):
        return _cpu_route(
            logits, bias, top_k=top_k, num_groups=num_groups, top_groups=top_groups,
            scoring=scoring, group_score=group_score, normalize=normalize, scale=scale, num_shared=num_shared,
            slots=slots,
        )  # fmt: skip
    num_tokens, num_chosen = logits.shape[0], top_k + num_shared
    ids = torch.empty(num_tokens, num_chosen, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, num_chosen, dtype=torch.float32, device=logits.device)
    if num_tokens:
        _route_kernel[(num_tokens,)](
            logits, bias, slots, ids, weights, scale,
            E=num_experts, G=num_groups, S=group_size,
            BLOCK_G=triton.next_power_of_2(num_groups), BLOCK_S=triton.next_power_of_2(group_size),
            K=top_k, SHARED=num_shared, BLOCK_K=triton.next_power_of_2(num_chosen), TOP_GROUPS=top_groups,
            HAS_BIAS=bias is not None, HAS_SLOTS=slots is not None, SOFTMAX=scoring == "softmax",
            TOP2_SUM=group_score == "top2_sum", NORMALIZE=normalize, num_warps=1, **dependent_launch(logits.device),
        )  # fmt: skip
    return ids, weights

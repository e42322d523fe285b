"""Choose each token's experts and their weights: the routers of DeepSeek-V2 and V3."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from kernels.checks import Backend, check_contiguous, check_dtype, check_shape, use_triton

Scoring = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2_sum"]


def route_experts_reference(
    logits: torch.Tensor, bias: torch.Tensor | None, *, top_k: int, num_groups: int, top_groups: int,
    scoring: Scoring, group_score: GroupScore, normalize: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The definition. On CPU it is the serving path too, so every step keeps a row's bits whatever runs beside it."""
    if scoring == "softmax":
        scores = logits.softmax(-1)
    else:
        # torch.sigmoid rounds differently in the vector loop and its scalar tail, exp does not.
        scores = torch.exp(-logits).add_(1).reciprocal_()
    choice = scores if bias is None else scores + bias
    if num_groups > 1:
        grouped = choice.view(choice.shape[0], num_groups, -1)
        best = grouped.amax(-1) if group_score == "max" else grouped.topk(2).values.sum(-1)
        dropped = torch.ones_like(best, dtype=torch.bool).scatter_(1, _top(best, top_groups), False)
        choice = grouped.masked_fill(dropped[..., None], -torch.inf).flatten(1)
    ids = _top(choice, top_k)
    weights = scores.gather(1, ids)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids.int(), weights * scale if scale != 1.0 else weights


def _top(values: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest of each row, best first; of equal values the lower index first, which topk leaves open."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :k]


def route_experts(
    logits: torch.Tensor, bias: torch.Tensor | None, *, top_k: int, num_groups: int, top_groups: int,
    scoring: Scoring, group_score: GroupScore, normalize: bool, scale: float, backend: Backend | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Choose top_k experts per token on score + bias; weigh them by the score alone.

        s = softmax(logits) or sigmoid(logits);  c = s + bias
        groups of E / num_groups experts: keep the top_groups best by max(c) or by the sum of their two best c
        ids = the top_k largest c of the kept groups;  weights = scale * s[ids] (/ (sum s[ids] + 1e-20) if normalize)

    Args:
        logits:     [N, E] fp32, contiguous, finite
        bias:       [E] fp32, or None
        num_groups: divides E; 1 means no groups, and top_groups is ignored
    Returns: ids [N, top_k] int32, best choice first, and weights [N, top_k] fp32.
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
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"num_groups: must divide the {num_experts} experts, got {num_groups}")
    group_size = num_experts // num_groups
    if num_groups > 1 and (not 1 <= top_groups <= num_groups or (group_score == "top2_sum" and group_size < 2)):
        raise ValueError(f"top_groups: {top_groups} of {num_groups} groups of {group_size} cannot be chosen by {group_score}")
    selectable = num_experts if num_groups == 1 else top_groups * group_size
    if not 1 <= top_k <= selectable:
        raise ValueError(f"top_k: must be between 1 and the {selectable} selectable experts, got {top_k}")
    if not use_triton(logits, backend):
        return route_experts_reference(
            logits, bias, top_k=top_k, num_groups=num_groups, top_groups=top_groups,
            scoring=scoring, group_score=group_score, normalize=normalize, scale=scale,
        )  # fmt: skip
    raise NotImplementedError

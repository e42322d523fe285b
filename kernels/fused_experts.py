"""The routed experts of a mixture-of-experts layer: SwiGLU feed-forward networks, each on its own tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.checks import Backend, check_contiguous, check_dtype, check_shape, use_triton

# On CPU an expert's rows are padded to a multiple of this, the smallest row count at which MKL's bits settle.
_CPU_ROWS = 4


def fused_experts_reference(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The definition: fp32 throughout, rounded once to x's dtype."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(gate_up.shape[0]):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token].float() @ gate_up[expert].float().T).chunk(2, -1)
        hidden = torch.nn.functional.silu(gate) * up
        out.index_add_(0, token, hidden @ down[expert].float().T * weights[token, choice, None])
    return out.to(x.dtype)


def _torch_experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Two GEMMs per hit expert over its rows, which lie one expert after the other:

        buffer | expert 0's tokens, padding | expert 2's tokens, padding | ...  each part a multiple of _CPU_ROWS
    """
    num_tokens, top_k = ids.shape
    pairs_of: list[list[int]] = [[] for _ in range(gate_up.shape[0])]
    pair_ids = ids.flatten().tolist()
    for pair, expert in enumerate(pair_ids):
        if expert >= 0:
            pairs_of[expert].append(pair)
    hit = [expert for expert, pairs in enumerate(pairs_of) if pairs]
    source: list[int] = []  # buffer row -> token
    place = [-1] * len(pair_ids)  # pair -> buffer row; -1 is the row of zeros at the end
    sizes = []
    for pairs in (pairs_of[expert] for expert in hit):
        for pair in pairs:
            place[pair] = len(source)
            source.append(pair // top_k)
        padding = -len(pairs) % _CPU_ROWS
        source += source[-1:] * padding
        sizes.append(len(pairs) + padding)

    projected = x.new_empty(len(source), gate_up.shape[1])
    weights_of = gate_up.mT.unbind()
    for expert, rows, out in zip(hit, x[source].split(sizes), projected.split(sizes), strict=True):
        torch.mm(rows, weights_of[expert], out=out)
    gate, up = projected.chunk(2, -1)
    # SiLU in exactly rounded steps: torch's silu rounds differently in its vector loop and that loop's scalar tail.
    hidden = torch.exp(-gate).add_(1).reciprocal_().mul_(gate).mul_(up)
    results = x.new_empty(len(source) + 1, x.shape[1])
    results[-1] = 0.0
    weights_of = down.mT.unbind()
    for expert, rows, out in zip(hit, hidden.split(sizes), results[:-1].split(sizes), strict=True):
        torch.mm(rows, weights_of[expert], out=out)

    scaled = results[place].float().mul_(weights.view(-1, 1))
    return scaled.view(num_tokens, top_k, -1).sum(1).to(x.dtype)


def fused_experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
    *, backend: Backend | None = None,
) -> torch.Tensor:  # fmt: skip
    """Apply each token's chosen experts and sum them by weight.

        out[n] = sum_j weights[n,j] * down[e] @ (silu(g) * u),  e = ids[n,j],  [g | u] = gate_up[e] @ x[n]

    Args:
        x:       [N, D] contiguous
        gate_up: [E, 2I, D] contiguous, the gate's I rows above the up projection's
        down:    [E, D, I] contiguous
        ids:     [N, k] int32; -1 contributes nothing; an expert named twice counts twice
        weights: [N, k] fp32, finite
    Returns: [N, D] in x's dtype, freshly allocated. The sum over j runs in the order of j.
        On CPU in fp32 a token's bits do not depend on the other tokens.
    Raises:  ValueError on shape, dtype or stride
    Accuracy: relative error < 1e-5 in fp32, 1e-2 in bf16 against fused_experts_reference
    Source:  DeepSeek-V2 section 2.1.2, https://arxiv.org/abs/2405.04434
    """
    check_shape("x", x, (None, None))
    num_tokens, dim = x.shape
    check_shape("down", down, (None, dim, None))
    num_experts, _, inter = down.shape
    check_shape("gate_up", gate_up, (num_experts, 2 * inter, dim))
    check_shape("ids", ids, (num_tokens, None))
    check_shape("weights", weights, (num_tokens, ids.shape[1]))
    check_dtype("ids", ids, torch.int32)
    check_dtype("weights", weights, torch.float32)
    for name, tensor in (("x", x), ("gate_up", gate_up), ("down", down), ("ids", ids), ("weights", weights)):
        check_contiguous(name, tensor)
    check_dtype("gate_up", gate_up, x.dtype)
    check_dtype("down", down, x.dtype)
    if not use_triton(x, backend):
        return _torch_experts(x, gate_up, down, ids, weights)
    raise NotImplementedError

"""The experts on a CPU in fp32, their weights packed once for oneDNN.

With a handful of tokens the product is bound by how fast weights stream from memory, and one product over all experts
streams about twice as fast as one per expert. With many tokens, each expert computes its own rows only. Both give a
token the same bits: oneDNN adds up an output's terms in one order, whatever other rows and columns there are, as long
as the inner dimension is not split (1024 is not; 2048 is, for a single row).
"""

from __future__ import annotations

import torch

from kernels.checks import ROW_TILE

MAX_TOKENS_OF_ALL = 16  # more rows than this through every expert cost more arithmetic than streaming saves
MAX_INNER = 1024


class PackedExperts:
    """fused_experts for weights that stay: gate_up [E, 2I, D] and down [E, D, I], fp32 on CPU."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self._num_experts, self._inter = gate_up.shape[0], down.shape[2]
        gate, up = gate_up.chunk(2, dim=1)
        self._all_gate_up = _pack(torch.cat([gate.flatten(0, 1), up.flatten(0, 1)]))  # every gate, then every up
        self._gate_up = [_pack(weight) for weight in gate_up]
        self._down = down.mT.contiguous()  # [E, I, D]
        self._down_of = self._down.unbind()

    @staticmethod
    def can_pack(gate_up: torch.Tensor) -> bool:
        is_fp32 = gate_up.dtype == torch.float32 and gate_up.device.type == "cpu"
        return is_fp32 and gate_up.shape[2] <= MAX_INNER and bool(torch.backends.mkldnn.is_available())

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [N, D], ids [N, k] int32, weights [N, k] fp32 -> [N, D]; see fused_experts."""
        num_tokens = x.shape[0]
        pair_ids = ids.flatten().tolist()
        if 0 < num_tokens <= MAX_TOKENS_OF_ALL and num_tokens % ROW_TILE == 0:
            num_pairs = len(pair_ids) - pair_ids.count(-1)
            # More threads share the streaming of the one product, not of the many small ones.
            if 2 * num_pairs * torch.get_num_threads() >= self._num_experts:
                return self._through_all(x, ids, weights)
        return self._through_chosen(x, pair_ids, weights)

    def _through_all(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        num_tokens = x.shape[0]
        gate, up = _linear(x, self._all_gate_up).chunk(2, dim=1)
        hidden = _silu(gate).mul_(up).view(num_tokens, self._num_experts, self._inter)
        results = torch.bmm(hidden.transpose(0, 1), self._down).flatten(0, 1)  # row: expert * num_tokens + token
        is_none = ids < 0
        rows = ids.clamp(min=0).mul_(num_tokens).add_(torch.arange(num_tokens, dtype=torch.int32).unsqueeze(1))
        return _weighted_sum(results, rows.flatten(), weights.masked_fill(is_none, 0.0))

    def _through_chosen(self, x: torch.Tensor, pair_ids: list[int], weights: torch.Tensor) -> torch.Tensor:
        """Two products per hit expert over its rows, which lie one expert after the other:

        buffer | expert 0's tokens, padding | expert 2's tokens, padding | ...  each part a multiple of ROW_TILE
        """
        top_k = weights.shape[1]
        pairs_of: list[list[int]] = [[] for _ in range(self._num_experts)]
        for pair, expert in enumerate(pair_ids):
            if expert >= 0:
                pairs_of[expert].append(pair)
        source: list[int] = []  # buffer row -> token
        place = [-1] * len(pair_ids)  # pair -> buffer row; -1 is the row of zeros at the end
        hit, sizes = [], []
        for expert, pairs in enumerate(pairs_of):
            if not pairs:
                continue
            for pair in pairs:
                place[pair] = len(source)
                source.append(pair // top_k)
            padding = -len(pairs) % ROW_TILE
            source += source[-1:] * padding
            hit.append(expert)
            sizes.append(len(pairs) + padding)
        if not hit:
            return torch.zeros_like(x)
        rows_of = zip(hit, x[source].split(sizes), strict=True)
        gate, up = torch.cat([_linear(rows, self._gate_up[expert]) for expert, rows in rows_of]).chunk(2, dim=1)
        hidden = _silu(gate).mul_(up)
        results = x.new_empty(len(source) + 1, x.shape[1])
        results[-1] = 0.0
        for expert, rows, out in zip(hit, hidden.split(sizes), results[:-1].split(sizes), strict=True):
            torch.mm(rows, self._down_of[expert], out=out)
        return _weighted_sum(results, torch.tensor(place), weights)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return packed


def _linear(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return y


def _silu(x: torch.Tensor) -> torch.Tensor:
    """In exactly rounded steps: torch's silu rounds differently in its vector loop and that loop's scalar tail."""
    return torch.exp(-x).add_(1).reciprocal_().mul_(x)


def _weighted_sum(results: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """out[n] = sum_j weights[n,j] * results[rows[n * k + j]], in the order of j."""
    chosen = results[rows].view(*weights.shape, -1)
    return chosen.mul_(weights.unsqueeze(-1)).sum(1)

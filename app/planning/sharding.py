"""What a sharding of a large model costs: bytes per rank, bytes exchanged, time of a decoding step. Arithmetic only.

`tensor` ranks split heads, MLPs and vocabulary; `expert` groups of such ranks split a step's rows and the routed
experts; every rank has the whole cache. A step's time is the sum of its parts, each at the higher of its two floors
(memory, arithmetic), and of its collectives, though some run beside the shared experts and the projections.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

ACTIVATION_BYTES = 2  # bfloat16


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of one model. Parameters are counted over all layers."""

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    head_params: float  # of projections that are split by heads
    other_params: float  # of projections each rank holds whole: to the latents, indexers
    mlp_params: float  # dense MLPs, shared experts, embedding and head: split over a tensor group
    num_moe_layers: int
    num_experts: int
    top_k: int
    expert_params: float  # of one expert
    weight_bytes: float  # per parameter
    expert_weight_bytes: float
    kv_bytes_per_token: float
    entry_bytes: float  # what a token adds to a layer before any compression: sent to the other expert groups
    # a decoding sequence reads and computes per step:
    read_bytes_per_token: float  # of the cache, per token of context
    read_bytes: float  # whatever the context: windows, chosen entries
    head_flops_per_token: float  # per head
    head_flops: float
    shared_flops_per_token: float  # not split by heads: the indexer


def _deepseek_v3() -> ModelShape:
    """DeepSeek-V3 and its kin (arXiv 2412.19437): 671B parameters, FP8 weights in 128 x 128 blocks, bf16 latents."""
    hidden, layers, heads, rank, rope = 7168, 61, 128, 512, 64
    moe_layers, expert = 58, 3 * 7168 * 2048
    return ModelShape(
        name="deepseek-v3",
        hidden_size=hidden, num_layers=layers, num_heads=heads,
        head_params=layers * heads * (1536 * (128 + rope) + rank * 256 + 128 * hidden),
        other_params=layers * hidden * (1536 + rank + rope),
        mlp_params=3 * 3 * hidden * 18432 + moe_layers * expert + 2 * 129280 * hidden,
        num_moe_layers=moe_layers, num_experts=256, top_k=8, expert_params=expert,
        weight_bytes=1.0, expert_weight_bytes=1.0,
        kv_bytes_per_token=layers * (rank + rope) * 2, entry_bytes=(rank + rope) * 2,
        read_bytes_per_token=layers * (rank + rope) * 2, read_bytes=0.0,
        head_flops_per_token=layers * 2.0 * (2 * rank + rope), head_flops=0.0, shared_flops_per_token=0.0,
    )  # fmt: skip


def _deepseek_v4(
    name: str, *, hidden: int, heads: int, q_rank: int, groups: int, experts: int, expert_size: int,
    sliding: int, csa: int, hca: int, csa_top_k: int,
) -> ModelShape:  # fmt: skip
    """V4's hybrid: windows of 128, a compressed entry per 4 tokens (chosen by an indexer) or per 128; FP4 experts."""
    layers, dim, index_heads, index_dim, window = sliding + csa + hca, 512, 64, 128, 128
    expert = 3 * hidden * expert_size
    key_bytes, index_bytes = 2 * dim, 2 * index_dim
    fixed_keys = layers * window + csa * csa_top_k
    return ModelShape(
        name=name,
        hidden_size=hidden, num_layers=layers, num_heads=heads,
        head_params=layers * (heads * dim * (q_rank + 1024) + groups * 1024 * hidden),
        other_params=layers * hidden * (q_rank + dim)
        + csa * (hidden * 4 * (dim + index_dim) + q_rank * index_heads * index_dim) + hca * hidden * 2 * dim,
        mlp_params=layers * expert + 2 * 129280 * hidden,
        num_moe_layers=layers, num_experts=experts, top_k=6, expert_params=expert,
        weight_bytes=1.0, expert_weight_bytes=0.5 + 1 / 32,  # a scale per 32 values
        kv_bytes_per_token=csa * (key_bytes + index_bytes) / 4 + hca * key_bytes / 128,
        entry_bytes=key_bytes + (csa * 4 * (key_bytes + index_bytes) + hca * 2 * key_bytes) / layers,
        read_bytes_per_token=csa * index_bytes / 4 + hca * key_bytes / 128, read_bytes=fixed_keys * key_bytes,
        head_flops_per_token=hca * 4.0 * dim / 128, head_flops=fixed_keys * 4.0 * dim,
        shared_flops_per_token=csa * 2.0 * index_heads * index_dim / 4,
    )  # fmt: skip


SHAPES = {
    shape.name: shape
    for shape in (
        _deepseek_v3(),
        _deepseek_v4(
            "deepseek-v4-flash", hidden=4096, heads=64, q_rank=1024, groups=8, experts=256, expert_size=2048,
            sliding=2, csa=21, hca=20, csa_top_k=512,
        ),
        _deepseek_v4(
            "deepseek-v4-pro", hidden=7168, heads=128, q_rank=1536, groups=16, experts=384, expert_size=3072,
            sliding=0, csa=30, hca=31, csa_top_k=1024,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One accelerator and its links; the defaults are an H200 in nodes of eight.

    Memory and arithmetic as measured (kernels/RESULTS.md); links and latencies are nominal.
    """

    memory_bytes: float = 141e9
    usable_share: float = 0.9
    memory_bytes_per_s: float = 4.25e12
    flops_per_s: float = 700e12
    per_node: int = 8
    node_bytes_per_s: float = 450e9  # one direction, to accelerators of its node
    network_bytes_per_s: float = 50e9  # one direction, to other nodes
    all_reduce_s: float = 15e-6  # before the first byte, within a node
    all_to_all_s: float = 25e-6
    network_s: float = 20e-6  # more, where a collective crosses nodes


@dataclass(frozen=True, slots=True)
class ShardingCost:
    """Of one rank, for one decoding step."""

    tensor: int
    expert: int
    weight_bytes: float
    cache_tokens: float  # that fit beside the weights; 0 if the weights alone do not fit
    all_reduce_bytes: float  # sent
    all_to_all_bytes: float  # sent: rows to the experts and back, and new cache entries
    compute_s: float
    collective_s: float

    @property
    def fits(self) -> bool:
        return self.cache_tokens > 0

    @property
    def step_s(self) -> float:
        return self.compute_s + self.collective_s


def shardings(shape: ModelShape, num_ranks: int, device: Accelerator) -> Iterator[tuple[int, int]]:
    """(tensor, expert) for so many ranks: heads and experts divide evenly, a tensor group stays in its node."""
    for tensor in range(1, min(num_ranks, device.per_node) + 1):
        expert = num_ranks // tensor
        if tensor * expert == num_ranks and not shape.num_heads % tensor and not shape.num_experts % expert:
            yield tensor, expert


def sharding_cost(
    shape: ModelShape, tensor: int, expert: int, *, batch: int, context: int, device: Accelerator
) -> ShardingCost:
    """`batch` sequences of `context` tokens each take one step; they are spread evenly over the expert groups."""
    weights = rank_weight_bytes(shape, tensor, expert)
    free = device.memory_bytes * device.usable_share - weights
    seqs = batch / expert
    crosses = tensor * expert > device.per_node
    reduced = 2 * shape.num_layers * seqs * shape.hidden_size * ACTIVATION_BYTES
    all_reduce_bytes = reduced * 2 * (tensor - 1) / tensor
    # In graphs sizes are fixed: every row goes to every other group, and a result comes back.
    to_experts = 2 * shape.num_moe_layers * shape.hidden_size * ACTIVATION_BYTES
    all_to_all_bytes = seqs * (expert - 1) * (to_experts + shape.num_layers * shape.entry_bytes)
    collective_s = 0.0
    if tensor > 1:
        collective_s += all_reduce_bytes / device.node_bytes_per_s + 2 * shape.num_layers * device.all_reduce_s
    if expert > 1:
        link = device.network_bytes_per_s if crosses else device.node_bytes_per_s
        away = (1 - device.per_node / (tensor * expert)) if crosses else 1.0  # the slower part of the traffic
        start_s = device.all_to_all_s + (device.network_s if crosses else 0.0)
        num_exchanges = 2 * shape.num_moe_layers + shape.num_layers
        collective_s += all_to_all_bytes * away / link + num_exchanges * start_s
    return ShardingCost(
        tensor, expert, weights, max(0.0, free / shape.kv_bytes_per_token),
        all_reduce_bytes, all_to_all_bytes, _compute_s(shape, tensor, expert, batch, context, device), collective_s,
    )  # fmt: skip


def rank_weight_bytes(shape: ModelShape, tensor: int, expert: int) -> float:
    dense = (shape.head_params + shape.mlp_params) / tensor + shape.other_params
    experts = shape.num_moe_layers * shape.num_experts * shape.expert_params / (tensor * expert)
    return dense * shape.weight_bytes + experts * shape.expert_weight_bytes


def _compute_s(shape: ModelShape, tensor: int, expert: int, batch: int, context: int, device: Accelerator) -> float:
    def floor_s(read_bytes: float, flops: float) -> float:
        return max(read_bytes / device.memory_bytes_per_s, flops / device.flops_per_s)

    seqs = batch / expert
    dense = (shape.head_params + shape.mlp_params) / tensor + shape.other_params
    used = 1 - (1 - shape.top_k / shape.num_experts) ** batch  # of the experts, if tokens choose evenly
    slice_params = shape.num_moe_layers * shape.expert_params / tensor
    heads = shape.num_heads / tensor
    attention_flops = heads * (shape.head_flops_per_token * context + shape.head_flops)
    return (
        floor_s(dense * shape.weight_bytes, 2 * seqs * dense)
        + floor_s(
            slice_params * used * shape.num_experts / expert * shape.expert_weight_bytes,
            2 * batch * shape.top_k / expert * slice_params,
        )
        + floor_s(
            seqs * (shape.read_bytes_per_token * context + shape.read_bytes),
            seqs * (attention_flops + shape.shared_flops_per_token * context),
        )
    )

"""`python -m kernels.bench [names]`: each kernel on this CUDA card, beside its floor and torch's own where it has one.

A floor is the larger of bytes over the card's copy bandwidth and operations over its matrix rate, both measured first.
Every kernel is replayed from a CUDA graph, so that launching costs nothing, with the L2 cache flushed before each run.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton.testing

from kernels.blocks import gather_blocks
from kernels.expert_routing import route_experts
from kernels.fp8_entry import Fp8Entry
from kernels.fp8_experts import Fp8Experts, fp8_experts
from kernels.fused_experts import fused_experts
from kernels.mla_decode import mla_decode, plan_mla_decode
from kernels.mla_prefill import mla_prefill, plan_mla_prefill
from kernels.mla_rope_cache import mla_rope_cache
from kernels.rms_norm import add_rms_norm
from kernels.sampling import sample

_BLOCK_SIZE = 64
_LATENT_DIM, _ROPE_DIM = 512, 64  # DeepSeek-V2, V3, Kimi-K2
_NOPE_DIM, _VALUE_DIM = 128, 128
_ENTRY = Fp8Entry(_LATENT_DIM, _ROPE_DIM, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel at one shape: how to run it, what it must move and compute at least."""

    shape: str
    run: Callable[[], object]
    num_bytes: int
    num_operations: int
    peer: Callable[[], object] | None = None
    is_fp8: bool = False  # its products run at the rate of that format


@dataclass(frozen=True, slots=True)
class Figure:
    kernel: str
    shape: str
    time_us: float
    floor_us: float
    bandwidth_tb_s: float
    rate_tflops: float
    peer_us: float | None

    def line(self) -> str:
        peer = "" if self.peer_us is None else f"   torch {self.peer_us:9.1f} us"
        return (
            f"{self.kernel:14} {self.shape:34} {self.time_us:9.1f} us   floor {self.floor_us:9.1f} us "
            f"({self.floor_us / self.time_us:4.0%})   {self.bandwidth_tb_s:5.2f} TB/s {self.rate_tflops:6.1f} TF{peer}"
        )


def median_us(run: Callable[[], object]) -> float:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    time_ms: float = triton.testing.do_bench(graph.replay, warmup=20, rep=100, return_mode="median")
    return 1e3 * time_ms


def copy_bandwidth() -> float:
    """Bytes per second, read and written."""
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (median_us(lambda: torch.neg(source, out=target)) * 1e-6)


def matrix_rate() -> float:
    """bf16 operations per second."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / (median_us(lambda: a @ b) * 1e-6)


def fp8_matrix_rate() -> float:
    """e4m3 operations per second of torch's own product with one scale for each matrix."""
    a, b = (torch.randn(8192, 8192, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    scale, recipe = torch.ones(1, device="cuda"), torch.nn.functional.ScalingType.TensorWise
    product = torch.nn.functional.scaled_mm
    return 2 * 8192**3 / (median_us(lambda: product(a, b.T, scale, recipe, scale, recipe, use_fast_accum=True)) * 1e-6)


def _lens(batch: int, context: int) -> torch.Tensor:
    return torch.full((batch,), context, dtype=torch.int32, device="cuda")


def _paged_cache(batch: int, context: int, *, is_fp8: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """A random cache and the tables of `batch` sequences, blocks in random order."""
    blocks = -(-context // _BLOCK_SIZE)
    dim = _LATENT_DIM + _ROPE_DIM
    cache = torch.randn(batch * blocks, _BLOCK_SIZE, dim, device="cuda", dtype=torch.bfloat16)
    if is_fp8:
        cache = _ENTRY.pack(cache)
    return cache, torch.randperm(batch * blocks, device="cuda").to(torch.int32).view(batch, blocks)


def decode_works() -> Iterator[Work]:
    shapes = [(16, 128, 8192), (16, 32, 8192), (16, 16, 32768), (16, 128, 1024), (16, 32, 1024), (16, 1, 1024)]
    shapes += [(16, 1, 32768), (16, 1, 131072), (64, 128, 8192), (128, 128, 8192), (128, 32, 8192), (128, 1, 131072)]
    yield from _decode_works(shapes, is_fp8=False)


def fp8_decode_works() -> Iterator[Work]:
    """Over FP8 entries; their products are bf16, so the floor's operations are, too."""
    shapes = [(16, 128, 8192), (16, 32, 8192), (16, 1, 131072), (128, 128, 8192), (128, 1, 131072)]
    yield from _decode_works(shapes, is_fp8=True)


def _decode_works(shapes: Sequence[tuple[int, int, int]], *, is_fp8: bool) -> Iterator[Work]:
    dim = _LATENT_DIM + _ROPE_DIM
    for num_heads, batch, context in shapes:
        cache, tables = _paged_cache(batch, context, is_fp8=is_fp8)
        lens = _lens(batch, context)
        q = torch.randn(batch, num_heads, dim, device="cuda", dtype=torch.bfloat16)
        plan = plan_mla_decode(lens, num_queries=batch, num_heads=num_heads)

        def run(q=q, cache=cache, tables=tables, lens=lens, plan=plan) -> torch.Tensor:
            return mla_decode(q, cache, tables, lens, 0.1, _LATENT_DIM, plan=plan)

        yield Work(
            shape=f"{num_heads} heads, {batch} x {context}",
            run=run,
            num_bytes=cache.nbytes + q.nbytes + batch * num_heads * _LATENT_DIM * 2,
            num_operations=2 * batch * context * num_heads * (dim + _LATENT_DIM),
        )


def prefill_works() -> Iterator[Work]:
    shapes: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = (  # heads; each sequence's new tokens and prefix
        (16, ((4096, 0),)), (16, ((16384, 0),)), (16, ((32768, 0),)), (16, ((1024, 0),) * 32), (16, ((2048, 30720),)),
        (16, ((2048, 49152), (512, 0))), (128, ((8192, 0),)),
    )  # fmt: skip
    for num_heads, sequences in shapes:
        num_new = [new for new, _ in sequences]
        num_keys = [new + prefix for new, prefix in sequences]
        q, kv, k_rope = (
            torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
            for shape in (
                (sum(num_new), num_heads, _NOPE_DIM + _ROPE_DIM),
                (sum(num_keys), num_heads, _NOPE_DIM + _VALUE_DIM),
                (sum(num_keys), _ROPE_DIM),
            )
        )
        query_starts, key_starts = (
            torch.tensor([0, *lens], device="cuda").cumsum(0, dtype=torch.int32) for lens in (num_new, num_keys)
        )
        plan = plan_mla_prefill(query_starts, key_starts, sum(num_new))
        k_nope, v = kv[..., :_NOPE_DIM], kv[..., _NOPE_DIM:]
        sizes = {"max_query_len": max(num_new), "max_key_len": max(num_keys)}

        def run(q=q, k=k_nope, r=k_rope, v=v, qs=query_starts, ks=key_starts, plan=plan, sizes=sizes):
            return mla_prefill(q, k, r, v, qs, ks, 0.1, plan=plan, **sizes)

        pairs = sum(new * prefix + new * (new + 1) // 2 for new, prefix in sequences)
        is_plain = len(set(sequences)) == 1 and sequences[0][1] == 0
        yield Work(
            shape=f"{num_heads} heads, {_named(sequences)}",
            run=run,
            num_bytes=q.nbytes + kv.nbytes + k_rope.nbytes + sum(num_new) * num_heads * _VALUE_DIM * 2,
            num_operations=2 * pairs * num_heads * (_NOPE_DIM + _ROPE_DIM + _VALUE_DIM),
            peer=_attention_of_torch(q, k_nope, k_rope, v, len(sequences)) if is_plain else None,
        )


def _named(sequences: Sequence[tuple[int, int]]) -> str:
    """`32 x 1024 after 0`, several kinds joined by `and`."""
    counts = Counter(sequences)
    return " and ".join(f"{count} x {new} after {prefix}" for (new, prefix), count in counts.items())


def _attention_of_torch(
    q: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor, v: torch.Tensor, batch: int
) -> Callable[[], object]:
    """scaled_dot_product_attention over materialised keys, values padded to the keys' width as it needs."""
    num_heads = q.shape[1]
    k = torch.cat([k_nope, k_rope.unsqueeze(1).expand(-1, num_heads, -1)], dim=-1)
    padded = torch.nn.functional.pad(v, (0, k.shape[2] - v.shape[2]))
    q, k, padded = (t.unflatten(0, (batch, -1)).transpose(1, 2) for t in (q, k, padded))
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, padded, is_causal=True, scale=0.1)


def gather_works() -> Iterator[Work]:
    for batch, context, is_fp8 in ((1, 131072, False), (32, 8192, False), (1, 131072, True), (32, 8192, True)):
        cache, tables = _paged_cache(batch, context, is_fp8=is_fp8)
        lens, entry = _lens(batch, context), _ENTRY if is_fp8 else None
        key_starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * context

        def run(cache=cache, tables=tables, lens=lens, starts=key_starts, n=batch * context, entry=entry):
            return gather_blocks(cache, tables, lens, starts, n, entry=entry)

        yield Work(
            shape=f"{batch} x {context}{' fp8' if is_fp8 else ''}",
            run=run,
            num_bytes=cache.nbytes + batch * context * (_LATENT_DIM + _ROPE_DIM) * 2,
            num_operations=0,
            peer=None if is_fp8 else lambda cache=cache, tables=tables: cache[tables.long().flatten()],  # type: ignore[misc]
        )


_NUM_EXPERTS, _TOP_K, _DIM, _INTER = 64, 6, 2048, 1408  # DeepSeek-V2-Lite


def _routing(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, the experts they chose at random, their weights."""
    x = torch.randn(num_tokens, _DIM, device="cuda", dtype=torch.bfloat16)
    ids = torch.rand(num_tokens, _NUM_EXPERTS, device="cuda").topk(_TOP_K).indices.int()
    return x, ids, torch.rand(num_tokens, _TOP_K, device="cuda")


def expert_works(sizes: Sequence[int] = (1, 8, 32, 128, 512, 2048, 8192, 16384)) -> Iterator[Work]:
    """torch's grouped_mm gets its rows sorted for nothing and skips the weighted sum."""
    gate_up = torch.randn(_NUM_EXPERTS, 2 * _INTER, _DIM, device="cuda", dtype=torch.bfloat16) * 0.02
    down = torch.randn(_NUM_EXPERTS, _DIM, _INTER, device="cuda", dtype=torch.bfloat16) * 0.02
    for num_tokens in sizes:
        x, ids, weights = _routing(num_tokens)
        ends = torch.bincount(ids.flatten(), minlength=_NUM_EXPERTS).cumsum(0).int()
        rows = x.repeat_interleave(_TOP_K, 0)

        def peer(rows: torch.Tensor = rows, ends: torch.Tensor = ends) -> torch.Tensor:
            gate, up = torch.nn.functional.grouped_mm(rows, gate_up.mT, offs=ends).chunk(2, -1)
            return torch.nn.functional.grouped_mm(torch.nn.functional.silu(gate) * up, down.mT, offs=ends)

        yield Work(
            shape=f"{_NUM_EXPERTS} top {_TOP_K}, {_DIM} x {_INTER}, {num_tokens}",
            run=lambda x=x, ids=ids, weights=weights: fused_experts(x, gate_up, down, ids, weights),  # type: ignore[misc]
            num_bytes=ids.unique().numel() * 3 * _INTER * _DIM * 2 + 2 * x.nbytes,
            num_operations=2 * num_tokens * _TOP_K * 3 * _INTER * _DIM,
            peer=peer,
        )


def fp8_expert_works(sizes: Sequence[int] = (1, 8, 32, 128, 512, 2048, 8192)) -> Iterator[Work]:
    """The same experts with block scales. torch's product for this card has a scale for each row instead, gets its rows
    sorted and rounded for nothing, and multiplies only."""
    e4m3, row_wise = torch.float8_e4m3fn, torch.nn.functional.ScalingType.RowWise
    gate_up = torch.randn(_NUM_EXPERTS, 2 * _INTER, _DIM, device="cuda").to(e4m3)
    down = torch.randn(_NUM_EXPERTS, _DIM, _INTER, device="cuda").to(e4m3)
    scales = [
        torch.rand(_NUM_EXPERTS, n // 128, k // 128, device="cuda") for n, k in ((2 * _INTER, _DIM), (_DIM, _INTER))
    ]
    experts = Fp8Experts(gate_up, scales[0] * 0.02, down, scales[1] * 0.02)
    by_row = [torch.ones(_NUM_EXPERTS, n, device="cuda") for n in (2 * _INTER, _DIM)]
    for num_tokens in sizes:
        x, ids, weights = _routing(num_tokens)
        ends = torch.bincount(ids.flatten(), minlength=_NUM_EXPERTS).cumsum(0).int()
        rows = x.repeat_interleave(_TOP_K, 0).to(e4m3)
        hidden = torch.randn(len(rows), _INTER, device="cuda").to(e4m3)
        ones = torch.ones(len(rows), device="cuda")

        def peer(rows=rows, hidden=hidden, ends=ends, ones=ones) -> torch.Tensor:
            grouped = torch.nn.functional.scaled_grouped_mm  # type: ignore[attr-defined]
            product = functools.partial(grouped, offs=ends, use_fast_accum=True)
            product(rows, gate_up.mT, ones, row_wise, by_row[0], row_wise)
            return product(hidden, down.mT, ones, row_wise, by_row[1], row_wise)  # type: ignore[no-any-return]

        yield Work(
            shape=f"{_NUM_EXPERTS} top {_TOP_K}, {_DIM} x {_INTER}, {num_tokens}",
            run=lambda x=x, ids=ids, weights=weights: fp8_experts(x, experts, ids, weights),  # type: ignore[misc]
            num_bytes=ids.unique().numel() * 3 * _INTER * _DIM + 2 * x.nbytes,
            num_operations=2 * num_tokens * _TOP_K * 3 * _INTER * _DIM,
            peer=peer,
            is_fp8=True,
        )


def row_works() -> Iterator[Work]:
    """The small kernels around attention and experts, in DeepSeek-V2-Lite's shape."""
    num_heads, num_experts, dim = 16, 64, 2048
    weight, norm_weight = (torch.ones(n, device="cuda", dtype=torch.bfloat16) for n in (dim, _LATENT_DIM))
    cos_sin = torch.randn(16384, _ROPE_DIM, device="cuda")
    cache = torch.empty(256, _BLOCK_SIZE, _LATENT_DIM + _ROPE_DIM, device="cuda", dtype=torch.bfloat16)
    for n in (32, 8192):
        x, residual = (torch.randn(n, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))

        def norm_of_torch(x: torch.Tensor = x, residual: torch.Tensor = residual) -> torch.Tensor:
            return torch.nn.functional.rms_norm(residual.add_(x), (dim,), weight, 1e-6)

        add_norm = lambda x=x, r=residual: add_rms_norm(x, r, weight, 1e-6)  # noqa: E731
        yield Work(f"add_rms_norm {n} x {dim}", add_norm, 4 * x.nbytes, 0, norm_of_torch)
        q = torch.randn(n, num_heads, _NOPE_DIM + _ROPE_DIM, device="cuda", dtype=torch.bfloat16)
        kv = torch.randn(n, _LATENT_DIM + _ROPE_DIM, device="cuda", dtype=torch.bfloat16)
        slots = torch.randperm(16384, device="cuda")[:n]
        rope = lambda q=q, kv=kv, slots=slots: mla_rope_cache(  # noqa: E731
            q, kv, norm_weight, 1e-6, cos_sin, slots, slots, cache, interleaved=True
        )
        yield Work(f"mla_rope_cache {n} x {num_heads} heads", rope, 2 * (kv.nbytes + n * num_heads * _ROPE_DIM * 2), 0)
        logits = torch.randn(n, num_experts, device="cuda")
        route = lambda logits=logits: route_experts(  # noqa: E731
            logits, None, top_k=6, num_groups=1, top_groups=1,
            scoring="softmax", group_score="max", normalize=False, scale=1.0,
        )  # fmt: skip
        yield Work(f"route_experts {n} x {num_experts}", route, logits.nbytes + n * 48, 0)


def sample_works() -> Iterator[Work]:
    """Beside a sort, what torch needs for top-p; greedy beside argmax."""
    vocab = 102_400
    controls = {"greedy": (0.0, 0, 1.0), "plain": (1.0, 0, 1.0), "top-k 50": (1.0, 50, 1.0), "top-p 0.9": (1.0, 0, 0.9)}
    for batch in (1, 32, 128):
        logits = torch.randn(batch, vocab, device="cuda") * 3
        zeros, ids = torch.zeros(batch, device="cuda"), torch.arange(batch, device="cuda")
        for name, (temperature, top_k, top_p) in controls.items():
            arguments = zeros + temperature, (zeros + top_k).int(), zeros + top_p, zeros, ids, ids
            peer = logits.argmax if name == "greedy" else logits.sort
            yield Work(
                shape=f"{name}, {batch} x {vocab}",
                run=lambda logits=logits, arguments=arguments: sample(logits, *arguments),  # type: ignore[misc]
                num_bytes=logits.nbytes,
                num_operations=0,
                peer=lambda peer=peer: peer(-1),  # type: ignore[misc]
            )


WORKS: dict[str, Callable[[], Iterator[Work]]] = {
    "mla_decode": decode_works,
    "mla_decode_fp8": fp8_decode_works,
    "mla_prefill": prefill_works,
    "gather_blocks": gather_works,
    "fused_experts": expert_works,
    "fp8_experts": fp8_expert_works,
    "rows": row_works,
    "sample": sample_works,
}


def _peer_us(peer: Callable[[], object]) -> float | None:
    """None where this release of torch, or its build for this card, lacks the operation."""
    try:
        return median_us(peer)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        print(f"torch's own does not run here: {str(error).splitlines()[0]}")
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*WORKS, []], help="kernels; all by default")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    arguments = parser.parse_args()
    bandwidth, rate, fp8_rate = copy_bandwidth(), matrix_rate(), fp8_matrix_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(
        f"copy {bandwidth / 1e12:.2f} TB/s, matrix product {rate / 1e12:.0f} TFLOP/s in bf16, "
        f"{fp8_rate / 1e12:.0f} in e4m3"
    )
    figures = []
    for name in arguments.names or WORKS:
        for work in WORKS[name]():
            time_us = median_us(work.run)
            figure = Figure(
                kernel=name,
                shape=work.shape,
                time_us=time_us,
                floor_us=1e6
                * max(work.num_bytes / bandwidth, work.num_operations / (fp8_rate if work.is_fp8 else rate)),
                bandwidth_tb_s=work.num_bytes / time_us / 1e6,
                rate_tflops=work.num_operations / time_us / 1e6,
                peer_us=None if work.peer is None else _peer_us(work.peer),
            )
            figures.append(figure)
            print(figure.line(), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps([asdict(figure) for figure in figures], indent=1))


if __name__ == "__main__":
    main()

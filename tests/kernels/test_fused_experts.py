"""fused_experts on three backends; bitwise batch invariance on CPU; every shipped tile table entry on CUDA."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kernels.fused_experts import fused_experts, fused_experts_reference
from kernels.grouped_gemm import choose_tiles
from tests.kernels import experts
from tests.kernels.cases import CUDA, TORCH, Target, assert_bitwise_equal, assert_close, generator

# fp32: sums in another order. 16 bit: the hidden layer and each expert's share are rounded to the storage dtype.
RELATIVE_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Case(experts.Case):
    dim: int = 24
    inter: int = 40


CASES = [
    Case("no tokens", 0),
    Case("one token", 1),
    Case("odd", 13, top_k=3),
    Case("one expert", 5, top_k=1, num_experts=1),
    Case("all experts", 3, top_k=5),
    Case("more experts than pairs", 2, num_experts=33),
    Case("tile of columns exactly", 4, dim=64, inter=64),
    Case("tiles + 8 columns", 17, dim=72, inter=136),
    Case("all on one expert", 18, ids=((3, 3),) * 18),
    Case("an expert twice", 3, ids=((1, 1), (0, 4), (4, 4))),
    Case("some without expert", 4, ids=((1, -1), (-1, -1), (-1, 0), (2, 3))),
    Case("nothing to do", 3, ids=((-1, -1),) * 3),
]


@dataclass(frozen=True)
class Inputs:
    x: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    def tokens(self, start: int, stop: int) -> Inputs:
        part = self.x[start:stop].clone(), self.ids[start:stop].clone(), self.weights[start:stop].clone()
        return Inputs(part[0], self.gate_up, self.down, part[1], part[2])

    def run(self, target: Target, counts: torch.Tensor | None = None) -> torch.Tensor:
        return fused_experts(
            self.x, self.gate_up, self.down, self.ids, self.weights, counts=counts, backend=target.backend
        )

    def reference(self) -> torch.Tensor:
        return fused_experts_reference(self.x, self.gate_up, self.down, self.ids, self.weights)


def inputs_of(case: Case, target: Target, dtype: torch.dtype) -> Inputs:
    random = generator(case.name)
    ids = case.chosen(random)
    scale = case.dim**-0.5, case.inter**-0.5
    return Inputs(
        x=target.place(torch.randn(case.num_tokens, case.dim, generator=random), dtype),
        gate_up=target.place(
            torch.randn(case.num_experts, 2 * case.inter, case.dim, generator=random) * scale[0], dtype
        ),
        down=target.place(torch.randn(case.num_experts, case.dim, case.inter, generator=random) * scale[1], dtype),
        ids=target.place(ids),
        weights=target.place(torch.rand(case.num_tokens, ids.shape[1], generator=random)),
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matches_reference(case: Case, target: Target) -> None:
    for dtype in target.dtypes:
        inputs = inputs_of(case, target, dtype)
        out = inputs.run(target)
        assert out.dtype == dtype
        assert_close(out, inputs.reference(), RELATIVE_TOLERANCE[dtype])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_choices_are_counted(case: Case, target: Target) -> None:
    inputs = inputs_of(case, target, torch.float32)
    before = torch.arange(case.num_experts)
    counts = target.place(before.clone())
    assert_bitwise_equal(inputs.run(target, counts), inputs.run(target))
    named = torch.bincount(inputs.ids[inputs.ids >= 0].cpu(), minlength=case.num_experts)
    assert_bitwise_equal(counts.cpu(), before + named)


def test_nan_of_one_token_stays_with_it(target: Target) -> None:
    inputs = inputs_of(Case("nan", 6, ids=((0, 1), (1, 2), (-1, 1), (0, 3), (1, 1), (-1, -1))), target, torch.float32)
    clean = inputs.run(target)
    inputs.x[0] = torch.nan  # the first row of expert 0 and of expert 1, whose padding repeats rows
    out = inputs.run(target)
    assert out[0].isnan().all()
    assert_bitwise_equal(out[1:], clean[1:])


@pytest.mark.parametrize(("dim", "inter"), [(384, 128), (200, 72), (1024, 96)])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_cpu_token_bits_do_not_depend_on_the_batch(dim: int, inter: int, num_threads: int) -> None:
    """A token alone, padded to a row tile, in 37 rows and in 512 gives the same bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        inputs = inputs_of(Case("invariance", 512, 4, 8, dim, inter), TORCH, torch.float32)
        together = inputs.run(TORCH)
        assert_close(together, inputs.reference(), RELATIVE_TOLERANCE[torch.float32])
        for start, stop in ((0, 1), (7, 15), (100, 137), (511, 512), (3, 300)):
            assert_bitwise_equal(inputs.tokens(start, stop).run(TORCH), together[start:stop])
        padded = inputs.tokens(40, 48)
        padded.ids[1:] = -1
        assert_bitwise_equal(padded.run(TORCH)[:1], together[40:41])
    finally:
        torch.set_num_threads(threads)


def test_wrong_arguments_are_refused(target: Target) -> None:
    good = inputs_of(Case("good", 3), target, torch.float32)
    for name, wrong in (
        ("ids", good.ids.long()),
        ("ids", good.ids[:2]),
        ("weights", good.weights.double()),
        ("gate_up", good.gate_up[:, :-1].contiguous()),
        ("gate_up", good.gate_up.mT),
        ("down", good.down.half()),
        ("x", good.x.T.contiguous().T),
    ):
        fields = {field: getattr(good, field) for field in Inputs.__dataclass_fields__} | {name: wrong}
        with pytest.raises(ValueError, match=r"expected|contiguous"):
            Inputs(**fields).run(target)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 15, 32, 129, 512, 2048])
def test_cuda_real_shape(num_tokens: int) -> None:
    """DeepSeek-V2-Lite's experts: right, the same 20 times, and the same replayed from a graph."""
    inputs = inputs_of(Case(f"real {num_tokens}", num_tokens, 6, 64, 2048, 1408), CUDA, torch.bfloat16)
    tokens = inputs.x, inputs.ids, inputs.weights
    experts.check_repeats_and_replay(
        lambda: inputs.run(CUDA), inputs.reference, tokens, RELATIVE_TOLERANCE[torch.bfloat16]
    )


@pytest.mark.gpu
@pytest.mark.parametrize("rows_per_expert", [1, 4, 5, 16, 17, 96, 97, 400, 401])
@pytest.mark.parametrize("spread", ["even", "one expert", "none"])
def test_cuda_tile_edges(rows_per_expert: int, spread: str) -> None:
    """At and beside every bound of the shipped table, rows of an expert beside a tile's, a width no tile divides."""
    num_experts = 8
    num_tokens = rows_per_expert * num_experts
    inputs = inputs_of(Case(spread, num_tokens, 1, num_experts, 264, 136), CUDA, torch.bfloat16)
    tiles = choose_tiles("fused_experts", num_tokens, num_experts, inputs.x.device, bits=16, dim=264, inter=136)
    if spread == "one expert":
        inputs.ids.fill_(5)
    elif spread == "none":
        inputs.ids.fill_(-1)
    else:
        inputs.ids[: 2 * tiles.rows + 1, 0] = 2
    assert_close(inputs.run(CUDA), inputs.reference(), RELATIVE_TOLERANCE[torch.bfloat16])

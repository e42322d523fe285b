"""route_experts on three backends, and against DeepSeek's own formulas written out for one token."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kernels.expert_routing import GroupScore, Scoring, route_experts, route_experts_reference
from tests.kernels.cases import Target, assert_bitwise_equal, assert_close, generator

WEIGHT_TOLERANCE = 1e-6  # exp and division round differently per backend


@dataclass(frozen=True)
class Router:
    name: str
    num_experts: int
    top_k: int
    num_groups: int = 1
    top_groups: int = 1
    scoring: Scoring = "softmax"
    group_score: GroupScore = "max"
    normalize: bool = False
    scale: float = 1.0
    has_bias: bool = False


ROUTERS = [
    Router("one expert", 1, 1),
    Router("V2-Lite greedy", 16, 6),
    Router("V2 group limited, group of 5", 20, 4, num_groups=4, top_groups=2, scale=16.0),
    Router("V3", 32, 8, 8, 4, "sigmoid", "top2_sum", normalize=True, scale=2.5, has_bias=True),
    Router("V3 without groups", 17, 3, scoring="sigmoid", normalize=True, has_bias=True),
    Router("all experts", 7, 7),
    Router("one group of three", 12, 4, 3, 1, "sigmoid", "top2_sum", normalize=True),
]


def route(
    router: Router, logits: torch.Tensor, bias: torch.Tensor | None, target: Target
) -> tuple[torch.Tensor, torch.Tensor]:
    return route_experts(
        logits, bias, top_k=router.top_k, num_groups=router.num_groups, top_groups=router.top_groups,
        scoring=router.scoring, group_score=router.group_score, normalize=router.normalize, scale=router.scale,
        backend=target.backend,
    )  # fmt: skip


def inputs_of(router: Router, num_tokens: int, target: Target) -> tuple[torch.Tensor, torch.Tensor | None]:
    random = generator(router.name)
    logits = target.place(torch.randn(num_tokens, router.num_experts, generator=random) * 2)
    bias = target.place(torch.randn(router.num_experts, generator=random) * 0.1)
    return logits, bias if router.has_bias else None


@pytest.mark.parametrize("num_tokens", [0, 1, 9])
@pytest.mark.parametrize("router", ROUTERS, ids=lambda router: router.name)
def test_matches_reference(router: Router, num_tokens: int, target: Target) -> None:
    logits, bias = inputs_of(router, num_tokens, target)
    ids, weights = route(router, logits, bias, target)
    expected_ids, expected_weights = route_experts_reference(
        logits, bias, top_k=router.top_k, num_groups=router.num_groups, top_groups=router.top_groups,
        scoring=router.scoring, group_score=router.group_score, normalize=router.normalize, scale=router.scale,
    )  # fmt: skip
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert ids.tolist() == expected_ids.tolist()
    assert_close(weights, expected_weights, WEIGHT_TOLERANCE)


def test_v3_router_by_hand(target: Target) -> None:
    """Groups {0,1}, {2,3}, {4,5}: the bias lifts group 2 over group 0, yet the weights do not see it."""
    logits = target.place(torch.tensor([[2.0, -4.0, 1.0, 0.5, 0.0, 0.25]]))
    bias = target.place(torch.tensor([0.0, 0.0, 0.0, 0.0, 0.4, 0.4]))
    router = Router("", 6, 2, 3, 2, "sigmoid", "top2_sum", normalize=True, scale=3.0)
    ids, weights = route(router, logits, bias, target)
    # sigmoid: .8808 .0180 | .7311 .6225 | .5000 .5622; groups: .8988, 1.3535, 1.8622 (with bias)
    assert ids.tolist() == [[5, 4]]
    chosen = torch.tensor([[0.5621765, 0.5]])
    assert_close(weights, 3 * chosen / chosen.sum(), WEIGHT_TOLERANCE)


def test_v2_group_limited_router_by_hand(target: Target) -> None:
    """The third best expert lies in a group that is not kept."""
    logits = target.place(torch.tensor([[3.0, 0.0, 2.5, 0.1, 2.0, -1.0]]))
    ids, weights = route(Router("", 6, 3, 3, 2), logits, None, target)
    assert ids.tolist() == [[0, 2, 3]]
    assert_close(weights, logits.cpu().softmax(-1)[:, [0, 2, 3]], WEIGHT_TOLERANCE)


def test_ties_go_to_the_lower_group_and_id(target: Target) -> None:
    logits = target.place(torch.zeros(2, 12))
    assert route(Router("", 12, 3), logits, None, target)[0].tolist() == [[0, 1, 2]] * 2
    grouped = Router("", 12, 5, 4, 2, "sigmoid", "top2_sum")
    assert route(grouped, logits, None, target)[0].tolist() == [[0, 1, 2, 3, 4]] * 2
    logits[:, 5] = logits[:, 11] = 1.0
    assert route(grouped, logits, None, target)[0].tolist() == [[5, 11, 3, 4, 9]] * 2


@pytest.mark.filterwarnings("ignore:(overflow|invalid|All-NaN)")  # the interpreter computes with NumPy, which warns
def test_extreme_logits_and_nan_give_valid_ids(target: Target) -> None:
    logits = target.place(torch.tensor([[1e4, -1e4, 0.0, 1e4], [-1e4] * 4, [torch.nan] * 4]))
    # Softmax leaves exactly 0 to experts 1 and 2: a tie. Sigmoid gives 0.5 to expert 2.
    for scoring, third in (("softmax", 1), ("sigmoid", 2)):
        router = Router("", 4, 3, scoring=scoring, normalize=True)  # type: ignore[arg-type]
        ids, weights = route(router, logits, None, target)
        assert all(len(set(row)) == 3 and set(row) <= {0, 1, 2, 3} for row in ids.tolist())
        assert ids[0].tolist() == [0, 3, third]
        assert weights[0].isfinite().all()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_row_does_not_depend_on_the_others(scoring: Scoring, target: Target) -> None:
    router = Router("invariance", 19, 4, scoring=scoring, normalize=True)  # 19: rows straddle every vector width
    logits, _ = inputs_of(router, 37, target)
    together = route(router, logits, None, target)
    for row in (0, 5, 36):
        alone = route(router, logits[row : row + 1], None, target)
        assert_bitwise_equal(alone[0], together[0][row : row + 1])
        assert_bitwise_equal(alone[1], together[1][row : row + 1])


@pytest.mark.parametrize(
    ("router", "message"),
    [
        (Router("", 6, 7), "top_k"),
        (Router("", 6, 0), "top_k"),
        (Router("", 6, 5, 3, 2), "top_k"),
        (Router("", 6, 1, 4, 2), "num_groups"),
        (Router("", 6, 1, 3, 4), "top_groups"),
        (Router("", 6, 1, 6, 2, group_score="top2_sum"), "top_groups"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_impossible_choices_are_refused(router: Router, message: str, target: Target) -> None:
    with pytest.raises(ValueError, match=message):
        route(router, target.place(torch.zeros(2, 6)), None, target)


@pytest.mark.parametrize("router", ROUTERS[1:4], ids=lambda router: router.name)
def test_shared_experts_follow_the_chosen_ones_with_weight_one(router: Router, target: Target) -> None:
    logits, bias = inputs_of(router, 5, target)
    ids, weights = route(router, logits, bias, target)
    with_shared = route_experts(
        logits, bias, top_k=router.top_k, num_groups=router.num_groups, top_groups=router.top_groups,
        scoring=router.scoring, group_score=router.group_score, normalize=router.normalize, scale=router.scale,
        num_shared=3, backend=target.backend,
    )  # fmt: skip
    shared_ids = [router.num_experts + index for index in range(3)]
    assert with_shared[0].tolist() == [[*row, *shared_ids] for row in ids.tolist()]
    assert_bitwise_equal(with_shared[1][:, : router.top_k].contiguous(), weights)
    assert with_shared[1][:, router.top_k :].tolist() == [[1.0] * 3] * 5


def test_padding_rows_get_no_expert(target: Target) -> None:
    logits, _ = inputs_of(ROUTERS[1], 5, target)
    slots = target.place(torch.tensor([7, -1, 0, 10**10, -1]))
    ids, weights = route_experts(
        logits, None, top_k=2, num_groups=1, top_groups=1, scoring="softmax", group_score="max", normalize=False,
        scale=1.0, num_shared=1, slots=slots, backend=target.backend,
    )  # fmt: skip
    expected, _ = route_experts_reference(
        logits, None, top_k=2, num_groups=1, top_groups=1, scoring="softmax", group_score="max", normalize=False,
        scale=1.0, num_shared=1, slots=slots,
    )  # fmt: skip
    assert ids.tolist() == expected.tolist()
    assert [row == [-1, -1, -1] for row in ids.tolist()] == [False, True, False, False, True]
    assert weights.isfinite().all()

"""The cost model's arithmetic."""

from __future__ import annotations

import pytest

from app.planning.cost_model import ReplicaCost

COST = ReplicaCost(prefill_tokens_per_s=1000, step_base_s=0.01, decode_seq_s=0.001, context_token_s=1e-6)


def test_a_step_adds_its_parts() -> None:
    assert COST.step_s(0, 0, 0) == pytest.approx(0.01)
    assert COST.step_s(500, 3, 2000) == pytest.approx(0.01 + 0.5 + 0.003 + 0.002)


def test_many_decoding_steps_are_the_sum_of_single_ones() -> None:
    singles = sum(COST.step_s(0, 4, 100 + 4 * index) for index in range(50))
    assert COST.decode_s(50, 4, 100) == pytest.approx(singles)


def test_prefill_alone_pays_a_step_per_chunk() -> None:
    assert COST.prefill_s(1100) == pytest.approx(3 * 0.01 + 1.1)


def test_requests_per_second_fall_with_length_and_with_a_small_cache() -> None:
    assert COST.requests_per_s(100, 50) > COST.requests_per_s(1000, 50) > COST.requests_per_s(1000, 500)
    small = ReplicaCost(prefill_tokens_per_s=1000, kv_capacity_tokens=2000)
    assert small.requests_per_s(900, 100) < ReplicaCost(prefill_tokens_per_s=1000).requests_per_s(900, 100)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"prefill_tokens_per_s": 0.0}, "prefill_tokens_per_s"),
        ({"start_delay_s": -1.0}, "start_delay_s"),
        ({"step_base_s": 0.0, "decode_seq_s": 0.0}, "step_base_s"),
        ({"max_batched_tokens": 8, "max_running_seqs": 9}, "max_batched_tokens"),
    ],
)
def test_bad_values_name_their_field(values: dict[str, float], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}:"):
        ReplicaCost(**values)  # type: ignore[arg-type]

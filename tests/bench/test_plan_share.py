from __future__ import annotations

import pytest

from app.bench import plan_share as module
from app.engine.plan import StepPlan, to_model_input

BUSY_MACHINE_MS = 500.0


def test_the_plan_is_a_step_of_decodes() -> None:
    plan = module._plan(3)
    assert plan.num_decodes == module.NUM_SEQS
    unpacked = StepPlan.unpack(plan.pack())
    inputs = to_model_input(unpacked, module.BLOCK_SIZE, module.torch.device("cpu"))
    assert inputs.context_lens.tolist() == [module.CONTEXT_TOKENS + 3] * module.NUM_SEQS


@pytest.mark.full
def test_two_ranks_share_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPS", 20)
    lines: list[str] = []
    result = module.plan_share(2, 1, lines.append)
    assert 0 < result["p50_ms"] < BUSY_MACHINE_MS and len(lines) == 1

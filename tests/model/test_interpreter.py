"""A one-layer model on the Triton kernels, interpreted on CPU: every kernel where the model uses it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoints import random_prompt, save_random_checkpoint
from tests.model.conftest import load_transformer
from tests.model.driver import Driver

MAX_LOGIT_DIFF = 1e-4
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")


# Interpreting takes seconds a case: every family and both prefill paths, not every pair of them.
@pytest.mark.parametrize(("family", "absorbed_prefill"), [("v2_lite", True), ("v2", False), ("v3", True)])
def test_the_triton_backend_gives_the_torch_backends_logits(
    tmp_path: Path, family: str, absorbed_prefill: bool
) -> None:
    folder = save_random_checkpoint(tmp_path, family, num_hidden_layers=1, first_k_dense_replace=0)
    logits = []
    for backend in ("torch", "triton"):
        model = load_transformer(folder, absorbed_prefill=absorbed_prefill, backend=backend)
        driver = Driver(model, num_blocks=4)
        first, second = driver.add(random_prompt(66, seed=1)), driver.add(random_prompt(9, seed=2))
        driver.step({first: 60})
        mixed = driver.step({first: 6, second: 8})
        logits.append(torch.cat([mixed, driver.step({second: 1})]))
    assert (logits[0] - logits[1]).abs().max() <= MAX_LOGIT_DIFF

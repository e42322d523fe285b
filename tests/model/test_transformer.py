"""Logits against transformers: fp32, eager attention, one unpadded sequence at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.model.attention import mla
from app.model.inputs import ModelInput
from app.model.transformer import Transformer
from kernels.checks import Backend
from tests.checkpoints import FAMILIES, load_oracle, oracle_logits, random_prompt, save_random_checkpoint
from tests.model.conftest import EMBEDDED, Checkpoint, load_transformer
from tests.model.driver import BLOCK_SIZE, Driver

MAX_LOGIT_DIFF = 1e-4
# Mean over the vocabulary, of logits with a spread of about 3: bf16 rounds to 3 digits and may flip an expert.
MAX_BF16_DIFF = 0.15

# (tokens, chunk): one below, at and above a block, and a whole step's chunk; the chunk cuts blocks and fills them.
LENGTHS = [
    pytest.param(1, 512, id="one-token"),
    pytest.param(BLOCK_SIZE - 1, 512, id="block-1"),
    pytest.param(BLOCK_SIZE, 512, id="block"),
    pytest.param(BLOCK_SIZE + 1, BLOCK_SIZE, id="block+1-in-chunks-of-a-block"),
    pytest.param(150, 49, id="chunks-across-blocks"),
    pytest.param(5 * BLOCK_SIZE, 2 * BLOCK_SIZE, id="chunks-of-two-blocks"),
    pytest.param(20, 1, id="token-by-token"),
]

CheckpointOf = Callable[[str], Checkpoint]


@pytest.fixture(params=[True, False], ids=["absorbed", "expanded"])
def absorbed_prefill(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def chunk_ends(length: int, chunk: int) -> list[int]:
    """The rows of a whole prompt's logits that a chunked run returns."""
    return [min(start + chunk, length) - 1 for start in range(0, length, chunk)]


@pytest.mark.parametrize(("length", "chunk"), LENGTHS)
@pytest.mark.parametrize("family", [*FAMILIES, EMBEDDED])
def test_logits_equal_the_oracles(
    checkpoint_of: CheckpointOf, family: str, absorbed_prefill: bool, length: int, chunk: int
) -> None:
    checkpoint = checkpoint_of(family)
    driver = Driver(checkpoint.transformer(absorbed_prefill=absorbed_prefill))
    prompt = random_prompt(length, seed=length, vocab_size=checkpoint.config.vocab_size)
    logits = driver.run(driver.add(prompt), chunk)
    assert logits.dtype == torch.float32
    expected = oracle_logits(checkpoint.oracle, prompt)[chunk_ends(length, chunk)]
    assert (logits - expected).abs().max() <= MAX_LOGIT_DIFF


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_step_equals_the_oracle(checkpoint_of: CheckpointOf, family: str, absorbed_prefill: bool) -> None:
    """Decodes, a first chunk and a chunk over a cached prefix in one step, none of them filling the row tile."""
    checkpoint = checkpoint_of(family)
    driver = Driver(checkpoint.transformer(absorbed_prefill=absorbed_prefill))
    prompts = [random_prompt(length, seed=length) for length in (65, 130, 40, 90)]
    first, second, third, fourth = (driver.add(prompt) for prompt in prompts)
    driver.step({first: 64, second: 129, fourth: 70})
    logits = driver.step({third: 40, first: 1, fourth: 20, second: 1})
    assert_last_logits(checkpoint, logits, [prompts[2], prompts[0], prompts[3], prompts[1]])


def assert_last_logits(checkpoint: Checkpoint, logits: torch.Tensor, prompts: list[list[int]]) -> None:
    """Row i of logits [len(prompts), vocab] is what the oracle gives after prompt i."""
    for row, prompt in zip(logits, prompts, strict=True):
        assert (row - oracle_logits(checkpoint.oracle, prompt)[-1]).abs().max() <= MAX_LOGIT_DIFF


@pytest.mark.parametrize("num_keys", [0, 300], ids=["latent", "expanded"])
@pytest.mark.parametrize(
    ("family", "backend"),
    [*((family, None) for family in FAMILIES), pytest.param("v2_lite", "triton", marks=pytest.mark.full)],
)
def test_a_padded_step_without_host_lengths_equals_the_oracle(
    checkpoint_of: CheckpointOf, family: str, backend: Backend | None, num_keys: int
) -> None:
    """What a graph is captured from: more rows and sequences than there are, lengths on the device alone."""
    checkpoint = checkpoint_of(family)
    driver = PaddedDriver(checkpoint.transformer(absorbed_prefill=False, backend=backend))
    driver.num_keys = num_keys
    prompts = [random_prompt(length, seed=length) for length in (65, 130, 40)]
    first, second, third = (driver.add(prompt) for prompt in prompts)
    driver.step({first: 64, second: 100})
    logits = driver.step({first: 1, third: 40, second: 30})
    assert_last_logits(checkpoint, logits, [prompts[0], prompts[2], prompts[1]])


class PaddedDriver(Driver):
    num_keys = 0

    def _inputs(self, ordered: list[int], work: dict[int, int]) -> ModelInput:
        inputs = super()._inputs(ordered, work)
        rows, seqs, last = 12, 3, int(inputs.query_starts[-1])
        pad = torch.nn.functional.pad
        return replace(
            inputs,
            token_ids=pad(inputs.token_ids, (0, rows)),
            positions=pad(inputs.positions, (0, rows)),
            slots=pad(inputs.slots, (0, rows), value=-1),
            query_starts=pad(inputs.query_starts, (0, seqs), value=last),
            context_lens=pad(inputs.context_lens, (0, seqs)),
            block_tables=pad(inputs.block_tables, (0, 2, 0, seqs), value=10**6),
            host_query_starts=None,
            host_context_lens=None,
            num_decodes=inputs.num_decodes if self.num_keys else 0,
            num_keys=self.num_keys,
        )


def test_prompts_of_many_keys_are_expanded_in_parts(
    checkpoint_of: CheckpointOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three chunks and a decode, of which two chunks fit a part; the last part has the padding."""
    monkeypatch.setattr(mla, "MAX_KEYS", 140)
    checkpoint = checkpoint_of(next(iter(FAMILIES)))
    driver = Driver(checkpoint.transformer(absorbed_prefill=False))
    prompts = [random_prompt(length, seed=length) for length in (65, 130, 40, 90)]
    first, second, third, fourth = (driver.add(prompt) for prompt in prompts)
    driver.step({first: 64, second: 100, fourth: 70})
    logits = driver.step({third: 40, first: 1, fourth: 20, second: 30})
    assert_last_logits(checkpoint, logits, [prompts[2], prompts[0], prompts[3], prompts[1]])


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        pytest.param("v3", {"tie_word_embeddings": True}, id="tied-embeddings"),
        pytest.param("v3", {"rope_interleave": False}, id="rope-in-halves"),
        pytest.param("v3", {"n_group": 1, "topk_group": 1}, id="one-group"),
        pytest.param("v3", {"norm_topk_prob": False, "first_k_dense_replace": 0}, id="weights-not-normalised"),
        pytest.param("v3", {"q_lora_rank": None}, id="v3-without-q-lora"),
        pytest.param("v3", {"first_k_dense_replace": 3}, id="dense-only"),
        pytest.param("v2_lite", {"attention_bias": True, "rms_norm_eps": 1e-3}, id="bias-without-q-lora"),
        pytest.param(
            "v2",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "attention_factor": 1.3,
                    "beta_fast": 20,
                    "beta_slow": 2,
                    "truncate": False,
                }
            },
            id="yarn-with-attention-factor",
        ),
    ],
)
def test_variants_equal_the_oracle(tmp_path: Path, family: str, overrides: dict[str, object]) -> None:
    folder = save_random_checkpoint(tmp_path, family, **overrides)
    prompt = random_prompt(150, seed=1)
    driver = Driver(load_transformer(folder))
    logits = driver.run(driver.add(prompt), 100)
    assert (logits - oracle_logits(load_oracle(folder), prompt)[[99, 149]]).abs().max() <= MAX_LOGIT_DIFF


@pytest.mark.parametrize(
    ("device", "dtype", "max_diff"),
    [
        pytest.param("cpu", torch.bfloat16, MAX_BF16_DIFF, id="cpu-bf16"),
        pytest.param("cuda", torch.bfloat16, MAX_BF16_DIFF, id="cuda-bf16", marks=pytest.mark.gpu),
        # cuBLAS and the Triton kernels add in another order than the oracle's CPU code.
        pytest.param("cuda", torch.float32, 1e-3, id="cuda-fp32", marks=pytest.mark.gpu),
    ],
)
def test_other_devices_and_dtypes_stay_close(
    checkpoint_of: CheckpointOf, absorbed_prefill: bool, device: str, dtype: torch.dtype, max_diff: float
) -> None:
    """The largest difference of the mean over the vocabulary, at every chunk's end and in one decode."""
    checkpoint = checkpoint_of(EMBEDDED)
    model = load_transformer(checkpoint.folder, absorbed_prefill=absorbed_prefill, dtype=dtype, device=device)
    prompt = random_prompt(200, seed=5, vocab_size=checkpoint.config.vocab_size)
    driver = Driver(model)
    sequence = driver.add(prompt[:199])
    logits = driver.run(sequence, 70)
    driver.append(sequence, prompt[199])
    logits = torch.cat([logits, driver.run(sequence, 1)]).cpu()
    expected = oracle_logits(checkpoint.oracle, prompt)[[69, 139, 198, 199]]
    assert (logits - expected).abs().mean(-1).max() <= max_diff


def generate_greedily(model: Transformer, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Prompts chunked one after another while the earlier ones decode, as an engine would mix them."""
    driver = Driver(model)
    outputs: list[list[int]] = [[] for _ in prompts]
    waiting = {driver.add(prompt): len(prompt) for prompt in prompts}
    running: list[int] = []
    while waiting or running:
        work = dict.fromkeys(running, 1)
        if waiting:
            sequence = next(iter(waiting))
            work[sequence] = min(48, waiting[sequence])
            waiting[sequence] -= work[sequence]
            if not waiting[sequence]:
                del waiting[sequence]
                running.append(sequence)
        logits = driver.step(work)
        for sequence, row in zip(work, logits, strict=True):
            if sequence in running:
                outputs[sequence].append(int(row.argmax()))
                driver.append(sequence, outputs[sequence][-1])
        running = [sequence for sequence in running if len(outputs[sequence]) < num_tokens]
    return outputs


def test_greedy_tokens_equal_the_oracles(checkpoint_of: CheckpointOf) -> None:
    checkpoint = checkpoint_of(EMBEDDED)
    lengths = (1, 17, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 96, 97, 130)
    prompts = [random_prompt(length, seed=length, vocab_size=checkpoint.config.vocab_size) for length in lengths]
    outputs = generate_greedily(checkpoint.transformer(absorbed_prefill=True), prompts, 64)
    for prompt, output in zip(prompts, outputs, strict=True):
        # Greedy by induction: the oracle's best token after every prefix of our output is our next token.
        best = oracle_logits(checkpoint.oracle, prompt + output[:-1])[len(prompt) - 1 :].argmax(-1)
        assert output == best.tolist()

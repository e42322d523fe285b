"""On CPU in fp32 with absorbed prefill a token's logits are bitwise the same for any batching and chunking."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.checkpoints import random_prompt
from tests.model.conftest import EMBEDDED, Checkpoint
from tests.model.driver import BLOCK_SIZE, Driver

FAMILIES = ["v2_lite", "v3", EMBEDDED]
CheckpointOf = Callable[[str], Checkpoint]


def make_driver(checkpoint: Checkpoint, seed: int) -> Driver:
    """The seed decides where in the cache the blocks lie."""
    return Driver(checkpoint.transformer(absorbed_prefill=True), num_blocks=24, seed=seed)


def prompt_of(checkpoint: Checkpoint, length: int) -> list[int]:
    return random_prompt(length, seed=length, vocab_size=checkpoint.config.vocab_size)


@pytest.mark.parametrize(
    ("family", "chunks"),
    [
        ("v2_lite", (1, 7, BLOCK_SIZE, BLOCK_SIZE + 1, 200)),
        ("v3", (1, 7, BLOCK_SIZE, BLOCK_SIZE + 1, 200)),
        (EMBEDDED, (31, BLOCK_SIZE, BLOCK_SIZE + 1, 200)),
    ],
)
def test_chunking_changes_no_bit(checkpoint_of: CheckpointOf, family: str, chunks: tuple[int, ...]) -> None:
    checkpoint = checkpoint_of(family)
    prompt = prompt_of(checkpoint, 3 * BLOCK_SIZE + 9)
    driver = make_driver(checkpoint, 0)
    expected = driver.run(driver.add(prompt), 512)[-1]
    for seed, chunk in enumerate(chunks, start=1):
        driver = make_driver(checkpoint, seed)
        assert torch.equal(driver.run(driver.add(prompt), chunk)[-1], expected), f"chunks of {chunk}"


@pytest.mark.parametrize("family", FAMILIES)
def test_batching_changes_no_bit(checkpoint_of: CheckpointOf, family: str) -> None:
    """Sequences computed together, as decodes and as chunks, give the bits they give alone."""
    checkpoint = checkpoint_of(family)
    lengths = (3, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 100, 131, 5 * BLOCK_SIZE, 30, 31, 32)
    prompts = [prompt_of(checkpoint, length) for length in lengths]
    alone = []
    for index, prompt in enumerate(prompts):
        driver = make_driver(checkpoint, index)
        sequence = driver.add(prompt)
        first = driver.run(sequence, 512)[-1]
        driver.append(sequence, 5)
        alone.append((first, driver.run(sequence, 1)[-1]))

    driver = make_driver(checkpoint, 77)
    sequences = [driver.add(prompt) for prompt in prompts]
    together = driver.step(dict(zip(sequences, lengths, strict=True)))
    for sequence, row in zip(sequences, together, strict=True):
        assert torch.equal(row, alone[sequence][0])
        driver.append(sequence, 5)
    for decodes in (sequences[:8], sequences[8:9], sequences[9:]):
        for sequence, row in zip(decodes, driver.step(dict.fromkeys(decodes, 1)), strict=True):
            assert torch.equal(row, alone[sequence][1])


def test_a_decode_beside_a_chunk_keeps_its_bits(checkpoint_of: CheckpointOf) -> None:
    checkpoint = checkpoint_of(EMBEDDED)
    prompt, other = prompt_of(checkpoint, 140), prompt_of(checkpoint, 333)
    driver = make_driver(checkpoint, 0)
    expected = driver.run(driver.add(prompt), 512)[-1]

    driver = make_driver(checkpoint, 1)
    sequence, neighbour = driver.add(prompt), driver.add(other)
    driver.step({sequence: 139, neighbour: 100})
    assert torch.equal(driver.step({sequence: 1, neighbour: 233})[0], expected)

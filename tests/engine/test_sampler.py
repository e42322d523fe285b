"""The sampler's controls on hand-made logits."""

from __future__ import annotations

import math

import pytest
import torch

from app.engine.sampler import Sampler
from app.engine.sequence import Sequence
from app.protocol import GenerateRequest, SamplingParams

EOS = 1
VOCAB = 20


def sequence(prompt: tuple[int, ...] = (2, 3), outputs: tuple[int, ...] = (), **sampling: object) -> Sequence:
    params = SamplingParams(**{"max_tokens": 10, "temperature": 0.0, **sampling})  # type: ignore[arg-type]
    seq = Sequence(GenerateRequest("r", prompt, params), b"", arrival_s=0.0)
    for token_id in outputs:
        seq.append(token_id)
    return seq


def choose(logits: dict[int, float], seq: Sequence) -> int:
    row = torch.full((1, VOCAB), -5.0)
    for token_id, value in logits.items():
        row[0, token_id] = value
    before = row.clone()
    token = Sampler(frozenset({EOS})).launch(row, [seq]).wait().token_ids[0]
    assert torch.equal(row, before), "the caller's logits are left alone"
    return token


def test_greedy_takes_the_best_and_the_first_of_equals() -> None:
    assert choose({4: 2.0, 9: 3.0}, sequence()) == 9
    assert choose({4: 3.0, 9: 3.0}, sequence()) == 4


@pytest.mark.parametrize(
    ("sampling", "outputs", "expected"),
    [
        ({}, (9,), 9),
        ({"presence_penalty": 0.9}, (9,), 9),
        ({"presence_penalty": 1.1}, (9,), 4),
        ({"presence_penalty": 1.1}, (), 9),
        ({"frequency_penalty": 0.4}, (9, 9), 9),
        ({"frequency_penalty": 0.4}, (9, 9, 9), 4),
        ({"repetition_penalty": 1.4}, (9,), 9),
        ({"repetition_penalty": 1.6}, (9,), 4),
        ({"logit_bias": {4: 1.5}}, (), 4),
        ({"logit_bias": {9: -100.0}}, (), 4),
    ],
    ids=str,
)
def test_penalties_and_biases(sampling: dict[str, object], outputs: tuple[int, ...], expected: int) -> None:
    assert choose({4: 2.0, 9: 3.0}, sequence(outputs=outputs, **sampling)) == expected


def test_repetition_counts_each_new_token_whatever_was_kept() -> None:
    sampler, seq = Sampler(frozenset()), sequence(prompt=(7,), repetition_penalty=2.0)
    row = torch.zeros(1, 16)
    row[0, [3, 5, 7]] = torch.tensor([2.5, 2.0, 3.0])
    for expected in (3, 5, 7):  # 3 has 1.25 then, 5 has 1.0 and 7 its 1.5
        (token,) = sampler.launch(row.clone(), [seq]).wait().token_ids
        assert token == expected
        seq.append(int(token))


def test_repetition_counts_the_prompt_and_pushes_negative_logits_down() -> None:
    assert choose({4: 2.0, 9: 3.0}, sequence(prompt=(9,), repetition_penalty=2.0)) == 4
    row = torch.full((1, VOCAB), -3.0)
    row[0, 7] = -2.0
    assert Sampler(frozenset()).launch(row, [sequence(prompt=(7,), repetition_penalty=2.0)]).wait().token_ids[0] != 7


def test_minimum_length_masks_every_stop_token() -> None:
    waiting = sequence(min_tokens=2, stop_token_ids=(9,))
    assert choose({EOS: 9.0, 9: 8.0, 4: 2.0}, waiting) == 4
    assert choose({EOS: 9.0, 9: 8.0, 4: 2.0}, sequence(outputs=(4, 4), min_tokens=2)) == EOS


def test_each_row_has_its_own_controls() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0], [0.0, 1.0, 2.0]])
    rows = [sequence(), sequence(logit_bias={2: -50.0}), sequence(temperature=1.0, top_k=1)]
    assert Sampler(frozenset()).launch(logits, rows).wait().token_ids == [2, 1, 2]


def test_logprobs_ignore_the_controls_and_each_row_gets_what_it_asked_for() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]])).repeat(3, 1)
    rows = [sequence(logprobs=2, logit_bias={0: -100.0}), sequence(), sequence(logprobs=0)]
    first, none, chosen_only = Sampler(frozenset()).launch(logits, rows).wait().logprobs
    assert none is None
    assert first is not None and chosen_only is not None
    assert first.token_id == 1 and first.logprob == pytest.approx(math.log(0.3), abs=1e-6)
    assert [token_id for token_id, _ in first.top] == [0, 1]
    assert chosen_only.top == () and chosen_only.logprob == pytest.approx(math.log(0.5), abs=1e-6)


def test_a_seeded_row_draws_the_same_token_whatever_its_row() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, VOCAB)
    logits[4] = logits[1]
    rows = [sequence(temperature=1.0, seed=index) for index in range(6)]
    rows[4] = sequence(temperature=1.0, seed=1)
    token_ids = Sampler(frozenset()).launch(logits, rows).wait().token_ids
    assert token_ids[4] == token_ids[1]
    assert Sampler(frozenset()).launch(logits[1:2], [rows[1]]).wait().token_ids == [token_ids[1]]

"""Read this first: a model, an engine and a few steps, without Ray, HTTP or threads."""

from __future__ import annotations

from app.config import EngineConfig, ModelSource
from app.engine.loading import load_engine
from app.protocol import GenerateRequest, SamplingParams
from app.tokenizer import Tokenizer


def test_two_requests_share_the_steps_of_one_engine() -> None:
    source = ModelSource()  # the model that ships with the package
    tokenizer = Tokenizer(source.folder)
    engine = load_engine(source, EngineConfig(device="cpu", num_threads=1, cache_blocks=32))

    greedy = SamplingParams(max_tokens=16, temperature=0.0)
    for name, question in (("hello", "Hello, how are you today?"), ("dog", "Tell me a short story about a dog.")):
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}])
        engine.add(GenerateRequest(name, tuple(prompt), greedy))

    # A step computes the prompts' tokens, then one token per sequence, and says what it produced.
    answers: dict[str, list[int]] = {"hello": [], "dog": []}
    num_steps = 0
    while engine.has_work:
        for chunk in engine.step():
            answers[chunk.request_id] += chunk.token_ids
        num_steps += 1

    assert num_steps <= 16, "both sequences advanced in the same steps"
    assert all(tokenizer.decode(tokens).strip() for tokens in answers.values())

    # Everything that ended gave its blocks back; finished prefixes stay cached for whoever asks next.
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.generation_tokens == sum(len(tokens) for tokens in answers.values())

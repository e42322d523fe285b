"""Holds the model and the cache tensors; turns a batch into logits, together with the other ranks if there are any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import torch

from app.engine.batch import Batch
from app.engine.channel import Channel, Kind
from app.engine.expert_counts import ExpertCounts
from app.engine.graphs import StepGraphs
from app.engine.plan import StepPlan, put_sampled, to_model_input, warm_up_plans
from app.errors import RankLostError
from app.model.transformer import Transformer


class Runner:
    """Every rank has one. Rank 0's tells the others each thing it does, and they do it too."""

    def __init__(self, model: Transformer, cache: torch.Tensor, graphs: StepGraphs | None = None) -> None:
        """cache: [num_layers, num_blocks, block_size, cache_dim]; graphs: on CUDA, for the steps they hold."""
        self._model = model
        self._cache = cache
        self._graphs = graphs
        self._channel = Channel(model.ranks)
        self.expert_counts = ExpertCounts(model.expert_layers, model.expert_counts)
        self.weight_bytes_read = model.weight_bytes_read

    @property
    def device(self) -> torch.device:
        return self._cache.device

    @property
    def num_blocks(self) -> int:
        return self._cache.shape[1]

    @property
    def can_run_ahead(self) -> bool:
        """Whether `forward` returns before the device is done, so that launching the next step early gains time."""
        return self._graphs is not None

    @property
    def can_mix_ahead(self) -> bool:
        """Whether such a step may hold prompts as well: expert ranks lay those out among the decodes."""
        return self.can_run_ahead and self._model.ranks.expert.size == 1

    @property
    def beat_period_s(self) -> float | None:
        """How often `keep_alive` wants to be called while there are no steps; None: never."""
        return self._channel.beat_period_s

    def keep_alive(self) -> None:
        """Raises RankLostError if another rank gives no sign of life."""
        self._channel.keep_alive()

    def warm_up(self) -> None:
        """On CUDA, run every kind of step once: its kernels are compiled, and the largest fits or fails now."""
        if self._graphs is not None:
            self._channel.send(Kind.WARM_UP)
            self._warm_up(self._graphs)

    def capture_next(self) -> bool:
        """Use an idle moment for one more graph; False if there is nothing left to prepare."""
        if self._graphs is None or not self._graphs.can_capture_more:
            return False
        self._channel.send(Kind.CAPTURE)
        with self._in_step():
            self._graphs.capture_next()
        return True

    @torch.inference_mode()
    def forward(self, batch: Batch, previous_token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the batch's new tokens into the cache; returns fp32 logits [num_sequences, vocab].

        previous_token_ids: [rows sampled in the step before] int64 on the device, for a batch with previous_rows
        Raises RankLostError if there are other ranks and the step fails here
        """
        plan = StepPlan.of(batch)
        self._channel.send(Kind.STEP, plan.pack() if self.beat_period_s else None)
        with self._in_step():
            self.expert_counts.refresh()
            return self._run(plan, previous_token_ids)

    def stop(self) -> None:
        """Let the other ranks end. Nothing else may follow."""
        with suppress(RankLostError):
            self._channel.send(Kind.STOP)
        self._model.ranks.leave(self._cache.device)

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """A rank that fails between collectives must end: the others would take its next step's for this one's."""
        try:
            yield
        except Exception as error:
            if self._model.ranks.host.size == 1 or isinstance(error, RankLostError):
                raise
            raise RankLostError(f"rank 0 failed within a step: {type(error).__name__}: {error}") from error

    @torch.inference_mode()
    def follow(self) -> None:
        """Do what rank 0 does until it stops."""
        while True:
            kind, words = self._channel.receive()
            if kind == Kind.STEP:
                self._run(StepPlan.unpack(words), None)
            elif kind == Kind.BEAT:
                self._channel.answer_beat()
            elif kind == Kind.STOP:
                break
            elif self._graphs is not None and kind == Kind.WARM_UP:
                self._warm_up(self._graphs)
            elif self._graphs is not None:
                self._graphs.capture_next()
        self._model.ranks.leave(self._cache.device)

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Run a small step without the other ranks, so that kernels are compiled before anybody waits for anybody."""
        plan = StepPlan(
            num_new_tokens=np.array([1, 5], dtype=np.int32),
            context_lens=np.array([3, 9], dtype=np.int32),
            token_ids=np.zeros(6, dtype=np.int32),
            block_tables=np.zeros((2, 1), dtype=np.int32),
        )
        self._cache[:, 0] = 0  # what this step reads and writes
        with self._model.ranks.rehearsing():
            self._eager(plan, None)
        self.expert_counts.reset()

    def _warm_up(self, graphs: StepGraphs) -> None:
        graphs.capture_largest()
        block_size, num_parts = self._cache.shape[2], self._model.ranks.expert.size
        for plan in warm_up_plans(graphs.max_step_tokens, graphs.max_model_len, block_size, num_parts=num_parts):
            self._eager(plan, None)

    def _run(self, plan: StepPlan, previous_token_ids: torch.Tensor | None) -> torch.Tensor:
        logits = self._graphs.forward(plan, previous_token_ids) if self._graphs else None
        return self._eager(plan, previous_token_ids) if logits is None else logits

    def _eager(self, plan: StepPlan, previous_token_ids: torch.Tensor | None) -> torch.Tensor:
        ranks = self._model.ranks
        inputs = to_model_input(
            plan, self._cache.shape[2], self._cache.device, part=ranks.expert.rank, num_parts=ranks.expert.size
        )
        if plan.num_pending:
            token_ids = inputs.token_ids if inputs.shared is None else inputs.shared.token_ids
            put_sampled(token_ids[: plan.num_pending], previous_token_ids, ranks.world)
        return self._model.forward(inputs, self._cache)

"""Decode steps as CUDA graphs: one per padded batch size, captured the first time that size is needed.

A replay reads the same device buffers every time; a step fills them with two copies from pinned memory:

    words64 | token_ids: B | positions: B | slots: B |
    words32 | context_lens: B | block_tables: B x max_blocks |

Padding rows have slot -1 and context 0: they write nothing, attend to nothing and meet no expert.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import torch

from app.engine.batch import Batch
from app.engine.plan import StepPlan
from app.model.inputs import ModelInput
from app.model.transformer import Transformer

SMALL_SIZES = (1, 2, 4, 8, 16, 24, 32)
LARGE_STEP = 32
EMPTY_PLAN = StepPlan.of(Batch((), (), ()))


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: ModelInput  # a replay reads its tensors
    logits: torch.Tensor  # [B, vocab]


class DecodeGraphs:
    def __init__(self, model: Transformer, cache: torch.Tensor, *, max_num_seqs: int, max_model_len: int) -> None:
        """cache: [num_layers, num_blocks, block_size, cache_dim] on a CUDA device."""
        self._model, self._cache = model, cache
        self._block_size = cache.shape[2]
        self._max_blocks = -(-max_model_len // self._block_size)
        self._sizes = batch_sizes(max_num_seqs)
        largest = self._sizes[-1]
        self._host64 = torch.empty(3 * largest, dtype=torch.int64, pin_memory=True)
        self._host32 = torch.empty(largest * (1 + self._max_blocks), dtype=torch.int32, pin_memory=True)
        self._device64 = torch.empty_like(self._host64, device=cache.device)
        self._device32 = torch.empty_like(self._host32, device=cache.device)
        self._copied = torch.cuda.Event()
        self._graphs: dict[int, _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def capture_all(self) -> None:
        """Capture every size, the largest first, so that the smaller ones share its memory."""
        for size in reversed(self._sizes):
            self._fill(EMPTY_PLAN, size)
            self._capture(size)

    def forward(self, plan: StepPlan, previous_token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """One token for each sequence -> logits [num_sequences, vocab] fp32, overwritten by the next call.

        previous_token_ids: what the step before sampled, if the plan's tokens are not on the host yet
        """
        count = len(plan.num_new_tokens)
        size = self._sizes[bisect_left(self._sizes, count)]
        self._fill(plan, size)
        if previous_token_ids is not None:
            token_ids = self._device64[:count]
            token_ids.copy_(previous_token_ids.index_select(0, token_ids))
        if size not in self._graphs:
            self._capture(size)
        entry = self._graphs[size]
        entry.graph.replay()
        return entry.logits[:count]

    def _fill(self, plan: StepPlan, size: int) -> None:
        self._copied.synchronize()  # the previous step's copies have left the pinned buffers
        words64, words32 = self._host64.numpy(), self._host32.numpy()
        token_ids, positions, slots = words64[: 3 * size].reshape(3, size)
        context_lens, tables = words32[:size], words32[size : size * (1 + self._max_blocks)].reshape(size, -1)
        count, width = plan.block_tables.shape
        token_ids[:count] = plan.token_ids
        positions[:count] = plan.context_lens - 1
        tables[:count, :width] = plan.block_tables
        blocks = tables[np.arange(count), positions[:count] // self._block_size]
        slots[:count] = blocks.astype(np.int64) * self._block_size + positions[:count] % self._block_size
        context_lens[:count] = plan.context_lens
        token_ids[count:], positions[count:], slots[count:], context_lens[count:] = 0, 0, -1, 0
        used32 = size * (1 + self._max_blocks)
        self._device64[: 3 * size].copy_(self._host64[: 3 * size], non_blocking=True)
        self._device32[:used32].copy_(self._host32[:used32], non_blocking=True)
        self._copied.record()

    def _inputs(self, size: int) -> ModelInput:
        token_ids, positions, slots = self._device64[: 3 * size].view(3, size)
        starts = torch.arange(size + 1, dtype=torch.int32, device=self._cache.device)
        return ModelInput(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            query_starts=starts,
            context_lens=self._device32[:size],
            block_tables=self._device32[size : size * (1 + self._max_blocks)].view(size, self._max_blocks),
            logit_rows=starts[:-1].long(),
            num_decodes=size,
            host_query_starts=tuple(range(size + 1)),
            host_context_lens=(0,) * size,  # not known at capture; the decode kernels read them on the device
        )

    @torch.inference_mode()
    def _capture(self, size: int) -> None:
        inputs = self._inputs(size)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # kernels compile and libraries set up outside the capture
            self._model.forward(inputs, self._cache)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._model.forward(inputs, self._cache)
        self._graphs[size] = _Graph(graph, inputs, logits)


def batch_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Padded batch sizes up to the limit: fine steps where padding costs most, coarse ones above."""
    sizes = [size for size in (*SMALL_SIZES, *range(64, max_num_seqs + LARGE_STEP, LARGE_STEP)) if size < max_num_seqs]
    return (*sizes, max_num_seqs)

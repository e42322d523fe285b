"""Steps as CUDA graphs: decodes over padded batch sizes, and steps with prompts of up to 1,024 tokens in all.

The engine's thread captures them: the largest of both kinds at the start, the others while there is nothing to do,
those first that steps would have used. Until its graph is there, a step takes the next larger one or runs eagerly.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from app.engine.plan import StepPlan, put_sampled
from app.engine.step_buffers import StepBuffers, StepShape, context_products, first_holding
from app.model.inputs import ModelInput
from app.model.transformer import Transformer

logger = logging.getLogger(__name__)
SMALL_SIZES = (1, 2, 4, 8, 16, 24, 32)
LARGE_STEP = 32
LATENT_ROWS = (64, 128, 256)
EXPANDED_ROWS = (512, 1024)  # of prompts, besides the decodes
MAX_DECODES_BESIDE_PROMPTS = 128
# Latent attention reads the context once for every new token. Past so many products that takes longer than launching
# a step of expanded keys and values kernel by kernel.
MAX_CONTEXT_PRODUCTS = 2**20
MAX_MISSES = 32  # steps in a larger graph or without one; then the graph is captured under load
EMPTY_PLAN = StepPlan(
    num_new_tokens=np.empty(0, dtype=np.int32),
    context_lens=np.empty(0, dtype=np.int32),
    token_ids=np.empty(0, dtype=np.int32),
    block_tables=np.empty((0, 0), dtype=np.int32),
)


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: ModelInput  # a replay reads its tensors
    logits: torch.Tensor  # [S, vocab]


class StepGraphs:
    def __init__(
        self, model: Transformer, cache: torch.Tensor, *, max_num_seqs: int, max_model_len: int, max_batched_tokens: int
    ) -> None:
        """cache: [num_layers, num_blocks, block_size, cache_dim] on a CUDA device."""
        self._model, self._cache = model, cache
        self.max_step_tokens, self.max_model_len = min(max_batched_tokens, max_model_len), max_model_len
        self._decodes = tuple(StepShape.of_decodes(size) for size in batch_sizes(max_num_seqs))
        self._prompts = prompt_shapes(max_num_seqs, max_batched_tokens)
        shapes = self._decodes + self._prompts
        self._buffers = StepBuffers(
            max(shape.num_rows for shape in shapes),
            max(shape.num_seqs for shape in shapes),
            max_blocks=-(-max_model_len // cache.shape[2]),
            block_size=cache.shape[2],
            device=cache.device,
            part=model.ranks.expert.rank,
            num_parts=model.ranks.expert.size,
        )
        self._graphs: dict[StepShape, _Graph] = {}
        self._misses: Counter[StepShape] = Counter()
        self._can_capture = True
        self._pool = torch.cuda.graph_pool_handle()

    def forward(self, plan: StepPlan, previous_token_ids: torch.Tensor | None = None) -> torch.Tensor | None:
        """Logits [num_sequences, vocab] fp32, overwritten by the next call; None: no graph serves this step.

        previous_token_ids: what the step before sampled, if some of the plan's tokens are not on the host yet
        """
        shape = self._choose(plan)
        if shape is None:
            return None
        self._buffers.fill(plan, shape)
        if plan.num_pending:
            token_ids = self._buffers.token_ids(plan.num_pending)
            put_sampled(token_ids, previous_token_ids, self._model.ranks.world)
        entry = self._graphs[shape]
        entry.graph.replay()
        return entry.logits[: len(plan.num_new_tokens)]

    def capture_largest(self) -> None:
        """The ones that every step of their kind fits into: they also take the most memory, which others share."""
        for shapes in (self._prompts, self._decodes):
            if shapes and shapes[-1] not in self._graphs:
                self._capture(shapes[-1])

    def capture_next(self) -> bool:
        """Capture one more graph, the most missed one first; False if none is left to be captured."""
        if not self.can_capture_more:
            return False
        missing = [shape for shape in self._decodes + self._prompts if shape not in self._graphs]
        self._capture(max(missing, key=lambda shape: self._misses[shape]))
        return True

    @property
    def can_capture_more(self) -> bool:
        return self._can_capture and len(self._graphs) < len(self._decodes + self._prompts)

    def _choose(self, plan: StepPlan) -> StepShape | None:
        is_decode = len(plan.token_ids) == len(plan.num_new_tokens)
        shapes = self._decodes if is_decode else self._prompts
        if context_products(plan) > MAX_CONTEXT_PRODUCTS:
            shapes = tuple(shape for shape in shapes if shape.num_keys)
        best = first_holding(shapes, plan)
        if best is None:
            return None
        if best not in self._graphs:
            self._misses[best] += 1
            if self._misses[best] >= MAX_MISSES and self._can_capture:
                self._capture(best)
        return first_holding(tuple(shape for shape in shapes if shape in self._graphs), plan)

    @torch.inference_mode()
    def _capture(self, shape: StepShape) -> None:
        self._buffers.fill(EMPTY_PLAN, shape)
        inputs, graph = self._buffers.inputs(shape), None
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # kernels compile and libraries set up outside the capture
                self._model.forward(inputs, self._cache)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Watchdogs of process groups call the driver from threads of their own.
            mode = "global" if self._model.ranks.host.size == 1 else "thread_local"
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode=mode):
                logits = self._model.forward(inputs, self._cache)
            self._graphs[shape] = _Graph(graph, inputs, logits)
        except torch.cuda.OutOfMemoryError:
            if graph is None and self._model.ranks.host.size > 1:
                raise  # within a step that the others go on with
            logger.warning("no memory left for another CUDA graph; steps of %s run without", shape)
            self._can_capture = False
        # All ranks have a graph, or none: they replay them together.
        if not self._model.ranks.host.smallest(self._can_capture):
            self._can_capture = False
            self._graphs.pop(shape, None)


def batch_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Padded batch sizes up to the limit: fine steps where padding costs most, coarse ones above."""
    sizes = [size for size in (*SMALL_SIZES, *range(64, max_num_seqs + LARGE_STEP, LARGE_STEP)) if size < max_num_seqs]
    return (*sizes, max_num_seqs)


def prompt_shapes(max_num_seqs: int, max_batched_tokens: int) -> tuple[StepShape, ...]:
    """Padded sizes of steps with prompts, in the order in which they are tried."""
    decodes = min(max_num_seqs, MAX_DECODES_BESIDE_PROMPTS)
    shapes = [StepShape(rows, min(max_num_seqs, MAX_DECODES_BESIDE_PROMPTS, rows // 2)) for rows in LATENT_ROWS]
    shapes += [
        StepShape(decodes + rows, decodes + min(max_num_seqs, rows // 64), decodes, num_keys=2 * rows)
        for rows in EXPANDED_ROWS
    ]
    # None larger than the largest step needs.
    needed = next((index for index, shape in enumerate(shapes) if shape.num_rows >= max_batched_tokens), len(shapes))
    return tuple(shapes[: needed + 1])

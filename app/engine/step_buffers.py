"""The device buffers that a graphed step is laid out in: a replay reads the same addresses every time.

A step fills them with two copies from pinned memory, N rows and S sequences of the graph's size, W blocks at most:

    words64 | token_ids: N | positions: N | slots: N | logit_rows: S |
    words32 | context_lens: S | query_starts: S + 1 | block_tables: S x W |

Rows and sequences of decodes have a part of their own at the front, if their number does not change the launches:

    rows | d0 d1 pad pad | p0 p0 p0 p1 p1 pad |      num_decodes: 4; logits still come in the order d0 d1 p0 p1

Padding rows have slot -1 and padding sequences no rows and no context: they write nothing, attend to nothing and meet
no expert. Where expert ranks split the rows, words64 hold those of all ranks and words32 what this rank's are part of.
Each rank then has its share of both parts:

    rows | d0 d1 | p0 p0 p0 | pad pad | p1 p1 pad |  the same step, cut into two
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from app.engine.plan import StepPlan, Words
from app.model.inputs import ModelInput, SharedRows


@dataclass(frozen=True, slots=True)
class StepShape:
    """The padded size of a step, and how its prompts attend.

    num_keys > 0: to the expanded keys and values of their contexts, that many at most. Else every row of the step
    attends in latent space, which reads the context once per row and takes any length of it.
    """

    num_rows: int
    num_seqs: int
    num_decodes: int = 0  # rows, and sequences, at the front that decodes alone may have
    num_keys: int = 0

    @classmethod
    def of_decodes(cls, size: int) -> StepShape:
        return cls(size, size, size)

    def holds(self, plan: StepPlan) -> bool:
        num_decodes = plan.num_decodes if self.num_decodes else 0
        return (
            num_decodes <= self.num_decodes
            and len(plan.token_ids) - num_decodes <= self.num_rows - self.num_decodes
            and len(plan.num_new_tokens) - num_decodes <= self.num_seqs - self.num_decodes
            and (not self.num_keys or int(plan.context_lens[num_decodes:].sum()) <= self.num_keys)
        )


class StepBuffers:
    def __init__(
        self,
        max_rows: int,
        max_seqs: int,
        *,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        part: int = 0,
        num_parts: int = 1,
    ) -> None:
        """part: of `num_parts` equal ones that a step's rows are cut into, the one to compute."""
        self._part, self._num_parts = part, num_parts
        max_rows = num_parts * (-(-max_rows // num_parts) + 1)  # decodes and prompts are rounded up each
        self._no_slots = torch.full((max_rows,), -1, dtype=torch.int64, device=device)
        self._max_blocks, self._block_size, self._device = max_blocks, block_size, device
        is_cuda = device.type == "cuda"
        self._host64 = torch.zeros(3 * max_rows + max_seqs, dtype=torch.int64, pin_memory=is_cuda)
        self._host32 = torch.zeros(max_seqs * (2 + max_blocks) + 1, dtype=torch.int32, pin_memory=is_cuda)
        self._device64 = torch.zeros_like(self._host64, device=device)
        self._device32 = torch.zeros_like(self._host32, device=device)
        self._copied = torch.cuda.Event() if is_cuda else None

    def fill(self, plan: StepPlan, shape: StepShape) -> None:
        """Lay `plan` out, which `shape` holds, and start its copy to the device."""
        if self._copied is not None:
            self._copied.synchronize()  # the previous step's copies have left the pinned buffers
        token_ids, positions, slots, logit_rows = self._parts64(self._host64, shape)
        context_lens, query_starts, tables = self._parts32(self._host32, shape)
        starts, all_positions, all_slots = plan.rows(self._block_size)
        front, rest = self._own_sizes(shape)
        num_decodes = plan.num_decodes if shape.num_decodes else 0
        places = self._places(len(plan.token_ids), num_decodes, front, rest)
        for target, values, padding in (
            (token_ids, plan.token_ids, 0), (positions, all_positions, 0), (slots, all_slots, -1)
        ):  # fmt: skip
            words = target.numpy()
            words[:], words[places] = padding, values
        last_rows = places[starts[1:] - 1] - self._part * (front + rest)
        words = logit_rows.numpy()
        words[:], words[: len(last_rows)] = 0 if self._num_parts == 1 else -1, last_rows
        words[(words < 0) | (words >= front + rest)] = -1
        first, counts, lens, own_tables = self._own_sequences(plan, num_decodes, front, rest)
        end = front + len(counts) - first
        words = context_lens.numpy()
        words[:], words[:first], words[front:end] = 0, lens[:first], lens[first:]
        words, width = tables.numpy(), own_tables.shape[1]
        words[:first, :width], words[front:end, :width] = own_tables[:first], own_tables[first:]
        words = query_starts.numpy()
        words[: front + 1] = np.arange(front + 1)
        np.cumsum(counts[first:], out=words[front + 1 : end + 1])
        words[front + 1 : end + 1] += front
        words[end + 1 :] = words[end]
        used64 = sum(len(part) for part in (token_ids, positions, slots, logit_rows))
        used32 = len(context_lens) + len(query_starts) + tables.numel()
        self._device64[:used64].copy_(self._host64[:used64], non_blocking=True)
        self._device32[:used32].copy_(self._host32[:used32], non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def inputs(self, shape: StepShape) -> ModelInput:
        """Views of the device's buffers, whatever is in them when they are read."""
        token_ids, positions, slots, logit_rows = self._parts64(self._device64, shape)
        context_lens, query_starts, tables = self._parts32(self._device32, shape)
        shared = None
        if self._num_parts > 1:
            shared, size = SharedRows(token_ids, positions, slots), sum(self._own_sizes(shape))
            own = slice(self._part * size, (self._part + 1) * size)
            token_ids, positions, slots = token_ids[own], positions[own], self._no_slots[own]
        return ModelInput(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=tables,
            logit_rows=logit_rows,
            num_decodes=self._own_sizes(shape)[0],
            num_keys=shape.num_keys,
            host_query_starts=None,
            host_context_lens=None,
            shared=shared,
        )

    def token_ids(self, count: int) -> torch.Tensor:
        """The first ones on the device."""
        return self._device64[:count]

    def _own_sizes(self, shape: StepShape) -> tuple[int, int]:
        """This part's rows at the front, for decodes alone, and the others."""
        return -(-shape.num_decodes // self._num_parts), -(-(shape.num_rows - shape.num_decodes) // self._num_parts)

    def _own_sequences(
        self, plan: StepPlan, num_decodes: int, front: int, rest: int
    ) -> tuple[int, Words, Words, Words]:
        """Of the sequences that this part's rows are part of: how many come to the front, new tokens, context lengths
        and block tables."""
        if self._num_parts == 1:
            return num_decodes, plan.num_new_tokens, plan.context_lens, plan.block_tables
        first, end = (min((self._part + step) * front, num_decodes) for step in (0, 1))
        decodes = plan.cut(first, end)
        prompts = plan.cut(num_decodes + self._part * rest, num_decodes + (self._part + 1) * rest)
        return (
            end - first,
            np.concatenate([decodes.num_new_tokens, prompts.num_new_tokens]),
            np.concatenate([decodes.context_lens, prompts.context_lens]),
            np.concatenate([decodes.block_tables, prompts.block_tables]),
        )

    def _places(self, num_rows: int, num_decodes: int, front: int, rest: int) -> npt.NDArray[np.int64]:
        """Where the plan's rows lie among those of all parts, which have `front` + `rest` each: [num_rows]."""
        places = np.arange(num_rows)
        places[num_decodes:] += front - num_decodes
        if self._num_parts > 1:
            decodes, others = places[:num_decodes], places[num_decodes:] - front
            places[:num_decodes] += decodes // max(front, 1) * rest
            places[num_decodes:] += others // max(rest, 1) * front
        return places

    def _parts64(self, words: torch.Tensor, shape: StepShape) -> tuple[torch.Tensor, ...]:
        rows = self._num_parts * sum(self._own_sizes(shape))
        parts = words[: 3 * rows + shape.num_seqs].split([rows, rows, rows, shape.num_seqs])
        return parts[0], parts[1], parts[2], parts[3]

    def _parts32(self, words: torch.Tensor, shape: StepShape) -> tuple[torch.Tensor, ...]:
        front, rest = self._own_sizes(shape)
        count = front + min(shape.num_seqs - shape.num_decodes, rest)
        parts = words[: count * (2 + self._max_blocks) + 1].split([count, count + 1, count * self._max_blocks])
        return parts[0], parts[1], parts[2].view(count, self._max_blocks)


def first_holding(shapes: tuple[StepShape, ...], plan: StepPlan) -> StepShape | None:
    """The first of ascending shapes that holds the plan."""
    return next((shape for shape in shapes if shape.holds(plan)), None)


def context_products(plan: StepPlan) -> int:
    """Pairs of a prompt's new token and a token of its context: what latent attention does per head."""
    is_prompt = plan.num_new_tokens > 1
    return int(np.dot(plan.num_new_tokens[is_prompt].astype(np.int64), plan.context_lens[is_prompt]))

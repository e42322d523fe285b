"""Routed experts that lie on several ranks: tokens travel to them and their results back, by all-to-all.

Each rank has its slice of the step's rows, `own`. A row goes once to a rank, however many of its experts lie there:

    own rows --+--> shared experts ------------------------------------+--> sum
               +--> all-to-all --> this rank's experts --> all-to-all --+

While rows are on their way the shared experts run. Two forms give the same sums. Where sizes must not depend on what
the router says, in CUDA graphs and wherever the host must not wait, every row goes to every rank, which then is an
all-gather of the same bytes as padded buffers would be. Otherwise only the rows that are needed travel.
"""

from __future__ import annotations

import math
from functools import reduce

import torch

from app.model.inputs import SharedRows
from app.model.moe import MoeWeights, Router
from app.model.parallel import Group
from kernels.checks import Backend
from kernels.expert_placement import place_experts

# Rows of one rank; beyond, sending only what is needed is worth the host's wait for the sizes, unless nearly all is.
MAX_PADDED_ROWS = {"cpu": 0, "cuda": 1024}
MAX_NEEDED_SHARE = 0.9


class SpreadExperts:
    """counts: [num_experts] int64: how often each expert was chosen so far, by the rows of all ranks."""

    def __init__(self, weights: MoeWeights, backend: Backend | None, group: Group) -> None:
        if weights.placement is None:
            raise ValueError("weights: no placement of the experts")
        device = weights.router.device
        self._router, self._experts, self._shared = Router(weights, backend), weights.experts, weights.shared
        self._group, self._backend = group, backend
        self._owners = weights.placement.owners().to(device)
        self._slots = weights.placement.slots(group.rank).to(device)
        self._max_padded_rows = float(MAX_PADDED_ROWS[device.type])
        needed_share = 1.0 - (1.0 - 1.0 / group.size) ** weights.config.top_k  # of the rows, by one rank
        if device.type == "cuda" and needed_share > MAX_NEEDED_SHARE:
            self._max_padded_rows = math.inf
        self.counts = torch.zeros(weights.config.num_experts, dtype=torch.int64, device=device)

    def forward(self, x: torch.Tensor, rows: SharedRows) -> torch.Tensor:
        """x [n, D], this rank's rows -> [n, D]; `rows` are those of all ranks, padding has slot -1.

        The result is fp64 if the experts' are, see Experts.
        """
        shared, total = self._padded(x, rows) if x.shape[0] <= self._max_padded_rows else self._packed(x, rows)
        total = total if shared is None else total.add_(shared)
        return total if total.dtype == torch.float64 else total.to(x.dtype)

    def _padded(self, x: torch.Tensor, rows: SharedRows) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The shared experts' result and the sum of the routed ones'; every rank routes all rows, in the same bits."""
        gathered = self._group.start_all_gather(x)
        shared = self._shared.forward(x) if self._shared else None
        all_x = gathered.wait()
        ids, weights = self._router.choose(all_x, rows.slots)
        places = place_experts(ids, rows.slots, self._slots, self.counts, backend=self._backend)
        parts = self._group.start_all_to_all(self._experts.forward(all_x, places, weights), None, None).wait()
        first, *others = parts.view(self._group.size, *x.shape)
        return shared, reduce(torch.add, others, first.to(_sum_dtype(parts)))

    def _packed(self, x: torch.Tensor, rows: SharedRows) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Likewise; the ranks tell each other what they route where, then send no row in vain."""
        num_rows, (size, rank) = x.shape[0], (self._group.size, self._group.rank)
        ids, weights = self._router.choose(x, rows.slots[rank * num_rows :][:num_rows])
        choices = self._group.all_gather(torch.cat([ids, weights.view(torch.int32)], dim=1))
        ids, weights = (part.contiguous() for part in choices.chunk(2, dim=1))
        places = place_experts(ids, rows.slots, self._slots, self.counts, backend=self._backend)
        lines = torch.arange(len(ids), device=x.device)[:, None] % len(self._owners)
        owners = self._owners[lines, ids.clamp_min(0).long()].masked_fill(ids < 0, -1).view(size, num_rows, -1)
        goes = (owners[..., None] == torch.arange(size, device=x.device)).any(2)  # [from, row, to]
        sizes = goes.sum(1).tolist()  # [from][to]; the host waits for the device here and nowhere else
        sent, received = sizes[rank], [line[rank] for line in sizes]
        leaving = torch.nonzero_static(goes[rank].T, size=sum(sent))[:, 1]
        here = torch.nonzero_static(goes[:, :, rank].flatten(), size=sum(received))[:, 0]
        travelling = self._group.start_all_to_all(x.index_select(0, leaving), sent, received)
        shared = self._shared.forward(x) if self._shared else None
        arrived = travelling.wait()
        weights = weights.view(torch.float32).index_select(0, here)
        results = self._experts.forward(arrived, places.index_select(0, here), weights)
        back = self._group.start_all_to_all(results, received, sent).wait()
        total = torch.zeros(x.shape, dtype=_sum_dtype(back), device=x.device)
        for part, at in zip(
            back.split(sent), leaving.split(sent), strict=True
        ):  # one rank after the other: no row twice
            total[at] += part
        return shared, total


def _sum_dtype(parts: torch.Tensor) -> torch.dtype:
    return torch.promote_types(parts.dtype, torch.float32)

"""The ranks that share one model: who they are and the few collectives they use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank among tensor x expert. Rank e * tensor + t is number t of tensor group e; rank 0 runs the engine."""

    rank: int
    tensor: int  # ranks of a tensor group: they split heads, MLPs and vocabulary
    expert: int  # tensor groups: they split a step's tokens and the routed experts
    init_method: str  # tcp://host:port, a free port of rank 0's host
    timeout_s: float = 30.0  # a collective that takes longer counts as a dead rank

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.expert

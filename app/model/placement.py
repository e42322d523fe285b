"""Which rank holds which routed experts, layer by layer; a busy expert may lie on several ranks.

A placement is computed from measured loads and kept as JSON:

    {"num_experts": 8, "num_ranks": 2, "layers": {"1": [[0, 1, 2, 3, 6], [4, 5, 6, 7, 1]], ...}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from app.errors import ConfigError

Experts = tuple[tuple[int, ...], ...]  # of each rank, in the order of its slots
FIELD = "parallel.expert_placement"


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """The experts of one layer. Row n of a step uses the copy n mod (number of copies) of each expert it chose."""

    num_experts: int
    experts: Experts

    @classmethod
    def even(cls, num_experts: int, num_ranks: int) -> LayerPlacement:
        """Neighbours together, none twice."""
        ends = [num_experts * rank // num_ranks for rank in range(num_ranks + 1)]
        return cls(num_experts, tuple(tuple(range(ends[rank], ends[rank + 1])) for rank in range(num_ranks)))

    @classmethod
    def balanced(cls, loads: Sequence[float], num_ranks: int, num_copies: int) -> LayerPlacement:
        """Give `num_copies` more slots to the busiest experts and even out the ranks' loads.

        loads: tokens per expert. Every rank gets equally many slots, up to one.
        """
        copies = [1] * len(loads)
        for _ in range(num_copies):
            open_ = [expert for expert in range(len(loads)) if copies[expert] < num_ranks]
            if not open_:
                break
            copies[max(open_, key=lambda expert: loads[expert] / copies[expert])] += 1
        num_slots = -(-sum(copies) // num_ranks)
        shares = sorted(
            (expert for expert, count in enumerate(copies) for _ in range(count)),
            key=lambda expert: (-loads[expert] / copies[expert], expert),
        )
        held: list[list[int]] = [[] for _ in range(num_ranks)]
        totals = [0.0] * num_ranks
        for expert in shares:
            ranks = [rank for rank in range(num_ranks) if len(held[rank]) < num_slots and expert not in held[rank]]
            if ranks:  # else it lies wherever there is room already
                rank = min(ranks, key=lambda rank: (totals[rank], len(held[rank]), rank))
                held[rank].append(expert)
                totals[rank] += loads[expert] / copies[expert]
        return cls(len(loads), tuple(tuple(sorted(experts)) for experts in held))

    @property
    def num_ranks(self) -> int:
        return len(self.experts)

    def ranks_of(self, expert: int) -> list[int]:
        return [rank for rank, experts in enumerate(self.experts) if expert in experts]

    def owners(self) -> torch.Tensor:
        """[period, num_experts] int32: the rank that serves an expert to row n is in line n mod period."""
        ranks = [self.ranks_of(expert) for expert in range(self.num_experts)]
        period = math.lcm(*(len(copies) for copies in ranks))
        lines = [[copies[line % len(copies)] for copies in ranks] for line in range(period)]
        return torch.tensor(lines, dtype=torch.int32)

    def slots(self, rank: int) -> torch.Tensor:
        """[period, num_experts] int32: the slot where `rank` serves an expert to row n, -1 if another rank does."""
        owners = self.owners()
        slots = torch.full((self.num_experts,), -1, dtype=torch.int32)
        slots[list(self.experts[rank])] = torch.arange(len(self.experts[rank]), dtype=torch.int32)
        return torch.where(owners == rank, slots, -1)

    def imbalance(self, loads: Sequence[float]) -> float:
        """The busiest rank's load over the mean, 1 at best."""
        totals = [0.0] * self.num_ranks
        for expert, load in enumerate(loads):
            for rank in (ranks := self.ranks_of(expert)):
                totals[rank] += load / len(ranks)
        return max(totals) * self.num_ranks / sum(totals) if sum(totals) else 1.0


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """The placement of every layer; layers that are not named are spread evenly."""

    num_experts: int
    num_ranks: int
    layers: Mapping[int, LayerPlacement]

    @classmethod
    def even(cls, num_experts: int, num_ranks: int) -> ExpertPlacement:
        return cls(num_experts, num_ranks, {})

    @classmethod
    def balanced(
        cls, loads: Mapping[int, Sequence[float]], num_experts: int, num_ranks: int, num_copies: int
    ) -> ExpertPlacement:
        """loads: tokens per expert, by layer; num_copies: further slots per layer."""
        layers = {layer: LayerPlacement.balanced(each, num_ranks, num_copies) for layer, each in loads.items()}
        return cls(num_experts, num_ranks, layers)

    @classmethod
    def read(cls, path: Path, num_experts: int, num_ranks: int) -> ExpertPlacement:
        """Raises ConfigError unless the file places every expert of such a model on such ranks."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            layers = {
                int(layer): LayerPlacement(num_experts, tuple(tuple(map(int, experts)) for experts in ranks))
                for layer, ranks in values["layers"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{FIELD}: {path}: {type(error).__name__}: {error}", field=FIELD) from None
        for layer, placement in layers.items():
            held = {expert for experts in placement.experts for expert in experts}
            is_whole = held == set(range(num_experts)) and placement.num_ranks == num_ranks
            if not is_whole or any(len(set(experts)) < len(experts) for experts in placement.experts):
                problem = f"layer {layer} does not place experts 0 to {num_experts - 1} on {num_ranks} ranks"
                raise ConfigError(f"{FIELD}: {path}: {problem}", field=FIELD)
        return cls(num_experts, num_ranks, layers)

    def write(self, path: Path) -> None:
        layers = {str(layer): placement.experts for layer, placement in self.layers.items()}
        values = {"num_experts": self.num_experts, "num_ranks": self.num_ranks, "layers": layers}
        path.write_text(json.dumps(values), encoding="utf-8")

    def layer(self, index: int) -> LayerPlacement:
        return self.layers.get(index) or LayerPlacement.even(self.num_experts, self.num_ranks)

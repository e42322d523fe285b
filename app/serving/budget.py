"""How pools share a budget of replicas. Pure; knows nothing of what the pools' wishes come from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """What one pool has and asks for, in replicas."""

    target: int  # in force now
    num_running: int
    num_draining: int  # besides these: they stop, but not before what they run has ended
    min_replicas: int
    cost: float  # of one replica
    wanted: int
    need: int  # at least 1; how much the load asks for, whatever the pool may ask for at this moment
    spare_to: int  # what the pool can make do with if another one is short
    is_settled: bool  # has not had to give a replica lately


class Shares:
    """Hands out the budget. A replica above its pool's target holds its share until it is gone.

    granted: replicas by pool; their cost is within the budget unless the minimums alone exceed it
    notes:   by pool, why it got less or more than it wanted
    """

    def __init__(self, claims: Mapping[str, Claim], budget: float) -> None:
        self._claims, self._budget = claims, budget
        self.granted = {name: min(claim.wanted, claim.target) for name, claim in claims.items()}
        self.notes: dict[str, list[str]] = {name: [] for name in claims}
        self._promised = dict.fromkeys(claims, 0)
        self._gave: set[str] = set()  # these do not take in the same round

    def settle(self) -> None:
        self._cut_to_budget()
        stuck: set[str] = set()
        while takers := [name for name in self.granted if name not in stuck | self._gave and self._lacks(name) > 0]:
            taker = min(takers, key=lambda name: (self._satisfaction(name, 0), name))
            cost = self._claims[taker].cost
            keeps = self.granted[taker] < self._claims[taker].num_running  # one that holds its share anyway
            free = self._budget - self._cost({name: self._held(name) for name in self.granted})
            coming = self._cost({name: self._held(name) - self.granted[name] for name in self.granted})
            left = free + coming - self._cost(self._promised)
            if cost <= left and (keeps or cost <= free):
                self.granted[taker] += 1
            elif cost <= left:
                self._promised[taker] += 1
            elif not self._reclaim(taker, cost - left):
                stuck.add(taker)
        for name, count in self._promised.items():
            if count:
                self.notes[name].append(f"{count} more once another pool's replicas have stopped")
        for name in stuck:
            self.notes[name].append(f"the budget of {self._budget:g} has no room for {self._lacks(name)} more")

    def _cut_to_budget(self) -> None:
        while self._cost(self.granted) > self._budget:
            above = [name for name, count in self.granted.items() if count > self._claims[name].min_replicas]
            if not above:
                return
            name = max(above, key=lambda name: (self._satisfaction(name, -1), name))
            self.granted[name] -= 1
            self.notes[name].append(f"over the budget of {self._budget:g}")

    def _reclaim(self, taker: str, missing: float) -> bool:
        """Lower one other pool's target by enough to cover `missing`, if that is fair."""
        for donor in sorted(set(self.granted) - {taker}, key=lambda name: -self._satisfaction(name, -1)):
            count = math.ceil(missing / self._claims[donor].cost)
            reason = self._why_give(donor, count, taker)
            if reason is not None:
                self.granted[donor] -= count
                self._gave.add(donor)
                self.notes[donor].append(f"gives {count} to {taker}: {reason}")
                return True
        return False

    def _why_give(self, donor: str, count: int, taker: str) -> str | None:
        rest = self.granted[donor] - count
        if rest < self._claims[donor].min_replicas:
            return None
        if rest >= self._claims[donor].spare_to:
            return "does not need them"
        if rest >= 1 and self.granted[taker] + self._promised[taker] == 0:
            return "the other pool has none"
        # After the move the donor is still no worse off than the taker, so the move back is never due at once.
        is_settled = self._claims[taker].is_settled
        if rest >= 1 and is_settled and self._satisfaction(donor, -count) >= self._satisfaction(taker, 1):
            return "the other pool lacks more of what it needs"
        return None

    def _satisfaction(self, name: str, change: int) -> float:
        return (self.granted[name] + self._promised[name] + change) / self._claims[name].need

    def _lacks(self, name: str) -> int:
        return self._claims[name].wanted - self.granted[name] - self._promised[name]

    def _held(self, name: str) -> int:
        return max(self.granted[name], self._claims[name].num_running) + self._claims[name].num_draining

    def _cost(self, counts: Mapping[str, int]) -> float:
        return sum(count * self._claims[name].cost for name, count in counts.items())

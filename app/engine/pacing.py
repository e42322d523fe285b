"""How much of prompts a step may compute while others wait for it: as much as fits the time a step should take."""

from __future__ import annotations

import math

from app.engine.prompt_cost import PromptCost

MIN_ALLOWANCE = 64.0
MAX_GROWTH = 1.5  # after a step that was short enough with most of the allowance used


class PrefillPacer:
    """Learns from the steps that ran what a step of `max_step_s` can compute, in units of PromptCost."""

    def __init__(self, max_tokens: int, max_step_s: float) -> None:
        self._max_step_s = max_step_s
        self.allowance = float(max_tokens)  # all sequences together

    def record(self, cost: float, step_s: float) -> None:
        """Account for a step that computed prompt tokens of such a cost in `step_s` seconds, decodes included."""
        if cost == 0:
            return
        fitting = cost * self._max_step_s / max(step_s, 1e-9)
        # A step that was not held to the allowance still tells how much would have fitted.
        if fitting < self.allowance and (step_s > self._max_step_s or cost > self.allowance):
            self.allowance = max(min(self.allowance, MIN_ALLOWANCE), fitting)
        elif 2 * cost > self.allowance:
            self.allowance = max(self.allowance, min(MAX_GROWTH * self.allowance, fitting))


class StepBudget:
    """What a step may still compute of prompts: so many tokens, and as much as costs no more than `cost`."""

    def __init__(self, prompt_cost: PromptCost, tokens: int, cost: float = math.inf) -> None:
        self._prompt_cost, self.tokens, self.cost = prompt_cost, tokens, cost
        self._is_untouched = True

    @property
    def is_spent(self) -> bool:
        return self.tokens <= 0 or (self.cost <= 0 and not self._is_untouched)

    def fits(self, start: int, count: int) -> bool:
        """Whether the step can compute all of these tokens, the first of which attends to `start` earlier ones."""
        return count <= self.tokens and self._prompt_cost.of(start, count) <= self.cost

    def take(self, start: int, before: int, wanted: int, share: float = 1.0) -> int:
        """Up to `wanted` more tokens of a prompt that has `before` of them in this step already; returns how many.

        A chunk too small to be worth its fixed cost is taken only if the step would else compute no prompt at all.
        """
        prompt_cost = self._prompt_cost
        spent = prompt_cost.of(start, before)
        fitting = prompt_cost.fitting(start, spent + share * self.cost) - before
        limit = min(self.tokens, math.ceil(share * self.tokens))
        count = min(wanted, limit, int(min(fitting, limit) + 1e-6))
        least = min(wanted, limit, 1 if before else prompt_cost.min_tokens)
        if count < least:
            count = least if self._is_untouched else 0
        if count > 0:
            self._is_untouched = False
            self.tokens -= count
            self.cost = max(0.0, self.cost - (prompt_cost.of(start, before + count) - spent))
        return max(0, count)

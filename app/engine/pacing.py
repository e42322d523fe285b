"""How many prompt tokens a step may compute while others wait for it: as many as fit the time a step should take."""

from __future__ import annotations

MIN_TOKENS = 64
GROWTH = 1.25  # after a step that was short enough with most of the allowance used


class PrefillPacer:
    """Learns from the steps that ran; attention over a longer context makes the same tokens slower."""

    def __init__(self, max_tokens: int, max_step_s: float) -> None:
        self._max_tokens, self._max_step_s = max_tokens, max_step_s
        self.allowance = max_tokens  # prompt tokens, all sequences together

    def record(self, num_prefill_tokens: int, step_s: float) -> None:
        """Account for a step that computed so many prompt tokens in `step_s` seconds, decodes included."""
        if num_prefill_tokens == 0:
            return
        if step_s > self._max_step_s:
            fitting = int(num_prefill_tokens * self._max_step_s / step_s)
            self.allowance = min(self.allowance, max(MIN_TOKENS, fitting), self._max_tokens)
        elif 2 * num_prefill_tokens > self.allowance:
            self.allowance = min(self._max_tokens, int(GROWTH * self.allowance))

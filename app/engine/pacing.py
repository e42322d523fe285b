"""How many prompt tokens a step may compute while others wait for it: as many as fit the time a step should take."""

from __future__ import annotations

MIN_TOKENS = 64
# Of a step's tokens: a step over a long context takes a while however few there are, so that fewer would only make
# more such steps, in the end of no tokens at all.
MIN_SHARE = 1 / 16
MAX_GROWTH = 1.5  # after a step that was short enough with most of the allowance used


class PrefillPacer:
    """Learns from the steps that ran; attention over a longer context makes the same tokens slower."""

    def __init__(self, max_tokens: int, max_step_s: float) -> None:
        self._max_tokens, self._max_step_s = max_tokens, max_step_s
        self._min_tokens = min(max_tokens, max(MIN_TOKENS, int(MIN_SHARE * max_tokens)))
        self.allowance = max_tokens  # prompt tokens, all sequences together

    def record(self, num_prefill_tokens: int, step_s: float) -> None:
        """Account for a step that computed so many prompt tokens in `step_s` seconds, decodes included."""
        if num_prefill_tokens == 0:
            return
        if num_prefill_tokens > self.allowance:  # a step that was not held to it still tells how long it would take
            step_s *= self.allowance / num_prefill_tokens
            num_prefill_tokens = self.allowance
        if step_s > self._max_step_s:
            fitting = int(num_prefill_tokens * self._max_step_s / step_s)
            self.allowance = min(self.allowance, max(self._min_tokens, fitting))
        elif 2 * num_prefill_tokens > self.allowance:
            growth = min(MAX_GROWTH, self._max_step_s / max(step_s, 1e-9))
            self.allowance = min(self._max_tokens, int(growth * self.allowance) + 1)

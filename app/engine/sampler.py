"""Logits to token ids: penalties, biases and masks on the rows that asked for them, then kernels.sampling."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from app.engine.sequence import Sequence
from app.errors import RankLostError
from app.protocol import TokenLogprob
from kernels.checks import Backend
from kernels.sampling import sample

POLL_S = 2e-5


@dataclass(frozen=True, slots=True)
class Sampled:
    """One entry per sampled row, in the order of the sequences given."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]


@dataclass(frozen=True, slots=True)
class PendingSample:
    """Tokens that a device may still be choosing. `wait` gives them to the host, once they are there."""

    token_ids: torch.Tensor  # [num_sequences] int64, on the device
    host_token_ids: torch.Tensor
    copied: torch.cuda.Event | None
    logprobs: list[TokenLogprob | None]
    timeout_s: float = math.inf

    def wait(self) -> Sampled:
        """Raises RankLostError if it takes longer than the timeout: the device waits for another rank then."""
        if self.copied is not None:
            _wait_for(self.copied, self.timeout_s)
        return Sampled(self.host_token_ids.tolist(), self.logprobs)

    def seconds_after(self, previous: PendingSample) -> float | None:
        """From the end of `previous` to the end of this one, by the device's clock; None without one. Both have ended.

        The host may notice late that a step has ended: it launches the next one meanwhile.
        """
        if self.copied is None or previous.copied is None:
            return None
        milliseconds: float = previous.copied.elapsed_time(self.copied)
        return milliseconds / 1e3


def _wait_for(event: torch.cuda.Event, timeout_s: float) -> None:
    if math.isinf(timeout_s):
        event.synchronize()
        return
    deadline_s = time.monotonic() + timeout_s
    while not event.query():
        if time.monotonic() > deadline_s:
            raise RankLostError(f"a step is not done after {timeout_s:g} s: another rank is gone or stuck")
        time.sleep(POLL_S)


class Sampler:
    def __init__(
        self, eos_token_ids: frozenset[int], backend: Backend | None = None, *, timeout_s: float = math.inf
    ) -> None:
        """timeout_s: what a step may take on a device"""
        self._eos_token_ids = eos_token_ids
        self._backend = backend
        self._timeout_s = timeout_s

    def warm_up(self, device: torch.device, vocab_size: int) -> None:
        """Draw a token, so that the first request that wants one drawn does not wait for the compiler."""
        ones = torch.ones(1, device=device)
        zeros = torch.zeros(1, dtype=torch.int64, device=device)
        logits = torch.zeros(1, vocab_size, device=device)
        sample(logits, ones, zeros.int(), ones, ones, zeros, zeros, backend=self._backend)

    def launch(self, logits: torch.Tensor, sequences: Seq[Sequence], *, num_pending: int = 0) -> PendingSample:
        """Choose one token per sequence from its row of `logits` [num_sequences, vocab] fp32 (left unchanged).

        num_pending: of the first sequences, of which the host does not know the last token yet; only those that
        `needs_host` says False of can be sampled then.
        """
        token_ids = self._choose(logits, sequences, num_pending)
        logprobs = self._logprobs(logits, token_ids, sequences)
        if not token_ids.is_cuda:
            return PendingSample(token_ids, token_ids, None, logprobs)
        host = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
        host.copy_(token_ids, non_blocking=True)
        copied = torch.cuda.Event(enable_timing=True)
        copied.record()
        return PendingSample(token_ids, host, copied, logprobs, self._timeout_s)

    def _choose(self, logits: torch.Tensor, sequences: Seq[Sequence], num_pending: int) -> torch.Tensor:
        adjusted = self._adjust(logits, sequences)
        sampling = [seq.sampling for seq in sequences]
        if all(params.is_greedy for params in sampling):
            return _argmax(adjusted)
        floats = torch.tensor(
            [[params.temperature, params.top_p, params.min_p] for params in sampling], dtype=torch.float32
        ).to(logits.device, non_blocking=True)
        vocab_size = logits.shape[-1]
        rows = [
            [min(seq.sampling.top_k or 0, vocab_size), seq.seed, seq.num_tokens + (row < num_pending)]
            for row, seq in enumerate(sequences)
        ]
        integers = torch.tensor(rows, dtype=torch.int64).to(logits.device, non_blocking=True)
        temperatures, top_ps, min_ps = floats.T.contiguous()
        top_ks, seeds, positions = integers.T.contiguous()
        return sample(adjusted, temperatures, top_ks.int(), top_ps, min_ps, seeds, positions, backend=self._backend)

    def _adjust(self, logits: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor:
        """A copy of `logits` with each row's penalties, bias and minimum length applied; itself if none has any."""
        rows = [row for row, seq in enumerate(sequences) if _needs_adjusting(seq)]
        if not rows:
            return logits
        adjusted = logits.clone()
        for row in rows:
            self._adjust_row(adjusted[row], sequences[row])
        return adjusted

    def _adjust_row(self, row: torch.Tensor, seq: Sequence) -> None:
        params = seq.sampling
        if params.repetition_penalty != 1.0:
            penalized = torch.where(row > 0, row / params.repetition_penalty, row * params.repetition_penalty)
            row.copy_(torch.where(_seen(seq, row), penalized, row))
        if (params.presence_penalty or params.frequency_penalty) and seq.output_counts:
            ids = torch.tensor(list(seq.output_counts), device=row.device)
            counts = torch.tensor(list(seq.output_counts.values()), dtype=row.dtype, device=row.device)
            row[ids] -= params.presence_penalty + params.frequency_penalty * counts
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=row.device)
            row[ids] += torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=row.device)
        if seq.num_output_tokens < params.min_tokens:
            row[sorted({*self._eos_token_ids, *params.stop_token_ids})] = float("-inf")

    def _logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, sequences: Seq[Sequence]
    ) -> list[TokenLogprob | None]:
        rows = [row for row, seq in enumerate(sequences) if seq.sampling.logprobs is not None]
        result: list[TokenLogprob | None] = [None] * len(sequences)
        if not rows:
            return result
        chosen = token_ids.tolist()
        logprobs = logits[rows].log_softmax(dim=-1)
        count = max(1, *(sequences[row].sampling.logprobs or 0 for row in rows))
        top_values, top_ids = (tensor.tolist() for tensor in logprobs.topk(min(count, logits.shape[-1])))
        picked = logprobs[range(len(rows)), [chosen[row] for row in rows]].tolist()
        for index, row in enumerate(rows):
            wanted = sequences[row].sampling.logprobs or 0
            top = tuple(zip(top_ids[index][:wanted], top_values[index][:wanted], strict=True))
            result[row] = TokenLogprob(chosen[row], picked[index], top)
        return result


def needs_host(seq: Sequence) -> bool:
    """Whether the host must see each token of this sequence before the next one can be sampled."""
    return seq.sampling.logprobs is not None or _needs_adjusting(seq)


def _seen(seq: Sequence, row: torch.Tensor) -> torch.Tensor:
    """[V] bool: the token ids in the sequence. Kept with it: a context of 100k tokens takes 30 ms to go through."""
    if seq.seen is None:
        seq.seen = torch.zeros(row.shape, dtype=torch.bool, device=row.device)
    seq.seen[torch.tensor(seq.token_ids[seq.num_seen :], dtype=torch.int64, device=row.device)] = True
    seq.num_seen = seq.num_tokens
    return seq.seen


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """[N, V] -> [N]. On a CPU by NumPy: torch divides so little among its threads, and waits for them to wake."""
    if logits.is_cuda:
        return logits.argmax(dim=-1)
    return torch.from_numpy(logits.numpy().argmax(axis=-1))


def _needs_adjusting(seq: Sequence) -> bool:
    params = seq.sampling
    return bool(
        params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
        or seq.num_output_tokens < params.min_tokens
    )

"""Which version, pool and replica a request goes to. No I/O, no clock, no chance of its own: callers pass them in."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from app.config import RouterSettings
from app.errors import UnavailableError

PoolName = Literal["short", "long"]
POOLS: tuple[PoolName, ...] = ("short", "long")

ESTIMATE_WINDOW = 50  # requests over which a bucket's expected output is averaged
STALE_AFTER_S = 3.0  # older figures only serve to compare two replicas drawn by chance
QUEUED_TOKENS_PER_SEQ = 2048  # so many waiting prompt tokens weigh as much as one sequence
FULL_CACHE = 0.95  # a replica whose KV cache is this full takes no request while another one has room
AFFINITY_SLACK = 1.25  # a replica that holds the prefix may carry this multiple of the mean load,
AFFINITY_EXTRA_SEQS = 2.0  # and this much more
SHORTEST_PREFIX_TOKENS = 64


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What the engines of a pool accept."""

    max_model_len: int  # prompt + output tokens of one sequence
    vocab_size: int
    version: str  # digest of weights and config
    max_num_seqs: int | None = None  # in one replica's batch
    tokenizer: str | None = None  # its digest


def predicted_cost_tokens(num_prompt_tokens: int, max_tokens: int | None, expected_output_tokens: int) -> int:
    """Prompt plus the output to expect, which max_tokens caps."""
    return num_prompt_tokens + (
        expected_output_tokens if max_tokens is None else min(max_tokens, expected_output_tokens)
    )


@dataclass(frozen=True, slots=True)
class OutputEstimate:
    """How many tokens the requests of one bucket generate, as a running mean."""

    mean_tokens: float

    def observe(self, num_output_tokens: int) -> OutputEstimate:
        return OutputEstimate(self.mean_tokens + (num_output_tokens - self.mean_tokens) / ESTIMATE_WINDOW)


class OutputEstimates:
    """The estimate of each bucket."""

    def __init__(self, mean_tokens: float) -> None:
        self._estimates = dict.fromkeys(POOLS, OutputEstimate(mean_tokens))

    def expected_tokens(self, bucket: PoolName) -> float:
        return self._estimates[bucket].mean_tokens

    def observe(self, bucket: PoolName, num_output_tokens: int, *, was_cut: bool) -> None:
        """Learn from a sequence that ended. One cut by max_tokens says only that it would have been longer still."""
        if not was_cut or num_output_tokens > self._estimates[bucket].mean_tokens:
            self._estimates[bucket] = self._estimates[bucket].observe(num_output_tokens)


def bucket_of(num_prompt_tokens: int, settings: RouterSettings) -> PoolName:
    """The bucket whose output estimate applies: by the prompt alone, since the output is what is to be estimated."""
    return "short" if num_prompt_tokens <= settings.short_max_cost_tokens else "long"


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """How busy a pool is, from fresh reports of all its replicas."""

    num_replicas: int = 0
    running_seqs: int = 0
    waiting_seqs: int = 0  # beyond the replicas' batches
    prefill_tokens_per_s: float | None = None  # of one replica
    waiting_prefill_tokens: int = 0  # of prompts that have no token yet
    admitted_seqs_per_s: float = 0.0  # by all replicas

    @property
    def is_idle(self) -> bool:
        return self.num_replicas > 0 and self.running_seqs + self.waiting_seqs == 0

    @property
    def is_queueing(self) -> bool:
        return self.num_replicas == 0 or self.waiting_seqs > 0


def choose_pool(
    num_prompt_tokens: int,
    max_tokens: int | None,
    limits: Mapping[PoolName, PoolLimits],
    settings: RouterSettings,
    *,
    expected_output_tokens: float | None = None,
    loads: Mapping[PoolName, PoolLoad] | None = None,
) -> PoolName:
    """The short pool for a request that is predicted short and fits it for certain, else the long pool.

    With `loads`, a request may spill out of a pool that queues: a short one only into an idle long pool; a long one
    only into a short pool that it fits for certain, where nobody waits, and whose engine it would occupy no longer
    than the settings' `spill_bound_s`. Without max_tokens the answer ends where the chosen pool's context does. Whether
    the request fits the long pool is not judged here. Raises UnavailableError if the pool has not come up yet.
    """
    expected = settings.expected_output_tokens if expected_output_tokens is None else round(expected_output_tokens)
    cost = predicted_cost_tokens(num_prompt_tokens, max_tokens, expected)
    fits_short = "short" not in limits or num_prompt_tokens + (max_tokens or 1) <= limits["short"].max_model_len
    pool: PoolName = "short" if cost <= settings.short_max_cost_tokens and fits_short else "long"
    if pool not in limits:
        raise UnavailableError(f"the {pool} pool is still starting", retry_after_s=2.0)
    if loads is None or not loads.get(pool, PoolLoad()).is_queueing:
        return pool
    if pool == "short":
        return "long" if "long" in limits and loads.get("long", PoolLoad()).is_idle else "short"
    short = loads.get("short", PoolLoad())
    is_bounded = num_prompt_tokens <= settings.spill_bound_s * (short.prefill_tokens_per_s or 0.0)
    can_end = max_tokens is not None and "short" in limits and fits_short
    return "short" if can_end and is_bounded and not short.is_queueing else "long"


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """One replica as its router knows it: the last report, and what the router sent since."""

    replica_id: str
    num_seqs: int = 0  # running and waiting
    waiting_prefill_tokens: int = 0
    kv_usage: float = 0.0
    age_s: float = 0.0  # of the report
    sent_seqs: int = 0  # by this router, not in the figures above
    sent_tokens: int = 0

    @property
    def load(self) -> float:
        """In sequences."""
        queued_tokens = self.waiting_prefill_tokens + self.sent_tokens
        return self.num_seqs + self.sent_seqs + queued_tokens / QUEUED_TOKENS_PER_SEQ


def choose_replica(
    replicas: Sequence[ReplicaLoad], chance: float, preferred: Collection[str] = (), *, other_chance: float = 0.5
) -> str:
    """The id of the replica to send to; `chance` and `other_chance` are uniform in [0, 1).

    One of `preferred` (it holds the prompt's prefix) unless it is far busier than the mean. Else the least loaded; by
    chance among those less than one sequence apart, so that routers with equal figures do not all pick the same. With
    stale figures: the less loaded of two drawn by chance. Raises UnavailableError if there is none.
    """
    if not replicas:
        raise UnavailableError("the pool has no replica at the moment", retry_after_s=2.0)
    roomy = [one for one in replicas if one.kv_usage < FULL_CACHE] or list(replicas)
    limit = AFFINITY_SLACK * sum(one.load for one in replicas) / len(replicas) + AFFINITY_EXTRA_SEQS
    holders = [one for one in roomy if one.replica_id in preferred and one.load <= limit]
    if holders:
        return min(holders, key=lambda one: (one.load, one.replica_id)).replica_id
    if any(one.age_s > STALE_AFTER_S for one in roomy):
        first = roomy.pop(int(chance * len(roomy)))
        second = roomy[int(other_chance * len(roomy))] if roomy else first
        return min(first, second, key=lambda one: one.load).replica_id
    least = min(one.load for one in roomy)
    equals = [one for one in roomy if one.load < least + 1.0]
    return equals[int(chance * len(equals))].replica_id


class PrefixKey(NamedTuple):
    num_tokens: int
    digest: bytes


def prefix_keys(token_ids: Sequence[int], cache_salt: str = "") -> list[PrefixKey]:
    """Keys of the prompt's prefixes of 64, 128, 192, ... tokens, shortest first, each at most a quarter longer.

    A later turn of a conversation begins with the earlier one, so it shares all of that one's keys.
    """
    digest = hashlib.blake2b(cache_salt.encode(), digest_size=16)
    keys, start, end = [], 0, SHORTEST_PREFIX_TOKENS
    while end <= len(token_ids):
        digest.update(array("q", token_ids[start:end]).tobytes())
        keys.append(PrefixKey(end, digest.digest()))
        start, end = end, end + max(SHORTEST_PREFIX_TOKENS, end // 4)
    return keys


class PrefixMatch(NamedTuple):
    num_tokens: int
    holders: tuple[str, ...]


class PrefixDirectory:
    """Which replicas a prefix was sent to, for the `max_keys` prefixes used last."""

    def __init__(self, max_keys: int = 100_000, max_holders: int = 4) -> None:
        self._max_keys, self._max_holders = max_keys, max_holders
        self._holders: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def find(self, keys: Sequence[PrefixKey]) -> PrefixMatch:
        """The longest known prefix and its holders; of no tokens if none is known."""
        for num_tokens, key in reversed(keys):
            if key in self._holders:
                return PrefixMatch(num_tokens, self._holders[key])
        return PrefixMatch(0, ())

    def record(self, keys: Sequence[PrefixKey], replica_id: str) -> None:
        for _, key in keys:
            others = [held for held in self._holders.pop(key, ()) if held != replica_id]
            self._holders[key] = (replica_id, *others[: self._max_holders - 1])
        while len(self._holders) > self._max_keys:
            self._holders.popitem(last=False)


def choose_version(apps: Sequence[str], weights: Mapping[str, float], chance: float) -> str:
    """One of `apps` by weight; `chance` is uniform in [0, 1). No weights at all: all equal; one not listed: 0.

    Raises UnavailableError if every weight is 0.
    """
    shares = [weights.get(app, 0.0) if weights else 1.0 for app in apps]
    target = chance * sum(shares)
    for app, share in zip(apps, shares, strict=True):
        target -= share
        if target < 0.0:
            return app
    raise UnavailableError("no version of this model takes traffic")

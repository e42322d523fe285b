"""A replica killed under load: what becomes of the requests that were on it, and of those that were not."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]

from app.bench.client import Client, PromptMaker, RequestRecord
from app.bench.traffic import PlannedRequest
from app.errors import UnavailableError

STREAMS, WHOLE = 24, 8  # more than the batches hold, so that some wait
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 300
START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 150.0


@dataclass(frozen=True, slots=True)
class KillRun:
    """`begun` had a token before the kill, or before its error. Ends: `done`, or the kind of error."""

    begun: dict[str, int]
    not_begun: dict[str, int]
    whole: dict[str, int]  # answers that are not streamed
    num_hung: int
    error_event_s: float | None  # from the kill to the last error event
    wall_s: float  # from the kill to the last end

    @property
    def is_passed(self) -> bool:
        is_clear = set(self.begun) <= {"done", "stream_error:unavailable"}
        return not self.num_hung and is_clear and set(self.not_begun) | set(self.whole) <= {"done"}


async def kill_under_load(
    url: str,
    victim: Callable[[], psutil.Process],
    seed: int,
    *,
    num_streams: int = STREAMS,
    num_whole: int = WHOLE,
    output_tokens: int = OUTPUT_TOKENS,
    num_begun: int | None = None,
) -> KillRun:
    """Kill once so many streams have begun (None: a quarter). Raises UnavailableError if that takes too long."""
    planned = PlannedRequest(0.0, PROMPT_TOKENS, output_tokens)
    streamed, whole = ([RequestRecord(planned) for _ in range(count)] for count in (num_streams, num_whole))
    async with Client(url, timeout_s=END_TIMEOUT_S) as client:
        start_s = time.perf_counter()
        tasks = []
        for records, stream in ((streamed, True), (whole, False)):
            prompts = PromptMaker(None, stream=stream, seed=seed + stream)
            tasks += [asyncio.create_task(client.send(prompts.body(planned), record, start_s)) for record in records]
        await _until_streaming(streamed, num_streams // 4 if num_begun is None else num_begun, start_s)
        begun = [bool(record.event_times_s) for record in streamed]
        victim().kill()
        killed_s = time.perf_counter() - start_s
        await asyncio.gather(*tasks, return_exceptions=True)
    # First tokens that were on their way to this client at the kill had been streamed.
    begun = [was or bool(record.error and record.event_times_s) for record, was in zip(streamed, begun, strict=True)]
    errors = [record.ended_s for record in streamed if (record.error or "").startswith("stream_error")]
    return KillRun(
        begun=_ends(record for record, was in zip(streamed, begun, strict=True) if was),
        not_begun=_ends(record for record, was in zip(streamed, begun, strict=True) if not was),
        whole=_ends(whole),
        num_hung=sum(record.error == "timeout" for record in (*streamed, *whole)),
        error_event_s=max(errors) - killed_s if errors else None,
        wall_s=max(record.ended_s for record in (*streamed, *whole)) - killed_s,
    )


async def _until_streaming(records: Sequence[RequestRecord], num_begun: int, start_s: float) -> None:
    """Raises UnavailableError."""
    while sum(bool(record.event_times_s) for record in records) < num_begun:
        if time.perf_counter() - start_s > START_TIMEOUT_S:
            raise UnavailableError(f"streams did not start: {_ends(records)}")
        await asyncio.sleep(0.02)


def _ends(records: Iterable[RequestRecord]) -> dict[str, int]:
    return dict(Counter(record.error or "done" for record in records))

"""When a fault of a rank counts as passed."""

from __future__ import annotations

from dataclasses import replace

from app.bench.shard_faults import GPU_SLACK_BYTES, FaultRun

GIBIBYTE = 2**30


def test_a_fault_is_passed_only_if_everything_is_gone() -> None:
    run = FaultRun(
        fault="kill", answering_s=9.0, clean_s=9.5, limit_s=20.0,
        streams={"stream_error:unavailable": 3}, whole={"done": 2}, late={"done": 2},
        gpu_bytes_before=[30 * GIBIBYTE], gpu_bytes_after=[30 * GIBIBYTE],
    )  # fmt: skip
    assert run.is_passed
    for change in ({"clean_s": None}, {"answering_s": 20.5}, {"streams": {"truncated": 3}}, {"late": {"http_503": 1}}):
        assert not replace(run, **change).is_passed  # type: ignore[arg-type]
    assert GPU_SLACK_BYTES < 10 * GIBIBYTE  # a rank's cache in serve_configs/two-gpus-sharded.yaml, weights apart

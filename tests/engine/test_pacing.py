from __future__ import annotations

from app.engine.pacing import MIN_TOKENS, PrefillPacer


def test_it_finds_what_fits_and_stays_there() -> None:
    pacer = PrefillPacer(max_tokens=8192, max_step_s=0.1)
    for _ in range(30):
        pacer.record(pacer.allowance, 0.01 + pacer.allowance / 20_000)
    assert 0.08 < 0.01 + pacer.allowance / 20_000 < 0.13


def test_small_steps_and_decodes_teach_nothing() -> None:
    pacer = PrefillPacer(max_tokens=8192, max_step_s=0.1)
    pacer.record(2, 0.09)
    pacer.record(0, 5.0)
    assert pacer.allowance == 8192


def test_it_recovers_after_a_hiccup_and_never_stops_prompts() -> None:
    pacer = PrefillPacer(max_tokens=4096, max_step_s=0.1)
    pacer.record(4096, 60.0)
    assert pacer.allowance == 4096 // 16
    for _ in range(40):
        pacer.record(pacer.allowance, 0.05)
    assert pacer.allowance == 4096


def test_steps_that_take_long_however_few_tokens_they_have_do_not_shrink_to_nothing() -> None:
    pacer = PrefillPacer(max_tokens=8192, max_step_s=0.06)
    for _ in range(50):
        pacer.record(pacer.allowance, 0.07 + pacer.allowance / 100_000)
    assert pacer.allowance == 8192 // 16
    small = PrefillPacer(max_tokens=512, max_step_s=0.06)
    small.record(512, 10.0)
    assert small.allowance == MIN_TOKENS


def test_limits_below_the_least_are_kept() -> None:
    pacer = PrefillPacer(max_tokens=16, max_step_s=0.1)
    pacer.record(16, 1.0)
    assert pacer.allowance == 16


def test_a_step_longer_than_allowed_tells_how_long_an_allowed_one_takes() -> None:
    pacer = PrefillPacer(max_tokens=8192, max_step_s=0.1)
    pacer.record(8192, 0.8)
    assert pacer.allowance == 1024
    pacer.record(8192, 0.8)
    assert pacer.allowance in range(1000, 1060)

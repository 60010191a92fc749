"""The simulator's parts: curves, profiles, the reference's formula, the command."""

from __future__ import annotations

import itertools
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from sglang_ssd.bench.__main__ import main
from sglang_ssd.bench.results import Results
from sglang_ssd.bench.simulator.comparison import Measured, compare, validation
from sglang_ssd.bench.simulator.profile import ProfileError, load_profile, profile_names
from sglang_ssd.bench.simulator.reference import checks, reference_round, sync_speed
from sglang_ssd.bench.simulator.simulation import Load, simulate
from sglang_ssd.bench.simulator.target import in_turn
from tests.unit.test_bench_run import DECISIONS, HEADER, a_run

H100 = [name for name in profile_names() if name.startswith("h100")]


def test_curves_go_through_their_points_and_straight_between_and_beyond():
    times = load_profile("h100-llama-70b-1b").times
    assert times.verify(1, 8) == pytest.approx(0.0150)
    assert times.verify(16, 8) == pytest.approx(0.0202)
    assert times.verify(12, 8) == pytest.approx(0.0189)
    assert times.step(24) == pytest.approx(0.00214)
    assert times.step(744) == pytest.approx(0.00578)
    assert times.verify(48, 8) == pytest.approx(0.0306)


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_of_the_package_is_whole(name):
    profile = load_profile(name)
    assert profile.name == name
    assert profile.source
    for batch in (1, 3, 32):
        assert 0 < profile.times.verify(batch, 1) <= profile.times.verify(batch, profile.num_steps + 1)
    assert len(profile.trace(0.0)) > 500


@pytest.mark.parametrize(
    ("text", "said"),
    [(b"{}", "name"), (b"[", "expected|Expected"), (b'{"name": "x", "speed": 3}', "speed|source")],
)
def test_a_file_that_is_no_profile_is_refused_with_a_reason(tmp_path, text, said):
    (tmp_path / "mine.json").write_bytes(text)
    with pytest.raises(ProfileError, match=said):
        load_profile(str(tmp_path / "mine.json"))
    with pytest.raises(ProfileError, match="demo-two-cores"):
        load_profile("no-such-profile")


@pytest.mark.parametrize("name", H100)
def test_the_references_published_figures_follow_from_its_step_times(name):
    found = checks(load_profile(name))
    assert sum(not check.published.used for check in found) >= 3
    for check in found:
        assert check.holds, f"batch {check.published.batch}, K={check.published.num_steps}: {check.error:+.1%}"


def test_the_inputs_of_the_h100_profile_are_the_published_rounds():
    profile = load_profile("h100-llama-70b-1b")
    assert reference_round(profile, 1, 7) == pytest.approx(0.0190, abs=2e-4)
    assert reference_round(profile, 16, 7) == pytest.approx(0.0433, abs=2e-4)
    assert sync_speed(profile, 1) == pytest.approx(181.7, rel=0.03)


def test_the_synthetic_trace_has_the_published_acceptance_and_hit_rate():
    rounds = list(load_profile("h100-llama-70b-1b").trace(0.0).rounds(7))
    reached = [sum(each.accepted >= k for each in rounds) / len(rounds) for k in range(1, 8)]
    assert reached == pytest.approx([0.870, 0.776, 0.706, 0.648, 0.600, 0.558, 0.523], abs=0.03)
    hits = sum(0 <= each.rank < 3 + (each.accepted < 7) for each in rounds)
    assert hits / len(rounds) == pytest.approx(0.88, abs=0.02)


@pytest.mark.parametrize("mode", ["off", "sync", "ssd"])
def test_a_simulation_is_the_same_every_time(mode):
    load = Load(batch=3, temperature=0.7, warm_up=5, tokens=30)
    first, again = (simulate(load_profile("demo-two-cores"), mode, load) for _ in range(2))
    assert first == again
    assert 90 <= first.tokens < 90 + 3 * 3


def test_without_speculation_a_round_is_a_forward_and_a_token():
    profile = load_profile("demo-two-cores")
    found = simulate(profile, "off", Load(batch=4, tokens=10))
    assert found.tokens == 40
    assert found.seconds == pytest.approx(10 * (profile.times.plain(4, 0.0) + profile.host_ms / 1e3))


def test_without_speculation_the_targets_own_sampler_takes_its_time():
    profile = msgspec.structs.replace(load_profile("demo-two-cores"), plain_ms={0.7: (50.0,) * 6})
    assert profile.times.plain(3, 0.7) == pytest.approx(0.050)
    assert profile.times.plain(3, 0.0) == profile.times.verify(3, 1)
    found = simulate(profile, "off", Load(batch=4, temperature=0.7, tokens=10))
    assert found.seconds == pytest.approx(10 * (0.050 + profile.host_ms / 1e3))


def test_texts_are_asked_for_in_turn_from_their_beginnings():
    trace = load_profile("demo-two-cores").trace(0.0).first(3)
    asked = list(itertools.islice(in_turn(trace, 20), 4))
    assert [each.begin for each in asked] == [0, *np.cumsum(trace.lengths)[:2], 0]
    assert [each.new_tokens for each in asked] == [min(20, n) for n in (*trace.lengths, trace.lengths[0])]


def test_ordinary_speculation_takes_its_steps_and_then_the_verify():
    """Rounds of one request: K draft steps (one more for the path), a round trip, the verify."""
    profile = load_profile("demo-two-cores")
    found = simulate(profile, "sync", Load(num_steps=1, tokens=70))
    times, one_ms = profile.times, profile.round_trip_ms + profile.draft_host_ms[0]
    least = times.verify(1, 2) + profile.host_ms / 1e3
    assert least < found.seconds / found.rounds < least + 2 * times.step(2) + 3 * one_ms / 1e3
    assert found.tokens_per_round > 1.2


def test_ordinary_speculation_waits_for_its_drafts_however_slow_they_are():
    found = simulate(load_profile("demo-two-cores"), "sync", Load(slow=8.0, num_steps=3, tokens=60))
    assert found.timeouts == 0
    assert found.mean_drafts > 2.8


def test_ordinary_speculation_is_compared_with_the_k_that_it_had():
    load = Load(tokens=20)
    found = compare(load_profile("demo-two-cores"), load, sync_steps=3)
    assert found.sync == simulate(load_profile("demo-two-cores"), "sync", replace(load, num_steps=3))


def test_the_command_prints_a_line_for_each_load(capsys):
    assert main(["simulate", "--batches", "1", "2", "--tokens", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[2].strip() for line in lines[-2:]] == ["1", "2"]
    assert any("prediction" in line for line in lines)


def test_the_command_says_what_is_wrong_with_a_profile(capsys):
    assert main(["simulate", "--profile", "nowhere"]) == 2
    assert "no profile" in capsys.readouterr().err


def test_measured_ratios_stand_beside_simulated_ones():
    lines = list(
        validation(load_profile("demo-two-cores"), [Measured(1, 0.0, 32, 4, 8, 2, 100.0, None)], Load(tokens=8))
    )
    assert "-9" in lines[2]
    assert lines[-1] == "0 of 1 measured ratios are within 10 %."


def test_a_run_makes_a_profile_of_its_times_alone(tmp_path, capsys):
    path = tmp_path / "results.json"
    results = Results.open(path, HEADER)
    for record in a_run():
        results.add(record)
    assert main(["profile", str(path)]) == 2
    assert "no times" in capsys.readouterr().err
    results.add({"event": "decisions", "server": "sync"} | DECISIONS)
    slower = DECISIONS | {"verify_ms": {"1": {"1": 180.0, "3": 200.0}, "2": {"1": 200.0, "3": 240.0}}}
    results.add({"event": "decisions", "server": "ssd"} | slower)
    assert main(["profile", str(path), "--write", str(tmp_path / "machine.json")]) == 0
    profile = load_profile(str(tmp_path / "machine.json"))
    assert (profile.batches, profile.widths) == ((1, 2), (1, 2, 3, 4, 5))
    assert profile.plain_ms.keys() == {0.0}  # at the other temperature only one batch size was measured
    plain = profile.plain_ms[0.0][0]
    assert plain == pytest.approx(100 - profile.host_ms, abs=0.1)
    level = plain / 90  # the ssd server's last moments were at half of the pace
    assert profile.verify_ms[0][:3] == pytest.approx([level * ms for ms in (90, 95, 100)], abs=0.1)
    assert profile.verify_ms[1][:3] == pytest.approx([plain / 100 * ms for ms in (100, 112, 120)], abs=0.1)
    assert profile.step_ms == ((1.0, 15.7), (10.0, 18.6))
    assert profile.traces == "demo"
    assert "2 cores, CPU" in profile.source

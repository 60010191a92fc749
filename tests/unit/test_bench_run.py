"""The order of a run, its results file, and the page made of it; without servers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sglang_ssd.bench import machine, report, run
from sglang_ssd.bench.analysis import Samples, closed, points, steady
from sglang_ssd.bench.ceiling import ceiling
from sglang_ssd.bench.goals import goals
from sglang_ssd.bench.prompts import MIXED, Prompt, Prompts
from sglang_ssd.bench.results import Results, ResultsError
from sglang_ssd.bench.schedule import Block, blocks_in_turn, variants_of
from sglang_ssd.bench.settings import FULL, PLANS, SHORT, Cell, Plan, parse_sweep
from sglang_ssd.bench.tables import miss_law, miss_points, steady_table

PLAN = Plan("test", (Cell(1, 0.0, 16, 4), Cell(2, 0.0, 16, 2), Cell(1, 1.0, 16, 4)), 1.0, (1, 2, 3))
HEADER = {
    "plan": PLAN.as_json(), "command": "python -m sglang_ssd.bench run", "versions": {"sglang-ssd": "1"},
    "machine": {"cores": 2, "gpus": [], "memory_gib": 4},
}  # fmt: skip
DECISIONS = {
    "lookahead": {"16": 0, "2": 1}, "fallback_chosen": {"2": "none"}, "switch_point": 2,
    "verify_ms": {"2": {"1": 100.0, "2": 112.0}, "16": {"1": 150.0}}, "draft_step_ms": [[1, 15.7], [10, 18.6]],
}  # fmt: skip


def record(cell: Cell, block: int, variant: str, seconds: float, **more: Any) -> dict[str, Any]:
    """A block of 10 rounds of 2 tokens for each request that took ``seconds`` after 1 s of prefill."""
    return {
        "cell": cell.key, "block": block, "variant": variant, "batch": cell.batch, "temperature": cell.temperature,
        "data_set": cell.data_set, "rate": cell.rate, "wall_s": 1 + seconds, "tokens": 21 * cell.batch,
        "decode": {"s": seconds, "tokens": 20 * cell.batch}, "full": {"s": seconds, "tokens": 20 * cell.batch},
        "itl_ms": [100.0], "cores": {"others": 0.0, "HTTP": 0.1},
        "requests": [{"data_set": "own", "prompt": 9, "tokens": 21, "finish": "length", "ttft_ms": 9.0, "tpot_ms": 8.0}]
        * cell.batch,
    } | more  # fmt: skip


def speculated(cell: Cell, block: int, variant: str, seconds: float, wait_s: float, hits: int = 5) -> dict[str, Any]:
    rounds = 10 * cell.batch
    server = {
        "rounds": rounds, "hits": hits * cell.batch, "partial": 0, "forwards": 10, "narrow_forwards": 0, "timeouts": 0,
        "misses": {"jit": rounds - hits * cell.batch, "total": rounds - hits * cell.batch},
        "accepted_per_position": [rounds], "verified_per_position": [rounds],
        "parts_s": {"verify": 0.6 * (seconds - wait_s), "wait": wait_s, "hit_wait": wait_s / 4, "other": 0.0},
    }  # fmt: skip
    draft = {"forwards": 10, "rows": 40, "path_rows": 10, "forward_us": 9000}
    memory = {"slots": 90, "sessions": cell.batch}
    return record(cell, block, variant, seconds, server=server, draft=draft, draft_memory=memory)


def a_run(ssd_seconds: float = 2.0) -> list[dict[str, Any]]:
    records = []
    for cell in PLAN.cells:
        for block in range(cell.blocks):
            slow = 1 + 0.1 * block  # minutes differ, blocks are paired
            records.append(record(cell, block, "off", 4.0 * slow))
            records.append(speculated(cell, block, "sync K=1", 3.2 * slow, 1.2 * slow, hits=0))
            if block == 0:
                records.append(speculated(cell, block, "sync K=2", 3.6 * slow, 1.2 * slow, hits=0))
            records.append(speculated(cell, block, "ssd", ssd_seconds * slow, 0.4 * slow))
    return records


def test_blocks_come_in_turn_so_that_every_beginning_is_balanced() -> None:
    order = blocks_in_turn(PLAN.cells)
    assert len(order) == sum(cell.blocks for cell in PLAN.cells)
    for count in range(len(order) + 1):
        done = Counter(block.cell for block in order[:count])
        shares = [done[cell] / cell.blocks for cell in PLAN.cells]
        assert max(shares) - min(shares) <= 0.5
    assert {block.cell for block in order[:3]} == set(PLAN.cells)


def test_sync_is_tried_at_every_k_and_goes_on_with_its_best() -> None:
    cell = Cell(1, 0.0, 8, 6)
    everything = ["off", "sync K=1", "sync K=2", "sync K=3", "ssd"]
    assert [v.name for v in variants_of(Block(cell, 0), PLAN, [])] == everything
    records = [record(cell, 0, name, s) for name, s in
               (("off", 4), ("sync K=1", 3), ("sync K=2", 2), ("sync K=3", 5), ("ssd", 1))]  # fmt: skip
    names = [{v.name for v in variants_of(Block(cell, number), PLAN, records)} for number in range(6)]
    two, one = {"off", "sync K=2", "sync K=1", "ssd"}, {"off", "sync K=2", "ssd"}
    assert names == [set(everything), set(everything), two, one, one, one]
    for other in (Cell(2, 0.0, 8, 6), Cell(1, 0.7, 8, 6)):  # each has its own best
        assert len(variants_of(Block(other, 5), PLAN, records)) == len(everything)


def test_sglangs_own_speculation_takes_part_where_its_flags_are_given() -> None:
    plan = PLAN.replace(standalone_flags=("--speculative-algorithm", "STANDALONE"))
    assert variants_of(Block(PLAN.cells[0], 0), plan, [])[-1].server == "standalone"
    assert plan.server_flags("standalone")[-2:] == ("--speculative-algorithm", "STANDALONE")
    assert not any("ssd" in flag for flag in plan.server_flags("standalone"))
    records = a_run()
    records += [
        each | {"variant": "standalone", "full": {"s": 0.1, "tokens": 20}}
        for each in records
        if each["variant"] == "off"
    ]
    (point, *_) = closed(points(records))
    assert point.best_other is point.standalone


def test_every_variant_goes_first_as_often_as_the_others() -> None:
    records = [record(PLAN.cells[0], 0, name, 1) for name in ("off", "sync K=1", "ssd")]
    firsts = Counter(variants_of(Block(PLAN.cells[0], number), PLAN, records)[0].name for number in range(2, 8))
    assert set(firsts.values()) == {2}


def test_a_stopped_run_goes_on_and_another_plan_does_not(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    first = Results.open(path, HEADER)
    first.add(record(PLAN.cells[0], 0, "off", 1))
    with path.open("a") as file:
        file.write('{"cell": "cut off')
    again = Results.open(path, HEADER)
    assert again.done() == {(PLAN.cells[0].key, 0, "off")}
    again.add(record(PLAN.cells[0], 0, "ssd", 1))
    assert len(Results.read(path).blocks) == 2
    with pytest.raises(ResultsError, match="another plan"):
        Results.open(path, HEADER | {"plan": SHORT.as_json()})
    with pytest.raises(ResultsError, match="other versions"):
        Results.open(path, HEADER | {"versions": {"sglang-ssd": "2"}})
    again.add({"event": "complete"})
    assert Results.open(path, HEADER).blocks == []
    assert len(Results.read(tmp_path / "results.previous.json").blocks) == 2


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("[1]\n")
    with pytest.raises(ResultsError, match="no results file"):
        Results.read(path)


def test_the_ceiling_and_where_the_rest_went_add_up() -> None:
    (point, *_) = closed(points(a_run()))
    found = ceiling(point)
    assert found is not None
    assert point.sync is not None
    assert point.sync.name == "sync K=1"
    assert found.sync.wait_ms / found.sync.round_ms == pytest.approx(1.2 / 3.2)
    assert found.share.mean == pytest.approx(1.0)  # 2.0 s, and 3.2 - 1.2
    steps = found.waterfall(round_trip_ms=1.0)
    assert sum(value for _, value in steps[:-1]) == pytest.approx(steps[-1][1])
    assert dict(steps)["round trip"] == pytest.approx(1.0 / found.ssd.tokens)


@pytest.mark.parametrize(("seconds", "verdicts"), [(2.0, {"met"}), (2.9, {"met", "**missed**"}), (6.0, {"**missed**"})])
def test_goals_say_when_they_are_missed(seconds: float, verdicts: set[str]) -> None:
    enough = [each for each in a_run(seconds) if each["batch"] == 1]
    assert {goal.verdict for goal in goals(closed(points(enough)))} == verdicts


def test_goals_that_were_not_measured_say_so() -> None:
    assert {goal.verdict for goal in goals([])} == {"**not measured**"}
    two_blocks = [each for each in a_run() if each["batch"] == 2]
    assert goals(closed(points(two_blocks)))[3].verdict == "**too few blocks**"


def test_the_best_other_is_chosen_by_its_rate() -> None:
    records = a_run()
    for each in records:
        if each["variant"].startswith("sync"):
            each["full"] = {"s": 40.0, "tokens": 20}
    (point, *_) = closed(points(records))
    assert point.best_other is point.off
    ratio = point.against(point.off)
    assert ratio is not None
    assert ratio.mean == pytest.approx(2.0)


def test_requests_that_follow_one_another_are_judged_by_whole_blocks_and_apart() -> None:
    cell = Cell(2, 0.0, 8, 3, turns=4)
    seconds = {"off": 3.0, "sync K=1": 1.0, "ssd": 1.0}
    records = [record(cell, i, name, s, turns=4) for i in range(3) for name, s in seconds.items()]
    everything = points([*a_run(), *records])
    assert all(point.turns == 1 for point in closed(everything))
    (point,) = steady(everything)
    ratio = point.against(point.off)
    assert ratio is not None
    assert ratio.mean == pytest.approx(2.0)  # (1 + 3) / (1 + 1): the prefill is in it
    assert "| 0 | 2 | 8 | 3 | 10.5 | 21.0 (K=1) | 21.0 |" in steady_table([point])


def test_a_page_and_its_plots_are_made_of_the_results_alone(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results = Results.open(path, HEADER)
    for each in a_run(2.9):
        results.add(each)
    for fan_out, hits in ((1, 2), (2, 4), (4, 6)):
        results.add(speculated(PLAN.cells[0], 0, f"fan-out={fan_out}", 2.0, 0.4, hits))
    results.add({"event": "failed", "variant": "planner=full", "why": "no such planner"})
    results.add({"event": "scaling", "round_trip_ms": 0.4, "curves": {"rows": [[8, 1.0], [16, 2.0]]}})
    results.add({"event": "decisions", "server": "sync"} | DECISIONS | {"lookahead": {"1": 9}})
    results.add({"event": "decisions", "server": "ssd"} | DECISIONS)
    page = tmp_path / "benchmarks.md"
    assert report.main([str(path), "--write", str(page)]) == 0
    text = page.read_text()
    assert "**missed**" in text
    assert "2 cores, CPU" in text
    assert "**The run is not complete.**" in text
    assert "planner=full could not be measured: no such planner" in text
    assert "x^1.00" in text
    assert "| 2 | 1 | none | 1: 100, 2: 112 |" in text
    assert text.index("| 2 | 1 | none") < text.index("| 16 | 0 | - |")
    assert "not drafted): 2." in text
    assert "| own |" not in text  # of one data set alone there is no table
    assert text.count("fan-out=4") == 1  # a sweep is in its own table only
    assert str(tmp_path) not in text
    drawn = sorted(file.name for file in (tmp_path / "benchmarks").iterdir())
    assert drawn == ["misses.svg", "pareto.svg", "ratios.svg", "scaling.svg", "waterfall.svg"]
    for name in drawn:
        assert f"benchmarks/{name}" in text
        assert (tmp_path / "benchmarks" / name).stat().st_size < 60_000
    before = {name: (tmp_path / "benchmarks" / name).read_bytes() for name in drawn}
    report.main([str(path), "--write", str(page)])
    assert {name: (tmp_path / "benchmarks" / name).read_bytes() for name in drawn} == before


def test_results_of_another_draft_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, draft in (("run", "mine"), ("same", "mine"), ("older", "yours")):
        results = Results.open(tmp_path / name, HEADER | {"command": f"run {name}"})
        server = {"event": "server", "name": "ssd", "flags": [], "devices": {"target": 1, "draft": 1}}
        results.add(server | {"about": {"draft": draft, "target": name}})
        for each in a_run():
            results.add(each)
    report.main([str(tmp_path / name) for name in ("run", "same", "older")])
    page = " ".join(capsys.readouterr().out.split())
    assert page.count("another draft") == 1
    assert "**`run older` was run with another draft (yours).**" in page
    assert "Target run on" in page  # not that of the files behind it


def test_a_busy_machine_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.json"
    results = Results.open(path, HEADER)
    for each in a_run():
        results.add(each | {"cores": {"others": 0.7}})
    assert report.main([str(path)]) == 0
    assert "Other processes used 0.70 cores" in capsys.readouterr().out


def test_the_miss_law_is_of_one_sweep_only() -> None:
    """Servers with other settings, whose fan-out happens to be named too, are no points of it."""
    cell = PLAN.cells[0]
    hits = {"fan-out=1 wait=full": 2, "fan-out=4 wait=full": 6, "fan-out=8": 9}
    records = [speculated(cell, 0, name, 2.0, 0.4, hits=count) for name, count in hits.items()]
    assert miss_points(points(records)) == [(1.0, 0.8), (4.0, 0.4)]
    constant, exponent = miss_law(points(records)) or (0.0, 0.0)
    assert (constant, exponent) == (pytest.approx(0.8), pytest.approx(0.5))


def test_sweeps_name_flags() -> None:
    sweep = parse_sweep("fan-out=1,2;wait=full")
    assert sweep.variants() == [
        (f"fan-out={value} wait=full", ("--speculative-ssd-fan-out", value, "--speculative-ssd-wait", "full"))
        for value in "12"
    ]
    assert parse_sweep("num-steps=8").flag == "--speculative-num-steps"
    assert parse_sweep("--tp-size=2").variants() == [("tp-size=2", ("--tp-size", "2"))]
    with pytest.raises(ValueError, match="flag=value"):
        parse_sweep("fan-out")


def test_plans_fit_their_budgets_by_construction() -> None:
    assert FULL.minutes <= 36
    assert SHORT.minutes <= 10
    assert {cell.batch for cell in FULL.cells if cell.rate is None} == {1, 2, 4, 8, 16, 32}
    assert {cell.temperature for cell in FULL.cells} == {0.0, 0.7, 1.0}
    assert all(cell.blocks >= 5 for plan in (SHORT, FULL) for cell in plan.cells if cell.batch == 1)
    assert json.loads(json.dumps(FULL.as_json()))["name"] in PLANS


def test_blocks_without_a_grid_would_change_nothing_so_they_are_refused() -> None:
    with pytest.raises(ValueError, match="give --batches"):
        run._plan(run._parser().parse_args(["--plan", "full", "--blocks", "5"]))


def test_the_command_line_changes_the_plan() -> None:
    options = run._parser().parse_args(
        [
            "--batches",
            "1",
            "3",
            "--temperatures",
            "0.5",
            "--tokens",
            "9",
            "--blocks",
            "2",
            "--rates",
            "0.5",
            "--minutes",
            "2",
        ]
    )
    plan = run._plan(options)
    assert [(c.batch, c.temperature, c.tokens, c.blocks, c.rate) for c in plan.cells] == [
        (1, 0.5, 9, 2, None), (3, 0.5, 9, 2, None), (16, 0.0, 9, 1, 0.5),
    ]  # fmt: skip
    assert plan.minutes == 2


def test_prompts_are_taken_in_turn_from_every_data_set() -> None:
    sets = {name: [Prompt(name, (i,)) for i in range(count)] for name, count in (("own", 3), ("gsm8k", 2))}
    prompts = Prompts(sets)
    assert [p.data_set for p in prompts.take(MIXED, 0, 5)] == ["own", "gsm8k", "own", "gsm8k", "own"]
    assert prompts.take("gsm8k", 1, 3) == [sets["gsm8k"][1], sets["gsm8k"][0], sets["gsm8k"][1]]


def test_other_batches_and_temperatures_of_a_plan_keep_its_loop() -> None:
    for plan, turns in (("steady", 4), ("full", 1), ("sweeps", 1)):
        changed = run._plan(run._parser().parse_args(["--plan", plan, "--batches", "8", "--temperatures", "1"]))
        assert [(c.batch, c.temperature, c.turns) for c in changed.cells] == [(8, 1.0, turns)]


def test_samples_know_their_rates() -> None:
    samples = Samples("ssd", [speculated(PLAN.cells[1], 0, "ssd", 2.0, 0.4)])
    assert samples.rate == pytest.approx(42 / 3)
    assert samples.decode_rate == pytest.approx(20)
    assert samples.hit_rate() == 0.5
    assert samples.accepted() == [1.0]


def test_results_hold_no_places_of_the_machine() -> None:
    assert machine.shown(["--model-path", "/home/me/models/target", "--data", "../data"]) == [
        "--model-path", "target", "--data", "../data",
    ]  # fmt: skip
    assert machine.without_paths("no file /home/me/x/config.json, see http://a.b/c and 1/2") == (
        "no file config.json, see http://a.b/c and 1/2"
    )
    status = {"mode": "ssd", "target": "/home/me/target-r1", "draft": None, "endpoint": "ipc:///tmp/x"}
    assert machine.about(status) == {"mode": "ssd", "target": "target-r1"}


def test_memory_of_a_token_follows_the_checkpoint(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 4, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    assert machine.kv_bytes_per_token(tmp_path) == 2 * 4 * 3 * 64 * 2
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "odd"}))
    assert machine.kv_bytes_per_token(tmp_path) is None

"""A whole run with servers that are played: stopped and continued, out of time, with a sweep value that is refused."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sglang_ssd.bench import run
from sglang_ssd.bench.prompts import MIXED, Prompt, Prompts
from sglang_ssd.bench.results import Results
from sglang_ssd.bench.servers import ServerError
from sglang_ssd.bench.settings import Cell, Plan, parse_sweep

PLAN = Plan(
    "test",
    (Cell(1, 0.0, 8, 3), Cell(2, 0.0, 8, 2), Cell(1, 0.7, 8, 3)),
    60.0,
    (1, 2),
    sweeps=(parse_sweep("fan-out=1,2"),),
    sweep_cells=(Cell(1, 0.0, 8, 2),),
    bookkeeping=False,
)
HEADER = {"plan": PLAN.as_json(), "versions": {}, "machine": {"cores": 2, "gpus": []}, "command": ""}
SECONDS = {"off": 4.0, "sync": 3.0, "ssd": 2.0}


class PlayedServer:
    def __init__(self, name: str, flags: tuple[str, ...]) -> None:
        self.name, self.flags = name, flags

    def status(self) -> dict[str, Any]:
        return {"mode": self.name}

    def info(self) -> dict[str, Any]:
        return {}


class Stage:
    """What was started and measured, in order; ``stop_after`` measurements it is interrupted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[str] = []
        self.measured: list[tuple[str, int, float]] = []
        self.at_once: list[int] = []
        self.stop_after = 10**9
        self.refused: set[str] = set()
        self.seconds = 1.0
        monkeypatch.setattr(run, "running", self.running)
        monkeypatch.setattr(run, "measure", self.measure)

    @contextmanager
    def running(self, wanted, logs):
        if self.refused & set(wanted):
            raise ServerError("refused:\nno such value")
        self.started += wanted
        yield {name: PlayedServer(name, flags) for name, flags in wanted.items()}

    def measure(self, server, asks, rate=None, at_once=None):
        if asks[0].data_set == "warm-up":
            return {}
        if len(self.measured) == self.stop_after:
            raise KeyboardInterrupt
        self.measured.append((server.name, len(asks), asks[0].temperature))
        self.at_once.append(at_once)
        wall = SECONDS.get(server.name, 1.0) * self.seconds
        return {"wall_s": wall, "tokens": 8 * len(asks), "prompts": [ask.ids for ask in asks], "seed": asks[0].seed}


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


def carry_out(path: Path, plan: Plan = PLAN) -> Results:
    results = Results.open(path, HEADER | {"plan": plan.as_json()})
    prompts = Prompts({"own": [Prompt("own", (i,)) for i in range(20)]})
    run.Run(plan, results, prompts, path.parent).carry_out()
    return Results.read(path)


def test_all_variants_of_a_block_get_the_same_prompts_and_seeds(stage: Stage, tmp_path: Path) -> None:
    results = carry_out(tmp_path / "results.json")
    asked: dict[Any, set[str]] = {}
    for each in results.blocks:
        asked.setdefault((each["cell"], each["block"]), set()).add(str((each["prompts"], each["seed"])))
    assert all(len(kinds) == 1 for kinds in asked.values())
    assert len({kinds.pop() for kinds in asked.values()}) > 3
    assert results.complete
    assert results.blocks[0]["data_set"] == MIXED


def test_of_requests_that_follow_one_another_a_batch_is_under_way(stage: Stage, tmp_path: Path) -> None:
    results = carry_out(tmp_path / "results.json", PLAN.replace(cells=(Cell(2, 0.0, 8, 2, turns=3),), sweeps=()))
    assert {requests for _, requests, _ in stage.measured} == {6}
    assert set(stage.at_once) == {2}
    assert {each["turns"] for each in results.blocks} == {3}
    first, second = ({str(each["prompts"]) for each in results.blocks if each["block"] == block} for block in (0, 1))
    assert first.isdisjoint(second)
    lengths = [PLAN.cells[0].tokens_of(seed) for seed in range(50)]
    assert set(lengths) == {PLAN.cells[0].tokens}
    lengths = [Cell(2, 0.0, 32, 2, turns=3).tokens_of(seed) for seed in range(400)]
    assert (min(lengths), max(lengths)) == (16, 48)


def test_a_run_that_is_stopped_anywhere_ends_as_one_that_is_not(stage: Stage, tmp_path: Path) -> None:
    whole = carry_out(tmp_path / "whole.json")
    expected = Counter((r["cell"], r["block"], r["variant"]) for r in whole.blocks)
    for stop in (1, 4, 9, 17, 24):
        stage.measured, stage.stop_after = [], stop
        path = tmp_path / f"{stop}.json"
        with pytest.raises(KeyboardInterrupt):
            carry_out(path)
        stage.measured, stage.stop_after = [], 10**9
        assert Counter((r["cell"], r["block"], r["variant"]) for r in carry_out(path).blocks) == expected


def test_without_time_a_run_stops_between_blocks_and_still_sweeps(stage: Stage, tmp_path: Path) -> None:
    stage.seconds = 60.0
    plan = PLAN.replace(minutes=15.0)
    results = carry_out(tmp_path / "results.json", plan)
    main = [r for r in results.blocks if "fan-out" not in r["variant"]]
    variants = Counter((r["cell"], r["block"]) for r in main)
    assert len(variants) == 2  # 4 + 3 + 3 + 2 minutes in the first block, then 12 more
    assert set(variants.values()) == {4}
    assert sum("fan-out" in r["variant"] for r in results.blocks) == 4


def test_a_value_that_a_server_refuses_is_noted_and_the_rest_goes_on(stage: Stage, tmp_path: Path) -> None:
    stage.refused = {"fan-out=1"}
    results = carry_out(tmp_path / "results.json")
    assert [(e["variant"], e["why"]) for e in results.events("failed")] == [("fan-out=1", "no such value")]
    assert Counter(r["variant"] for r in results.blocks)["fan-out=2"] == 2
    assert results.complete


def test_the_three_servers_differ_in_mode_and_lookahead_only(stage: Stage, tmp_path: Path) -> None:
    results = carry_out(tmp_path / "results.json")
    flags = {e["name"]: e["flags"] for e in results.events("server")}
    common = set(flags["off"]) - {"off"}
    assert set(flags["sync"]) - common == {"sync", "--speculative-num-steps", "2", "--speculative-ssd-wait", "full"}
    assert set(flags["ssd"]) - common == {"ssd"}
    assert stage.started == ["off", "sync", "ssd", "fan-out=1", "fan-out=2"]

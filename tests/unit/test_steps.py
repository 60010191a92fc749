"""What a draft step costs: branches of one sequence, timed by the clock that is asked for."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_ssd.demo import steps
from sglang_ssd.draft_server.engine import EngineSettings
from sglang_ssd.draft_server.engine_torch import TorchEngine
from tests.models import make_llama


def test_more_layers_and_rows_are_timed_as_branches(tmp_path, monkeypatch):
    engine = TorchEngine(EngineSettings(str(make_llama(tmp_path, seed=1)), slots=400, rows=12))
    seen = []
    decode = engine.decode
    monkeypatch.setattr(engine, "decode", lambda batch: seen.append(batch) or decode(batch))
    one, many = steps.measure(engine, [1, 10], on_cpu=True)
    assert one > 0
    assert many > 0
    assert {len(batch) for batch in seen} == {1, 10}
    assert all((batch.positions == steps.CONTEXT).all() for batch in seen)
    assert len(np.unique(seen[-1].slots)) == 10  # branches, not one token over and over


def test_the_table(monkeypatch, capsys):
    """Decode 93 ms, verify 120 ms, steps of 18 and 30 ms."""
    monkeypatch.setattr(steps, "measure_apart", lambda settings, rows: [93.0, 120.0])
    monkeypatch.setattr(steps, "_students", lambda target, options: [(2, 16, [9.0, 18.0]), (6, 16, [20.0, 30.0])])
    assert steps.main(["--target", "anything", "--tokens", "2.2", "--hit-rate", "0.7"]) == 0
    shown = capsys.readouterr().out
    assert "decode 93.0 ms, verify of 5 tokens 120.0 ms" in shown
    assert "| 2 | 16 | 9.0 | 18.0 | yes | 1.44x | 1.07x | 1.52 |" in shown
    assert "| 6 | 16 | 20.0 | 30.0 | no |" in shown


@pytest.mark.server
def test_students_of_the_asked_sizes_are_measured(tmp_path):
    target = str(make_llama(tmp_path, seed=1, layers=3, tied=True))
    options = steps._parser().parse_args(["--target", target, "--layers", "1", "2", "--maps", "100", "--rows", "4"])
    made = list(steps._students(target, options))
    assert [(layers, size) for layers, size, _ in made] == [(1, 100), (2, 100)]
    assert all(one > 0 and many > 0 for _, _, (one, many) in made)

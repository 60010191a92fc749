"""The draft server's command line, and its rate-limited log."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from sglang_ssd.config import ConfigError
from sglang_ssd.draft_server.settings import DraftSettings
from sglang_ssd.seldom import Seldom
from tests.support import Clock


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_every_option_reaches_its_field(model):
    parsed = DraftSettings.parse(
        f"--model-path {model} --endpoint ipc:///tmp/x --engine torch --device cuda:1 --dtype bfloat16 "
        "--max-total-tokens 1000 --max-sessions 3 --max-rows 30 --context-length 100 --parent-pipe 7".split()
    )
    assert (parsed.model_path, parsed.endpoint, parsed.engine) == (str(model), "ipc:///tmp/x", "torch")
    assert (parsed.device, parsed.dtype, parsed.context_length, parsed.parent_pipe) == ("cuda:1", "bfloat16", 100, 7)
    assert (parsed.max_total_tokens, parsed.max_sessions, parsed.max_rows) == (1000, 3, 30)
    engine = parsed.for_engine()
    assert (engine.slots, engine.rows, engine.context_length, engine.dtype) == (1000, 30, 100, "bfloat16")


def test_only_the_model_and_the_endpoint_must_be_given(model):
    parsed = DraftSettings.parse(["--model-path", str(model), "--endpoint", "tcp://127.0.0.1:5000"])
    assert (parsed.engine, parsed.context_length, parsed.parent_pipe) == ("sglang", None, None)
    assert parsed.for_engine().rows == 1024
    assert dataclasses.replace(parsed, max_sessions=8).for_engine().rows == 128


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"endpoint": "tcp://10.0.0.1:5"}, "not an endpoint"),
        ({"model_path": "/nowhere"}, "no config.json"),
        ({"engine": "vllm"}, "--engine must be one of"),
        ({"dtype": "int8"}, "--dtype must be one of"),
        ({"max_total_tokens": 10}, "--max-total-tokens"),
        ({"max_sessions": 0}, "--max-sessions"),
        ({"max_rows": 1}, "--max-rows"),
        ({"context_length": 2}, "--context-length"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(model, more, words):
    with pytest.raises(ConfigError, match=words) as caught:
        DraftSettings(**({"model_path": str(model), "endpoint": "ipc:///tmp/x"} | more))
    assert str(caught.value).endswith(".")


def test_a_flood_is_logged_once_and_counted(caplog):
    clock = Clock()
    quiet = Seldom(logging.getLogger("flood"), clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            quiet.warn("frame", "dropped a frame")
        quiet.warn("other", "something else")
        clock.now += 11
        quiet.warn("frame", "dropped a frame")
    assert [record.message for record in caplog.records] == [
        "dropped a frame",
        "something else",
        "dropped a frame (99 more like it were not logged)",
    ]


def test_made_up_kinds_take_no_memory():
    quiet = Seldom(logging.getLogger("flood"), Clock())
    for number in range(10_000):
        quiet.allows(f"peer {number}")
        quiet.allows(f"peer {number}")
    assert len(quiet._last) <= 1000
    assert len(quiet._held) <= 1000

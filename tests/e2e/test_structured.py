"""Structured output, custom processors, samples and stops: the same with speculation on and off, and speculated."""

from __future__ import annotations

import re

import pytest
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

from tests.e2e.conftest import Rig
from tests.e2e.servers import wait_until
from tests.e2e.workload import Case, differences, run_staggered

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

PATTERNS = [  # no word may be the beginning of another that is meant: the vocabulary has words, not letters
    r"(w4|w5|w6|w7){5,12}w9",
    r"(w[1-9][0-9]?){10,20}",
    r"w8(w[1-9]){3}w9",
    r"((w5w6)|(w5w7)){4,9}w8",
    r"(w[0-9]{1,3}){15,25}",
]


@pytest.fixture(params=["tight", "roomy"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return request.getfixturevalue(request.param)


def body(index: int, *, enabled: bool, **sampling: object) -> dict:
    given = {"temperature": 0, "max_new_tokens": 40} | sampling
    params = dict(given.pop("custom_params", {}))
    given["custom_params"] = params | ({} if enabled else {"ssd": {"enabled": False}})
    return {"input_ids": Case(200 + index, 15 + index, 0).prompt, "sampling_params": given, "return_logprob": True}


def on_and_off(rig: Rig, requests: list[dict], **extra: object) -> list[dict]:
    """Answers with speculation, after checking them against the same server without."""
    drafted = run_staggered(rig.server, [body(i, enabled=True, **r) | extra for i, r in enumerate(requests)])
    plain = run_staggered(rig.server, [body(i, enabled=False, **r) | extra for i, r in enumerate(requests)])
    for answer, expected, request in zip(drafted, plain, requests, strict=True):
        assert differences(answer, expected) == [], request
    return drafted


@pytest.mark.parametrize("draft", ["copy", "constant"])
def test_grammars(rig: Rig, draft: str) -> None:
    rig.use(draft)
    mixed = [{"regex": p} for p in PATTERNS] + [{"regex": p, "temperature": 0.9, "sampling_seed": 5} for p in PATTERNS]
    answers = on_and_off(rig, [*mixed, {}, {"temperature": 1.0, "sampling_seed": 9}])
    for request, answer in zip(mixed, answers, strict=False):
        written = answer["text"].replace(" ", "")
        assert re.fullmatch(request["regex"], written) or answer["meta_info"]["finish_reason"]["type"] == "length"
    assert any(answer["meta_info"]["finish_reason"]["type"] == "stop" for answer in answers[: len(PATTERNS)])
    if draft == "copy" and rig.patient:  # speculation is on inside a grammar
        assert sum(a["meta_info"].get("spec_num_correct_drafts", 0) for a in answers[: len(PATTERNS)]) > 10


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_what_is_legal_is_guessed_by_a_draft_that_never_would(tight: Rig, temperature: float) -> None:
    """The constant draft has other favourites than the three words that the grammar allows: they are guessed anyway.

    A draft server that does not listen had 0 and 3 hits in 83 rounds here.
    """
    tight.use("constant")
    before = tight.server.status()["draft_figures"].get("legal_rows", 0)
    choice = {"regex": r"(w4|w5|w6){28}w9", "temperature": temperature, "sampling_seed": 3, "max_new_tokens": 30}
    infos = [answer["meta_info"] for answer in on_and_off(tight, [choice] * 3)]
    rounds = sum(info["ssd_rounds"] for info in infos)

    def told() -> int:  # a Pong's figure, one of an earlier moment at first
        return tight.server.status()["draft_figures"]["legal_rows"] - before

    wait_until(lambda: told() > 0.5 * rounds, 10, "a Pong that tells of half of the rounds")
    assert sum(info["ssd_hits"] for info in infos) > 0.8 * rounds


def test_custom_logit_processors(rig: Rig) -> None:
    rig.use("noisy")
    forbidden = {"custom_params": {"token_ids": list(range(4, 500))}}
    answers = on_and_off(rig, [forbidden] * 3, custom_logit_processor=DisallowedTokensLogitsProcessor.to_str())
    assert all(min(answer["output_ids"]) >= 500 or 2 in answer["output_ids"] for answer in answers)


def test_parallel_samples_of_a_seed(rig: Rig) -> None:
    """Sample 0 is the seed's own text; the others differ from it and are repeatable."""
    rig.use("noisy")
    sampling = {"temperature": 1.0, "sampling_seed": 77, "max_new_tokens": 12, "ignore_eos": True}
    prompt = Case(300, 20, 0).prompt
    alone = rig.server.generate(input_ids=prompt, sampling_params=sampling)["output_ids"]
    first, again = (
        [a["output_ids"] for a in rig.server.generate(input_ids=prompt, sampling_params=sampling | {"n": 3})]
        for _ in range(2)
    )
    assert first[0] == alone
    assert len({tuple(ids) for ids in first}) == 3
    assert first == again


def test_stops_inside_and_across_rounds(rig: Rig) -> None:
    rig.use("copy")
    whole = rig.server.generate(**body(0, enabled=False, ignore_eos=True))["text"].split(" ")
    for at in (2, 3, 9, 10):
        stop = " ".join(whole[at : at + 2])
        (answer,) = on_and_off(rig, [{"stop": [stop], "ignore_eos": True}])
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        assert stop not in answer["text"]

"""Public bug reports about speculative decoding, replayed: what went wrong elsewhere, and must not here.

A name says where the report is: ``test_sglang_31214_...`` is https://github.com/sgl-project/sglang/issues/31214.
Reports that other tests replay already:

| report                  | symptom                                         | test                           |
|-------------------------|-------------------------------------------------|--------------------------------|
| SSD campaign, T1 and T3 | speculation breaks when requests join and leave | test_exact: every_size_at_once |
| mlx-lm#1423, vllm#41758 | greedy text differs with speculation            | test_exact, the four drafts    |
| TensorRT-LLM#19487      | no seed: the same sample again                  | test_sampling: without_a_seed  |
| z-lab/dflash#74         | q is not what the draft sampled from            | unit/test_laws, test_rejection |
| ArcticInference#161     | a stop string inside a block is missed          | test_structured: stops_inside  |
| sglang#24413            | a grammar backend cannot roll back              | unit/test_launcher_checks      |
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
import requests
import zmq

from sglang_ssd.protocol import PROTOCOL_VERSION, Outcome, Outcomes, encode, pack_tokens
from tests.e2e.conftest import Rig
from tests.e2e.servers import SGLangServer, wait_until
from tests.e2e.workload import Case, clear, differences, run_staggered, without_speculation
from tests.models import EOS, STRUCTURE
from tests.support import hello

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

THINK_END = 1000 - len(STRUCTURE) + STRUCTURE.index("</think>")
BOTH = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 4}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
LOOK = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture
def rig(tight: Rig) -> Rig:
    """Whole trees are waited for, so that a perfect draft is accepted whole: the reports are about accepted blocks."""
    tight.use("copy")
    return tight


def ask(server: SGLangServer, index: int = 0, *, extra: dict | None = None, **sampling: object) -> dict:
    given = {"temperature": 0, "max_new_tokens": 24} | sampling
    return server.generate(input_ids=Case(700 + index, 20 + index, 0).prompt, sampling_params=given, **(extra or {}))


def equal_to_the_oracle(rig: Rig, oracle: SGLangServer, sampling: list[dict], **extra: object) -> list[dict]:
    """Answers to greedy requests, all at once, after checking them against SGLang without us."""
    bodies = [
        {
            "input_ids": Case(700 + i, 20 + i, 0).prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": 24} | asked,
            "return_logprob": True,
        }
        | extra
        for i, asked in enumerate(sampling)
    ]
    known = [body for body in bodies if clear(oracle, body)]
    assert len(known) > 0.5 * len(bodies)
    answers = run_staggered(rig.server, known)
    for body, answer in zip(known, answers, strict=True):
        assert differences(answer, oracle.generate(**body)) == [], body
    return answers


def accepted(answers: list[dict]) -> int:
    return sum(answer["meta_info"].get("spec_num_correct_drafts", 0) for answer in answers)


# ---- what a port of SSD into SGLang met ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "greedy",
    [{"temperature": 0}, {"temperature": 1e-7}, {"temperature": 1e-6}, {"temperature": 0.8, "top_k": 1}],
)
def test_ssd_campaign_t4_every_spelling_of_greedy_is_drafted_greedily(rig: Rig, greedy: dict) -> None:
    """SGLang writes temperature 0 as temperature 1 with top-k 1; a draft that sampled by it was hardly ever right."""
    steps = {"custom_params": {"ssd": {"num_steps": 7}}}
    answer = ask(rig.server, max_new_tokens=1 + 3 * 8, ignore_eos=True, sampling_seed=3, **greedy, **steps)
    assert answer["output_ids"] == ask(rig.server, max_new_tokens=25, ignore_eos=True)["output_ids"]
    assert answer["meta_info"]["spec_num_correct_drafts"] == 3 * 7


def test_ssd_campaign_s8_junk_on_the_wire_disturbs_nobody(rig: Rig, oracle: SGLangServer) -> None:
    """One malformed, stale or foreign message ended the control thread, and with it every request."""
    expected = ask(oracle, max_new_tokens=60, ignore_eos=True)
    row = Outcome(1, 1, 5, 0, 10, pack_tokens([5, 6]))
    stale = encode(Outcomes.of(1, 1, 0, ("jit",), (row,)))
    old_hello = encode(hello(version=PROTOCOL_VERSION + 1))
    peer = zmq.Context.instance().socket(zmq.DEALER)
    peer.connect(rig.draft.endpoint)
    try:
        before = rig.server.status()["draft_figures"].get("bad_frames", 0)
        for frame in (b"", b"junk", b"\x93" * 300, stale, stale, old_hello, stale[:-3]):
            peer.send(frame)
            answer = ask(rig.server, max_new_tokens=60, ignore_eos=True)
            assert answer["output_ids"] == expected["output_ids"]
        wait_until(
            lambda: rig.server.status()["draft_figures"]["bad_frames"] >= before + 3, 10, "bad frames to be counted"
        )
        assert accepted([ask(rig.server, max_new_tokens=60, ignore_eos=True)]) > 0
    finally:
        peer.close(linger=0)


# ---- sampling -----------------------------------------------------------------------------------------------------


def test_sglang_31214_temperature_is_honoured(rig: Rig) -> None:
    """Where its kernel was missing, verification took the argmax whatever the temperature was."""
    texts = [ask(rig.server, temperature=1.5, max_new_tokens=8)["output_ids"] for _ in range(20)]
    assert len(set(map(tuple, texts))) > 15


def test_sglang_10617_bias_and_min_p_hold_at_every_token(rig: Rig, oracle: SGLangServer) -> None:
    """Both were applied to the first token only."""
    greedy = ask(oracle, max_new_tokens=24)["output_ids"]
    (forced,) = equal_to_the_oracle(rig, oracle, [{"logit_bias": {"321": 100.0}}])
    assert set(forced["output_ids"]) == {321}
    (avoided,) = equal_to_the_oracle(rig, oracle, [{"logit_bias": {str(token): -100.0 for token in greedy}}])
    assert not set(avoided["output_ids"]) & set(greedy)
    assert ask(rig.server, temperature=1.0, min_p=1.0)["output_ids"] == greedy
    assert accepted([forced, avoided]) > 20


@pytest.mark.parametrize(
    "penalty",
    [{"frequency_penalty": 1.3}, {"presence_penalty": 1.1}, {"repetition_penalty": 1.6}, {"min_new_tokens": 7}],
)
def test_sglang_33643_penalties_count_every_token(rig: Rig, oracle: SGLangServer, penalty: dict) -> None:
    """They counted one token per verification, so that a better draft meant a weaker penalty."""
    loving = {"logit_bias": {str(EOS): 9.0}} if "min_new_tokens" in penalty else {"logit_bias": {"44": 4.0, "45": 4.0}}
    assert accepted(equal_to_the_oracle(rig, oracle, [penalty | loving] * 5)) > 20


def test_vllm_6718_penalties_work_inside_a_block(rig: Rig, oracle: SGLangServer) -> None:
    """Each position of a window sees the drafts before it as emitted: a forced token gives way after its first time."""
    forced = {"logit_bias": {str(token): 60.0 - token for token in range(20, 40)}, "frequency_penalty": 2.0}
    (answer,) = equal_to_the_oracle(rig, oracle, [forced])
    assert answer["output_ids"][:2] != answer["output_ids"][:1] * 2
    assert accepted([answer]) > 3


def test_tensorrt_llm_19390_a_missing_temperature_is_one(rig: Rig) -> None:
    """With top-k alone, the temperature counted as 0."""
    asked = {"max_new_tokens": 8, "top_k": 50}
    prompt = Case(700, 20, 0).prompt
    texts = [tuple(rig.server.generate(input_ids=prompt, sampling_params=asked)["output_ids"]) for _ in range(8)]
    assert len(set(texts)) > 6


# ---- the end of a request -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ignore", [True, False])
def test_transformers_47912_an_eos_among_drafts_ends_it_unless_ignored(
    rig: Rig, oracle: SGLangServer, ignore: bool
) -> None:
    """Generation went on past an EOS that was accepted in the middle of a block."""
    answers = equal_to_the_oracle(rig, oracle, [{"ignore_eos": ignore, "logit_bias": {str(EOS): 7.5}}] * 8)
    assert any(EOS in answer["output_ids"] for answer in answers)
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} <= (
        {"length"} if ignore else {"stop", "length"}
    )


def test_sglang_39826_usage_is_what_was_emitted(rig: Rig, oracle: SGLangServer) -> None:
    """Tokens behind the end of a request were counted, as reasoning too."""
    thinking = {"logit_bias": {str(THINK_END): 7.0, str(EOS): 7.0}}
    answers = equal_to_the_oracle(rig, oracle, [thinking] * 8, require_reasoning=True)
    for answer in answers:
        meta = answer["meta_info"]
        assert meta["completion_tokens"] == len(answer["output_ids"])
        assert meta["reasoning_tokens"] <= meta["completion_tokens"]
    asked = {"temperature": 0, "max_new_tokens": 24} | thinking
    last = list(stream(rig, {"input_ids": Case(700, 20, 0).prompt, "sampling_params": asked}))[-1]
    assert last["meta_info"]["completion_tokens"] == len(last["output_ids"])


def test_sglang_18251_rejected_drafts_do_not_use_up_the_budget(tight: Rig) -> None:
    """Nearly half of ``max_tokens`` went to drafts that were never emitted."""
    tight.use("noisy")
    bodies = [
        {"input_ids": [9] * 5, "sampling_params": {"temperature": 0, "max_new_tokens": most, "ignore_eos": True}}
        for most in range(1, 21)
    ]
    for most, answer in enumerate(run_staggered(tight.server, bodies), start=1):
        assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"]) == most


def test_vllm_26317_min_tokens_holds_at_draft_positions(rig: Rig, oracle: SGLangServer) -> None:
    """A stop among the drafts was accepted before ``min_tokens``; SGLang holds it back for too long (#33643)."""
    tokens = [ask(oracle, least, ignore_eos=True)["output_ids"] for least in range(9)]
    asked = [
        {"min_new_tokens": least, "stop_token_ids": [tokens[least][least]], "ignore_eos": False} for least in range(9)
    ]
    answers = equal_to_the_oracle(rig, oracle, asked)
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} >= {"stop"}
    assert accepted(answers) > 15
    loving = [each | {"logit_bias": {str(EOS): 60.0}} for each in asked]
    lengths = [each["meta_info"]["completion_tokens"] for each in equal_to_the_oracle(rig, oracle, loving)]
    assert lengths == sorted(lengths)
    assert lengths[-1] > 7


# ---- structured output, logprobs, tools ---------------------------------------------------------------------------


def schema(**more: object) -> dict:
    return {"json_schema": json.dumps(BOTH), "max_new_tokens": 60} | more


def check_json(text: str) -> None:
    written = json.loads(text)
    assert isinstance(written["a"], bool)
    assert set(written["b"]) <= {"a", "b"}


def test_vllm_36138_a_grammar_begins_where_reasoning_ends_among_drafts(rig: Rig, oracle: SGLangServer) -> None:
    """The end of reasoning was one of several accepted drafts, and the grammar never began."""
    answers = equal_to_the_oracle(rig, oracle, [schema(logit_bias={str(THINK_END): 5.0})] * 8, require_reasoning=True)
    ended = [answer["text"].split("</think>", 1)[1] for answer in answers if "</think>" in answer["text"]]
    assert len(ended) > 3
    for text in ended:
        check_json(text)
    assert accepted(answers) > 10  # of the reasoning: the draft knows no grammar


def test_sglang_9187_an_illegal_draft_does_not_end_the_output(tight: Rig, oracle: SGLangServer) -> None:
    """Output stopped where a draft left the grammar, and the server wrote on."""
    tight.use("constant")
    pattern = r"((w4w5)|(w4w6)){3,9}w9"
    answers = equal_to_the_oracle(tight, oracle, [{"regex": pattern, "max_new_tokens": 60}] * 4)
    for answer in answers:
        assert re.fullmatch(pattern, answer["text"].replace(" ", ""))


def test_sglang_17576_schemas_among_plain_requests(rig: Rig) -> None:
    """Structured requests ended as errors or aborts when others ran beside them."""
    plain = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    bodies = [
        {"input_ids": Case(i, 10 + i, 0).prompt, "sampling_params": plain if i % 2 else schema(temperature=0)}
        for i in range(40)
    ]
    for i, answer in enumerate(run_staggered(rig.server, bodies, at_a_time=40)):
        if i % 2:
            assert answer["meta_info"]["completion_tokens"] == 20
        else:
            check_json(answer["text"])


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "sampling_seed": 4}])
def test_sglang_14046_every_token_has_its_logprob(rig: Rig, sampling: dict) -> None:
    """Only the first token of a block had one, or it was 0."""
    body = {"input_ids": Case(700, 20, 0).prompt, "return_logprob": True, "top_logprobs_num": 5}
    body["sampling_params"] = {"temperature": 0, "max_new_tokens": 30, "ignore_eos": True} | sampling
    answer = rig.server.generate(**body)
    assert differences(answer, rig.server.generate(**without_speculation(body))) == []
    assert len(answer["meta_info"]["output_top_logprobs"]) == 30
    assert accepted([answer]) > 15


def test_vllm_41967_tool_calls_stream_as_they_are(rig: Rig) -> None:
    """One chunk that held several special tokens broke the parser of streamed tool calls."""
    tool = {"type": "function", "function": {"name": "look", "parameters": LOOK}}
    body = {
        "model": "target", "messages": [{"role": "user", "content": "w5 w6 w7"}], "temperature": 0, "max_tokens": 40,
        "tools": [tool], "chat_template_kwargs": {"enable_thinking": False},
        "regex": r'<tool_call>\n\{"name":"look","arguments":\{"a":(true|false)\}\}\n</tool_call>',
    }  # fmt: skip
    whole = chat(rig, body)["choices"][0]["message"]["tool_calls"]
    plain = chat(rig, body | {"custom_params": {"ssd": {"enabled": False}}})["choices"][0]["message"]["tool_calls"]
    parts = [delta for chunk in stream(rig, body, "/v1/chat/completions") for delta in tool_deltas(chunk)]
    names = [part["function"]["name"] for part in parts if part["function"].get("name")]
    arguments = "".join(part["function"].get("arguments") or "" for part in parts)
    for calls in (whole, plain):
        assert [each["function"]["name"] for each in calls] == names == ["look"]
        assert json.loads(calls[0]["function"]["arguments"]) == json.loads(arguments)


def chat(rig: Rig, body: dict) -> dict:
    answer = requests.post(f"{rig.server.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def tool_deltas(chunk: dict) -> list[dict]:
    return [part for choice in chunk["choices"] for part in choice["delta"].get("tool_calls") or []]


def stream(rig: Rig, body: dict, path: str = "/generate") -> Iterator[dict]:
    with requests.post(f"{rig.server.url}{path}", json=body | {"stream": True}, stream=True, timeout=120) as answer:
        for line in answer.iter_lines():
            if line.startswith(b"data: {"):
                yield json.loads(line[len(b"data: ") :])

"""Whole requests at random: every parameter alone and in any combination, equal with speculation on and off.

The answers of the same server with ``enabled: false`` are the reference, and SGLang without our plugin is where it is
right. Each example is a batch of nine, and one of them alone, after a flush and from the cache. Greedy near-ties are
screened on the oracle. Sampled ones are not: two scores within float noise are a matter of one token in 10^5, and the
examples are always the same.
"""

from __future__ import annotations

import numpy as np
import pytest
import requests
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

from tests.e2e.conftest import DRAFTS, Rig
from tests.e2e.servers import SGLangServer
from tests.e2e.workload import Case, clear, differences, run_staggered, without_speculation

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

BATCH = 9
RARE = settings(
    max_examples=3, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
TOKENS = st.integers(4, 999)
GRAMMARS = [  # no word may be the beginning of another that is meant: the vocabulary has words, not letters
    *({},) * 8,
    {"regex": r"(w4|w5|w6|w7){5,12}w9"},
    {"regex": r"(w[0-9]{1,3}){3,25}"},
    {"ebnf": 'root ::= "w4" item{3,8} "w9"\nitem ::= "w5" | "w6" "w7"\n'},
    {"json_schema": '{"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 9}'},
    {"json_schema": '{"type": "object", "properties": {"a": {"enum": ["a", "b"]}, "b": {}}, "required": ["a", "b"]}'},
]
GRAMMAR_KEYS = {"regex", "ebnf", "json_schema"}
FILTERS = {
    "top_k": st.sampled_from([1, 7, 50]),
    "top_p": st.sampled_from([0.6, 0.8, 0.95]),
    "min_p": st.sampled_from([0.05, 0.3]),
}
PENALTIES = {
    "frequency_penalty": st.sampled_from([-0.5, 0.4, 1.5]),
    "presence_penalty": st.sampled_from([-0.7, 0.9]),
    "repetition_penalty": st.sampled_from([0.8, 1.3, 1.9]),
    "logit_bias": st.dictionaries(TOKENS.map(str), st.sampled_from([-100.0, -2.0, 1.5, 4.0]), min_size=1, max_size=4),
}
ENDS = {
    "stop": st.sampled_from([["w9"], ["7 w", "never"], "w44 "]),
    "stop_token_ids": st.integers(4, 40).map(lambda first: list(range(first, 1000, 37))),
    "ignore_eos": st.booleans(),
    "no_stop_trim": st.booleans(),
}
LOGPROBS = {
    "top_logprobs_num": st.integers(0, 4),
    "logprob_start_len": st.integers(-1, 10),
    "token_ids_logprob": st.lists(TOKENS, min_size=1, max_size=3, unique=True),
}


@st.composite
def bodies(draw: st.DrawFn) -> dict:
    """A body for ``/generate``, always with a seed."""
    most = draw(st.integers(1, 28))
    sampling = {
        "temperature": draw(st.sampled_from([0.0, 0.0, 0.3, 0.7, 1.0, 1.5])),
        "sampling_seed": draw(st.integers(-(2**63), 2**63 - 1)),
        "max_new_tokens": most,
    }
    sampling |= draw(st.fixed_dictionaries({}, optional=FILTERS | PENALTIES | ENDS)) | draw(st.sampled_from(GRAMMARS))
    if not sampling.keys() & GRAMMAR_KEYS:  # both together can forbid every token
        sampling["min_new_tokens"] = draw(st.integers(0, most))
    sampling["n"] = draw(st.sampled_from([1, 1, 1, 2, 3]))
    if steps := draw(st.sampled_from([None, None, 0, 1, 4])):
        sampling["custom_params"] = {"ssd": {"num_steps": steps}}
    body = {
        "input_ids": Case(draw(st.integers(0, 3)), draw(st.integers(11, 90)), 0).prompt,
        "sampling_params": sampling,
    }
    if draw(st.integers(0, 7)) == 7:
        sampling["custom_params"] = sampling.get("custom_params", {}) | {"token_ids": list(range(100, 400))}
        body["custom_logit_processor"] = DisallowedTokensLogitsProcessor.to_str()
    if draw(st.booleans()):
        body |= {"return_logprob": True} | draw(st.fixed_dictionaries({}, optional=LOGPROBS))
    return body


def is_for_the_oracle(body: dict) -> bool:
    """Whether SGLang without us is right about it, and the same every time: greedy, and

    * not with both kinds of penalties, whose order it leaves to a set's;
    * not a grammar with ``ignore_eos``: it writes one more token behind the end of the grammar;
    * no custom processor, which the oracle is not started with.
    """
    asked = body["sampling_params"]
    penalties = "repetition_penalty" in asked and asked.keys() & {"frequency_penalty", "presence_penalty"}
    behind_the_end = asked.get("ignore_eos") and asked.keys() & GRAMMAR_KEYS
    greedy = asked["temperature"] == 0 or asked.get("top_k") == 1
    return greedy and not (penalties or behind_the_end or "custom_logit_processor" in body)


def check(rig: Rig, oracle: SGLangServer, batch: list[dict]) -> None:
    known = [body for body in batch if not is_for_the_oracle(body) or clear(oracle, body)]
    plain = run_staggered(rig.server, [without_speculation(body) for body in known])
    together = run_staggered(rig.server, known)
    for body, answer, expected in zip(known, together, plain, strict=True):
        assert differences(answer, expected) == [], body
        if is_for_the_oracle(body):
            assert differences(answer, oracle.generate(**body)) == [], body
    for body, expected in zip(known[-1:], plain[-1:], strict=True):
        rig.server.flush()
        for _ in range(2):
            assert differences(rig.server.generate(**body), expected) == [], body


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("server", ["tight", "roomy"])
def test_any_request(server: str, draft: str, oracle: SGLangServer, request: pytest.FixtureRequest) -> None:
    rig: Rig = request.getfixturevalue(server)
    rig.use(draft)

    @seed(f"{server} {draft}")  # other examples for each, the same ones always
    @RARE
    @given(st.lists(bodies(), min_size=BATCH, max_size=BATCH))
    def run(batch: list[dict]) -> None:
        check(rig, oracle, batch)

    run()


@pytest.mark.parametrize("server", ["tight", "roomy"])
def test_hidden_states(server: str, oracle: SGLangServer, request: pytest.FixtureRequest) -> None:
    """One state per emitted token, also where a request ends inside a window."""
    rig: Rig = request.getfixturevalue(server)
    cases = [Case(600 + i, 20 + i, 12 + i) for i in range(4)]
    known = [case.body() | {"return_hidden_states": True} for case in cases if clear(oracle, case.body())]
    known[0]["sampling_params"] |= {"stop_token_ids": oracle.generate(**known[0])["output_ids"][5:7]}
    for body, answer in zip(known, run_staggered(rig.server, known), strict=True):
        expected = oracle.generate(**body)
        assert differences(answer, expected) == []
        assert states(answer) == pytest.approx(states(expected), abs=1e-4)
        assert len(states(answer)) == answer["meta_info"]["completion_tokens"]


def states(answer: dict) -> np.ndarray:
    """The state behind each emitted token. SGLang gives a block for every prefill: of that, the last is the token's."""
    given = answer["meta_info"]["hidden_states"]
    return np.array([row[-1] if isinstance(row, list) and isinstance(row[0], list) else row for row in given])


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"sampling_params": {"beam_width": 2}}, "Beam search is not supported with speculative decoding."),
        ({"lora_path": "adapter"}, "LoRA is not enabled"),
        ({"return_sampling_mask": True, "sampling_params": {"top_k": 5}}, "not supported with speculative decoding"),
    ],
)
def test_what_is_not_supported_is_refused_with_a_sentence(roomy: Rig, asked: dict, sentence: str) -> None:
    answer = requests.post(f"{roomy.server.url}/generate", json={"input_ids": [5, 6]} | asked, timeout=60)
    assert answer.status_code == 400
    assert sentence in answer.text

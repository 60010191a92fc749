"""With speculation on, every request returns what SGLang without us returns: four drafts, two loops, all sizes."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.conftest import CHUNK, CONTEXT, DRAFTS, NUM_STEPS, TIGHT_POOL, Rig
from tests.e2e.servers import SGLangServer, wait_until
from tests.e2e.workload import Case, Oracle, abandon, differences, run_staggered

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def truth(oracle: SGLangServer) -> Oracle:
    return Oracle(oracle)


@pytest.fixture(params=["tight", "roomy"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return request.getfixturevalue(request.param)


def assert_exact(server: SGLangServer, truth: Oracle, pairs: list[tuple[Case, dict]], at_a_time: int = 9) -> list[dict]:
    answers = run_staggered(server, [case.body(**ssd) for case, ssd in pairs], at_a_time=at_a_time)
    for (case, ssd), answer in zip(pairs, answers, strict=True):
        assert differences(answer, truth.answer(case)) == [], (case, ssd)
        figures = answer["meta_info"]
        assert figures["ssd_hits"] + figures["ssd_partial"] + figures["ssd_misses"] == figures["ssd_rounds"]
    return answers


def assert_sums(rig: Rig) -> None:
    status = rig.server.status()
    assert status["hits"] + status["partial"] + status["misses"]["total"] == status["rounds"]
    assert status["misses"]["total"] == sum(v for k, v in status["misses"].items() if k != "total")


def test_the_oracle_is_able_to_fail_us(truth: Oracle, models) -> None:
    """Its texts are varied, and they are those of Hugging Face."""
    model = AutoModelForCausalLM.from_pretrained(models / "target", dtype=torch.float32).eval()
    for case in truth.clear_cases([Case(seed, 20 + 7 * seed, 64) for seed in range(5)]):
        answer = truth.answer(case)
        assert len(set(answer["output_ids"])) > 30
        prompt = torch.tensor([case.prompt])
        with torch.no_grad():
            ids = model.generate(prompt, do_sample=False, max_new_tokens=64, eos_token_id=None, pad_token_id=0)
            logprobs = model(ids).logits[0].log_softmax(-1)
        assert ids[0, prompt.shape[1] :].tolist() == answer["output_ids"]
        for i, (logprob, token, _) in enumerate(answer["meta_info"]["output_token_logprobs"]):
            assert abs(logprobs[prompt.shape[1] - 1 + i, token].item() - logprob) < 1e-4


@pytest.mark.parametrize("draft", DRAFTS)
def test_every_size_at_once(rig: Rig, truth: Oracle, draft: str) -> None:
    rig.use(draft)
    sizes = itertools.product((1, 2, 3, 5, 17, 64), (None, 1, 4, 7))
    cases = [Case(100 + i, 3 + 13 * i % 90, n) for i, (n, _) in enumerate(sizes)]
    steps = itertools.cycle((None, 1, 4, 7))
    pairs = [
        (case, {} if num_steps is None else {"num_steps": num_steps})
        for case, num_steps in zip(cases, steps, strict=False)
        if truth.clear(case)
    ]
    assert len(pairs) > 0.7 * len(cases)
    answers = assert_exact(rig.server, truth, pairs)
    assert_sums(rig)
    accepted = sum(answer["meta_info"].get("spec_num_correct_drafts", 0) for answer in answers)
    if draft == "constant":
        assert accepted == 0
    elif draft == "copy" and rig.patient:
        assert accepted > 100
    assert_exact(rig.server, truth, [(case, {"enabled": False}) for case, _ in pairs[:6]])


def test_a_perfect_draft_is_accepted_whole_and_always_prepared(tight: Rig, truth: Oracle) -> None:
    tight.use("copy")
    assert_exact(tight.server, truth, [(truth.clear_cases([Case(10, 25, 160)])[0], {})])  # its planner learns
    for seed, num_steps in ((11, 1), (12, 4), (13, 7), (14, NUM_STEPS)):
        case = truth.clear_cases([Case(seed, 25, 1 + 3 * (num_steps + 1))])[0]
        (answer,) = assert_exact(tight.server, truth, [(case, {"num_steps": num_steps})])
        meta = answer["meta_info"]
        assert meta["spec_num_correct_drafts"] == 3 * num_steps  # K + 1 tokens a round, three rounds
        assert (meta["ssd_rounds"], meta["ssd_hits"]) in {(3, 2), (3, 3)}  # the first may be a miss


def test_a_worthless_draft_never_hits(tight: Rig, truth: Oracle) -> None:
    tight.use("constant")
    case = truth.clear_cases([Case(21, 25, 40)])[0]
    (answer,) = assert_exact(tight.server, truth, [(case, {})])
    assert answer["meta_info"]["spec_num_correct_drafts"] == 0
    assert answer["meta_info"]["ssd_rounds"] == 38  # one token comes from prefill, and the last needs no drafts


def test_a_cached_prompt(rig: Rig, truth: Oracle) -> None:
    rig.use("noisy")
    case = truth.clear_cases([Case(31, 64, 30)])[0]
    for _ in range(3):
        assert_exact(rig.server, truth, [(case, {}), (case, {"num_steps": 3})])
    rig.server.flush()
    assert_exact(rig.server, truth, [(case, {})] * 4)


@pytest.mark.parametrize("draft", ["copy", "other"])
def test_a_pool_too_small_for_the_batch(tight: Rig, truth: Oracle, draft: str) -> None:
    tight.use(draft)
    cases = truth.clear_cases([Case(40 + i, 60 + 5 * i, 120) for i in range(6)])
    assert_exact(tight.server, truth, [(case, {}) for case in cases])
    assert "retraction. #retracted_reqs: 1" in tight.server.process.log.read_text(errors="replace")


@pytest.mark.parametrize("draft", ["copy", "constant"])
def test_one_request_that_fills_the_pool(tight: Rig, truth: Oracle, draft: str) -> None:
    """Pool - 2 tokens fit without speculation, so they fit with it, at K = 15 too."""
    tight.use(draft)
    tight.server.flush()
    case = truth.clear_cases([Case(seed, TIGHT_POOL - 2 - 80, 80) for seed in range(50, 54)])[0]
    assert_exact(tight.server, truth, [(case, {})])


def test_a_long_prompt_joins_in_the_middle(roomy: Rig, truth: Oracle) -> None:
    roomy.use("noisy")
    short = truth.clear_cases([Case(60 + i, 10 + i, 64) for i in range(5)])
    long = truth.clear_cases([Case(seed, 20 * CHUNK, 20) for seed in range(70, 73)])[:1]
    assert_exact(roomy.server, truth, [(case, {}) for case in short[:2] + long + short[2:]])


@pytest.mark.parametrize("draft", ["copy", "noisy"])
def test_the_context_limit(roomy: Rig, truth: Oracle, draft: str) -> None:
    roomy.use(draft)
    lengths = (CONTEXT - 7, CONTEXT - 8, CONTEXT - 12, CONTEXT - NUM_STEPS - 2, CONTEXT - 2 * NUM_STEPS - 5)
    cases = truth.clear_cases([Case(80 + i, length, CONTEXT - length) for i, length in enumerate(lengths)])
    answers = assert_exact(roomy.server, truth, [(case, {}) for case in cases], at_a_time=3)
    for case, answer in zip(cases, answers, strict=True):
        meta = answer["meta_info"]
        assert meta["finish_reason"]["type"] == "length"
        assert meta["prompt_tokens"] + meta["completion_tokens"] == CONTEXT - 2, case  # SGLang's own limit


def test_eos_ends_a_request_inside_a_window(rig: Rig, truth: Oracle) -> None:
    """Stop at a token of the oracle's own text: the window goes on behind it, the answer does not."""
    rig.use("copy")
    case = truth.clear_cases([Case(90, 30, 40, ignore_eos=False)])[0]
    whole = truth.answer(case)["output_ids"]
    for position in (0, 1, 5, 6, 19):
        body = case.body()
        body["sampling_params"]["stop_token_ids"] = [whole[position]]
        expected = truth._server.generate(**body)
        assert differences(rig.server.generate(**body), expected) == []
        assert expected["meta_info"]["finish_reason"]["type"] == "stop"


def test_clients_that_leave_in_the_middle(rig: Rig, truth: Oracle) -> None:
    """The requests that stay are exact while others beside them are abandoned at any moment."""
    rig.use("noisy")
    staying = truth.clear_cases([Case(400 + i, 12 + 5 * i, 40) for i in range(8)])
    with ThreadPoolExecutor(6) as pool:
        leaving = [
            pool.submit(abandon, rig.server, Case(450 + i, 30, 200), after_s=0.02 + 0.03 * (i % 7)) for i in range(24)
        ]
        assert_exact(rig.server, truth, [(case, {}) for case in staying], at_a_time=4)
        for gone in leaving:
            gone.result()


def test_nothing_is_left_open(rig: Rig) -> None:
    wait_until(lambda: rig.sessions() == (0, 0), 10, "all sessions to close")

"""The rejection rule behind a real server: greedy rows as ever, whatever they ask for, and at T > 0 the target's law.

The law: logit bias leaves six tokens, so that a few thousand draws say something. What each draw should have been is a
forward of the checkpoint in Hugging Face transformers over the text before it. Two chi-squares per run, of which tokens
were drawn and of how likely the drawn ones were; each fails a right server with probability 1e-7.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from transformers import AutoModelForCausalLM

from tests.e2e.conftest import CONTEXT, Rig
from tests.e2e.servers import DraftServer, free_port, start_ssd
from tests.e2e.test_surface import RARE, bodies
from tests.e2e.workload import Case, clear, differences, run_staggered, without_speculation

pytestmark = [pytest.mark.server, pytest.mark.timeout(1800)]

SIX = [20, 111, 300, 404, 555, 808]
PROMPT = [5, 90, 17, 230, 444, 9]
NEW_TOKENS = 33
REQUESTS = 625 if os.environ.get("SSD_SOAK") == "1" else 100
FALSE_ALARM = 1e-7
FEW = settings(RARE, max_examples=40 if os.environ.get("SSD_SOAK") == "1" else 6)


@pytest.fixture(scope="module")
def rig(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    root = tmp_path_factory.mktemp("rejection")
    draft = DraftServer(f"tcp://127.0.0.1:{free_port()}", root / "draft.log")
    flags = ["--context-length", str(CONTEXT), "--max-total-tokens", "16384", "--max-running-requests", "16"]
    flags += ["--enable-custom-logit-processor"]
    ssd = ["--speculative-num-steps", "4", "--speculative-ssd-endpoint", draft.endpoint]
    ssd += ["--speculative-ssd-wait", "full", "--speculative-ssd-verify", "rejection"]
    # Only full acceptance is prepared: a draft that is not always right misses often, and is then asked on demand.
    ssd += ["--speculative-ssd-planner", "full"]
    server = start_ssd(models / "target", models / "copy", root / "server.log", *flags, *ssd)
    try:
        server.wait_ready()
        yield Rig(server, draft, models, patient=True)
    finally:
        draft.stop()
        server.process.stop()


@pytest.fixture(scope="module")
def target(models: Path) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(models / "target", dtype=torch.float32).eval()


@pytest.mark.parametrize("draft", ["copy", "noisy"])
def test_greedy_text_is_that_of_the_same_server_without_speculation(rig: Rig, draft: str) -> None:
    rig.use(draft)
    cases = [Case(seed, 8 + seed, 24) for seed in range(6)]
    plain = run_staggered(rig.server, [case.body(enabled=False) for case in cases])
    drafted = run_staggered(rig.server, [case.body() for case in cases])
    for answer, expected in zip(drafted, plain, strict=True):
        assert differences(answer, expected) == []
    assert sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in drafted) > 10


@st.composite
def greedy_bodies(draw: st.DrawFn) -> dict:
    """Anything that a request can ask for, at temperature 0."""
    body = draw(bodies())
    return body | {"sampling_params": body["sampling_params"] | {"temperature": 0}}


@pytest.mark.parametrize("draft", ["noisy", "constant"])
def test_any_greedy_request(rig: Rig, draft: str) -> None:
    """Together with others that sample, then one alone, after a flush and from the cache.

    What the same server answers without speculation is the reference; near-ties are screened on that.
    """
    rig.use(draft)

    @seed(f"rejection {draft}")
    @FEW
    @given(st.lists(greedy_bodies(), min_size=7, max_size=7), st.lists(bodies(), min_size=2, max_size=2))
    def run(batch: list[dict], others: list[dict]) -> None:
        known = [body for body in batch if clear(rig.server, without_speculation(body))]
        compared.append(len(known))
        plain = run_staggered(rig.server, [without_speculation(body) for body in known])
        together = run_staggered(rig.server, [*known, *others])
        for body, answer, expected in zip(known, together, plain, strict=False):
            assert differences(answer, expected) == [], body
        for body, expected in zip(known[-1:], plain[-1:], strict=True):
            rig.server.flush()
            for _ in range(2):
                assert differences(rig.server.generate(**body), expected) == [], body

    compared: list[int] = []
    before = rig.server.status()["rounds"]
    run()
    assert sum(compared) > 0.7 * 7 * len(compared)
    assert rig.server.status()["rounds"] > before + 100


@pytest.mark.parametrize("draft", ["copy", "other"])
def test_sampled_text_has_the_targets_law(rig: Rig, target: AutoModelForCausalLM, draft: str) -> None:
    rig.use(draft)
    sampling = {"temperature": 1.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    sampling["logit_bias"] = {str(token): 100.0 for token in SIX}
    body = {"input_ids": PROMPT, "sampling_params": sampling}
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: rig.server.generate(**body), range(REQUESTS)))
    texts = torch.tensor([answer["output_ids"] for answer in answers])
    assert {int(token) for token in texts.unique()} == set(SIX)
    p, drawn = laws(target, texts[:, 1:], texts)
    assert p.max(-1).mean() < 0.7, "the six tokens are no lottery"
    assert chi_square(p, drawn) > FALSE_ALARM
    order = np.argsort(-p, axis=1)
    ranks = (order == drawn[:, None]).argmax(1)
    assert chi_square(np.take_along_axis(p, order, axis=1), ranks) > FALSE_ALARM
    check_regime(draft, [answer["meta_info"] for answer in answers])


def check_regime(draft: str, infos: list[dict]) -> None:
    """That drafts were what the test is about: from the cache with a perfect draft, made on a miss with another."""
    total = {key: sum(info[key] for info in infos) for key in ("ssd_rounds", "ssd_hits", "ssd_misses")}
    accepted = sum(info["spec_num_correct_drafts"] for info in infos)
    if draft == "copy":
        assert total["ssd_hits"] > 0.5 * total["ssd_rounds"]
        assert accepted > 0.75 * sum(info["completion_tokens"] for info in infos)  # 4 of 5: q is p, so all pass
    else:
        assert total["ssd_misses"] > 0.1 * total["ssd_rounds"]
        assert accepted > 0


@torch.no_grad()
def laws(target: AutoModelForCausalLM, later: torch.Tensor, texts: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """p of the six [n, 6] for every draw that was speculated on (all but each text's first), and which it was [n]."""
    prompts = torch.tensor([PROMPT]).expand(len(texts), -1)
    logits = target(torch.cat([prompts, texts], dim=1)).logits[:, len(PROMPT) : -1, SIX]
    drawn = (later[..., None] == torch.tensor(SIX)).int().argmax(-1)
    return logits.double().softmax(-1).view(-1, len(SIX)).numpy(), drawn.view(-1).numpy()


def chi_square(p: np.ndarray, drawn: np.ndarray) -> float:
    """P-value of draws [n] that have each a law of their own, p [n, C]: the sum of (hit - p) is nearly normal."""
    classes = p.shape[1]
    surplus = (np.eye(classes)[drawn] - p).sum(0)[:-1]
    covariance = (np.diag(p.sum(0)) - p.T @ p)[:-1, :-1]
    return float(chi2.sf(surplus @ np.linalg.solve(covariance, surplus), classes - 1))


def test_the_statistic_catches_greedy_acceptance() -> None:
    """A tenth of the draws replaced by the likeliest token."""
    generator = np.random.default_rng(1)
    p = generator.dirichlet(np.ones(6), size=3000)
    fair = (p.cumsum(1) > generator.random((3000, 1))).argmax(1)
    order = np.argsort(-p, axis=1)
    sorted_p = np.take_along_axis(p, order, axis=1)
    greedy = np.where(generator.random(3000) < 0.1, order[:, 0], fair)
    assert chi_square(p, fair) > FALSE_ALARM
    assert chi_square(sorted_p, (order == fair[:, None]).argmax(1)) > FALSE_ALARM
    assert chi_square(sorted_p, (order == greedy[:, None]).argmax(1)) < FALSE_ALARM

"""Requests, their answers by the oracle, and the comparison. A near-tie is screened on the oracle alone."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

from tests.e2e.servers import SGLangServer

LEAST_GAP = 1e-3
TOLERANCE = 1e-4
TEXTS_AT_A_TIME = 9


@dataclass(frozen=True)
class Case:
    """One greedy request: prompt ids from a seed, and how much to write."""

    seed: int
    prompt_len: int
    max_new_tokens: int
    ignore_eos: bool = True

    @property
    def prompt(self) -> list[int]:
        generator = random.Random(self.seed)
        return [generator.randrange(4, 1000) for _ in range(self.prompt_len)]

    def body(self, **ssd: object) -> dict:
        sampling = {"temperature": 0, "max_new_tokens": self.max_new_tokens, "ignore_eos": self.ignore_eos}
        if ssd:
            sampling["custom_params"] = {"ssd": ssd}
        return {
            "input_ids": self.prompt,
            "sampling_params": sampling,
            "return_logprob": True,
            "top_logprobs_num": 2,
        }


class Oracle:
    """Answers of the reference server, asked once per case."""

    def __init__(self, server: SGLangServer) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._ask = cache(lambda case: server.generate(**case.body()))

    def answer(self, case: Case) -> dict:
        with self._lock:
            return self._ask(case)

    def clear(self, case: Case) -> bool:
        """Whether the oracle's best two logprobs are well apart at every position: no near-tie."""
        tops = self.answer(case)["meta_info"]["output_top_logprobs"]
        return all(best[0] - second[0] > LEAST_GAP for best, second in tops)

    def clear_cases(self, cases: list[Case]) -> list[Case]:
        """The cases without near-ties; most must be left, or the models are no good."""
        left = [case for case in cases if self.clear(case)]
        assert len(left) > 0.7 * len(cases)
        return left


def differences(answer: dict, expected: dict) -> list[str]:
    """What of an answer is not as the oracle says: tokens, text, logprobs, finish reason, usage."""
    found = [key for key in ("output_ids", "text") if answer[key] != expected[key]]
    meta, meta_expected = answer["meta_info"], expected["meta_info"]
    found += [k for k in ("finish_reason", "prompt_tokens", "completion_tokens") if meta[k] != meta_expected[k]]
    for key in ("output_token_logprobs", "output_top_logprobs"):
        if not _near(meta.get(key), meta_expected.get(key)):
            found.append(key)
    return found


def _near(left: object, right: object) -> bool:
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(_near(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, float) and isinstance(right, float):
        return abs(left - right) <= TOLERANCE
    return left == right


def run_staggered(server: SGLangServer, bodies: list[dict], *, at_a_time: int = TEXTS_AT_A_TIME) -> list[dict]:
    """Send ``bodies`` with uneven gaps, at most ``at_a_time`` in flight; answers in order."""

    def send(index: int) -> dict:
        time.sleep(0.007 * (index * 7919 % 11))  # the load's own rhythm, not a synchronisation
        return server.generate(**bodies[index])

    with ThreadPoolExecutor(at_a_time) as pool:
        return list(pool.map(send, range(len(bodies))))

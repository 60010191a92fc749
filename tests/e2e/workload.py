"""Requests, their answers by the oracle, and the comparison. A near-tie is screened on the oracle alone."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import requests

from tests.e2e.servers import SGLangServer

LEAST_GAP = 1e-3
TOLERANCE = 1e-4
TEXTS_AT_A_TIME = 9
USAGE = ("finish_reason", "prompt_tokens", "completion_tokens", "reasoning_tokens")
LOGPROBS = tuple(
    f"{where}_{what}"
    for where in ("input", "output")
    for what in ("token_logprobs", "top_logprobs", "token_ids_logprobs")
)


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
        """Whether the oracle's answer has no near-tie."""
        return _is_clear(self.answer(case))

    def clear_cases(self, cases: list[Case]) -> list[Case]:
        """The cases without near-ties; most must be left, or the models are no good."""
        left = [case for case in cases if self.clear(case)]
        assert len(left) > 0.7 * len(cases)
        return left


def without_speculation(body: dict) -> dict:
    """The same request with speculation off."""
    sampling = body["sampling_params"]
    custom_params = sampling.get("custom_params", {}) | {"ssd": {"enabled": False}}
    return body | {"sampling_params": sampling | {"custom_params": custom_params}}


def clear(oracle: SGLangServer, body: dict) -> bool:
    """Whether the oracle's best two logprobs are well apart wherever a greedy request writes: no near-tie."""
    answers = oracle.generate(**body | {"return_logprob": True, "top_logprobs_num": 2})
    return all(map(_is_clear, answers if isinstance(answers, list) else [answers]))


def _is_clear(answer: dict) -> bool:
    return all(best[0] - second[0] > LEAST_GAP for best, second in answer["meta_info"]["output_top_logprobs"])


def differences(answer: dict | list[dict], expected: dict | list[dict]) -> list[str]:
    """What of an answer is not as expected: tokens, text, logprobs, finish reason, usage. Of all, if it has samples."""
    if isinstance(answer, list) and isinstance(expected, list) and len(answer) == len(expected):
        return [found for pair in zip(answer, expected, strict=True) for found in differences(*pair)]
    keys = ("output_ids", "text", *USAGE, *LOGPROBS)
    left, right = (each | each["meta_info"] for each in (answer, expected))
    return [_difference(key, left.get(key), right.get(key)) for key in keys if not _near(left.get(key), right.get(key))]


def _difference(key: str, left: object, right: object) -> str:
    """Where two unequal values part."""
    if isinstance(left, list) and isinstance(right, list):
        at = next((i for i, pair in enumerate(zip(left, right, strict=False)) if not _near(*pair)), "end")
        return f"{key}[{at}]: {left[at:][:1]} is not {right[at:][:1]}" if at != "end" else f"{key}: its length"
    return f"{key}: {left} is not {right}"


def _near(left: object, right: object) -> bool:
    if isinstance(left, list) and isinstance(right, list):
        if _impossible(left) and _impossible(right):
            return True
        return len(left) == len(right) and all(_near(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, float) and isinstance(right, float):
        return abs(left - right) <= TOLERANCE
    return left == right


def _impossible(entry: list) -> bool:
    """A [logprob, id, text] of a masked token. Which of them fill up a top list is left to the sort."""
    return bool(entry) and isinstance(entry[0], float) and entry[0] < -1e29


def run_staggered(server: SGLangServer, bodies: list[dict], *, at_a_time: int = TEXTS_AT_A_TIME) -> list[dict]:
    """Send ``bodies`` with uneven gaps, at most ``at_a_time`` in flight; answers in order."""

    def send(index: int) -> dict:
        time.sleep(0.007 * (index * 7919 % 11))  # the load's own rhythm, not a synchronisation
        return server.generate(**bodies[index])

    with ThreadPoolExecutor(at_a_time) as pool:
        return list(pool.map(send, range(len(bodies))))


def abandon(server: SGLangServer, case: Case, *, after_s: float) -> None:
    """Ask for a stream, read its first line, and hang up after ``after_s`` without one."""
    body = case.body() | {"stream": True}
    with (
        contextlib.suppress(requests.RequestException),
        requests.post(f"{server.url}/generate", json=body, stream=True, timeout=(60, after_s)) as answer,
    ):
        next(answer.iter_lines(), None)

"""What is read from streams and from two readings of the status."""

from __future__ import annotations

import asyncio
import json

import psutil
import pytest
from aiohttp import web

from sglang_ssd.bench.load import Answer, Ask, LoadError, play
from sglang_ssd.bench.measure import client_figures, decode_part, full_part, measure, server_figures

ASK = Ask("own", (1, 2, 3), 8, 0.0, 1)


def answer(*events: tuple[float, int], sent: float = 0.0) -> Answer:
    return Answer(ASK, sent, list(events), "length")


def test_decode_counts_whole_rounds_under_the_overlap_loop() -> None:
    """Each forward of 1 s gives 2 tokens; its event comes after the next forward, the last two together."""
    stream = answer((2.0, 1), (3.0, 3), (4.0, 5), (5.0, 7), (5.001, 9))
    assert decode_part([stream]) == {"s": 3.0, "tokens": 6}


def test_decode_counts_whole_rounds_without_overlap() -> None:
    stream = answer((1.0, 1), (2.0, 3), (3.0, 5), (4.0, 7), (5.0, 9))
    assert decode_part([stream]) == {"s": 3.0, "tokens": 6}


def test_decode_begins_when_the_last_request_has_its_first_token_and_keeps_early_ends() -> None:
    early = answer((1.0, 1), (2.0, 2), (3.0, 3), (4.0, 4))
    late = answer((2.001, 1), (3.001, 2), (4.001, 3), (5.0, 4), (6.0, 5), (6.001, 6))
    # From 2.001 to 6.0: two tokens of the one that ended early, four of the other, not its last event.
    assert decode_part([early, late]) == {"s": 3.999, "tokens": 6}


def test_a_block_of_single_tokens_has_no_decode_part() -> None:
    assert decode_part([answer((1.0, 1)), answer((1.1, 1))])["tokens"] == 0


def test_a_batch_is_full_while_three_quarters_of_it_decode() -> None:
    """Under the overlap loop, rounds of 1 s: four answers end after 4, 6, 8 and 8 of them, two tokens each."""
    answers = [
        answer(*((float(at), 2 * at - 1) for at in range(1, rounds + 1)), (rounds + 0.001, 2 * rounds + 1))
        for rounds in (4, 6, 8, 8)
    ]
    # From 1 to 6, when the second one ends: the first has 4 rounds in it and one more that is never timed apart,
    # the others have 5 each.
    assert full_part(answers) == {"s": 5.0, "tokens": 8 + 3 * 10}
    assert full_part(answers[:1]) == decode_part(answers[:1]) == {"s": 3.0, "tokens": 6}
    assert full_part(answers[:3])["s"] == 3.0
    assert decode_part(answers)["s"] == 7.0


def test_client_figures() -> None:
    figures = client_figures([answer((0.5, 1), (0.7, 3), (0.8, 4), sent=0.1)])
    assert figures["wall_s"] == 0.7
    assert figures["tokens"] == 4
    assert figures["requests"] == [
        {"data_set": "own", "prompt": 3, "tokens": 4, "finish": "length", "ttft_ms": 400.0, "tpot_ms": 100.0}
    ]
    assert figures["itl_ms"] == [200.0, 100.0]


def status(forwards: int, verify_ms: float, hits: int, draft_forwards: int) -> dict:
    return {
        "rounds": 2 * hits, "hits": hits, "partial": 0, "forwards": forwards, "narrow_forwards": 0, "timeouts": 0,
        "misses": {"jit": hits, "total": hits} if hits else {"total": 0},
        "accepted_per_position": [hits, 0], "verified_per_position": [2 * hits, hits],
        "round_ms": {"verify": verify_ms, "wait": 0.0, "other": 0.0},
        "draft_figures": {"forwards": draft_forwards},
    }  # fmt: skip


def test_server_figures_are_differences_and_parts_are_totals_again() -> None:
    figures = server_figures(status(10, 100.0, 0, 7), status(30, 200.0, 4, 12))
    assert figures["server"]["parts_s"]["verify"] == pytest.approx(30 * 0.2 - 10 * 0.1)
    assert figures["server"]["misses"] == {"jit": 4, "total": 4}
    assert figures["server"]["verified_per_position"] == [8, 4]
    assert figures["draft"]["forwards"] == 5
    assert server_figures({"mode": "off"}, {"mode": "off"}) == {}


def served(handler, work):
    """``work(url)`` in a thread while an aiohttp server answers ``/generate`` with ``handler``."""

    async def main():
        app = web.Application()
        app.router.add_post("/generate", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        try:
            return await asyncio.to_thread(work, f"http://127.0.0.1:{port}")
        finally:
            await runner.cleanup()

    return asyncio.run(main())


def test_play_sends_all_at_once_and_notes_every_event_that_brings_tokens() -> None:
    bodies, together = [], asyncio.Event()

    async def handler(request):
        bodies.append(await request.json())
        if len(bodies) == 2:
            together.set()
        await asyncio.wait_for(together.wait(), 5)
        response = web.StreamResponse()
        await response.prepare(request)
        for count, reason in ((1, None), (3, None), (3, {"type": "stop"})):
            event = {"meta_info": {"completion_tokens": count, "finish_reason": reason}}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    asks = [ASK, Ask("own", (4,), 8, 0.7, 5, num_steps=2)]
    answers = served(handler, lambda url: play(url, asks))
    assert [[tokens for _, tokens in each.events] for each in answers] == [[1, 3], [1, 3]]
    assert [each.finish for each in answers] == ["stop", "stop"]
    by_length = {len(body["input_ids"]): body["sampling_params"] for body in bodies}
    assert "custom_params" not in by_length[3]
    assert by_length[1]["custom_params"] == {"ssd": {"num_steps": 2}}
    assert by_length[1]["temperature"] == 0.7
    assert "ignore_eos" not in by_length[1]


def one_token(seen: list[int]):
    """Answers after a while; notes in ``seen`` how many requests are under way when one comes."""
    under_way = 0

    async def handler(request):
        nonlocal under_way
        under_way += 1
        seen.append(under_way)
        await asyncio.sleep(0.02)
        event = {"meta_info": {"completion_tokens": 1, "finish_reason": {"type": "stop"}}}
        under_way -= 1
        return web.Response(text=f"data: {json.dumps(event)}\n\n", content_type="text/event-stream")

    return handler


def test_play_sends_the_next_request_when_one_has_ended() -> None:
    seen: list[int] = []
    answers = served(one_token(seen), lambda url: play(url, [ASK] * 7, at_once=2))
    assert len(answers) == len(seen) == 7
    assert max(seen) == 2
    assert min(each.sent for each in answers[2:]) > min(each.first for each in answers)


class IdleServer:
    """One without speculation, at ``url``."""

    def __init__(self, url: str) -> None:
        self.url = url

    def flush(self) -> None:
        pass

    def status(self) -> dict[str, str]:
        return {"mode": "off"}

    def processes(self) -> dict[str, list[psutil.Process]]:
        return {}


def test_a_block_of_so_many_at_once_is_played_so() -> None:
    seen: list[int] = []
    record = served(one_token(seen), lambda url: measure(IdleServer(url), [ASK] * 6, at_once=3))
    assert record["tokens"] == 6
    assert max(seen) == 3


def test_a_refused_request_is_an_error() -> None:
    async def handler(request):
        return web.Response(status=400, text="too long")

    with pytest.raises(LoadError, match="HTTP 400: too long"):
        served(handler, lambda url: play(url, [ASK]))

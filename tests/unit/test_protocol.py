"""Columns on the wire: what was said is what is read, and whatever does not fit together is refused as a whole."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from sglang_ssd.protocol import (
    PROTOCOL_VERSION,
    BadFrame,
    Build,
    Outcome,
    Outcomes,
    Prefill,
    Sampling,
    Speculation,
    Speculations,
    decode_at_draft,
    decode_at_target,
    encode,
    pack_floats,
    pack_tokens,
    version_of_hello,
)
from tests.support import hello

OUTCOMES = (
    Outcome((1 << 62) + 1, 3, 100, 4, 1 << 40, pack_tokens([1, 2, 3])),
    Outcome(2, 1, 7, 0, 0, b""),
    Outcome(3, 1, 7, 0, 5, pack_tokens([9])),
)
SPECULATIONS = (
    Speculation(1 << 62, 3, 100, "hit", pack_tokens([4, 5]), pack_tokens([4, 1, 5, 1]), pack_floats([0.5, 0.5, 1, 0])),
    Speculation(2, 1, 8, "none", b""),
    Speculation(3, 1, 8, "ngram", pack_tokens([7])),
)


def outcomes() -> Outcomes:
    return Outcomes.of(5, 6, 7, ("jit", "none"), OUTCOMES, (2, 0), 4)


def speculations() -> Speculations:
    return Speculations.of(5, 6, SPECULATIONS, Build(steps=((1, 2),)))


def test_outcomes_of_many_requests_are_columns() -> None:
    message = decode_at_draft(encode(outcomes()))
    assert message == outcomes()
    assert isinstance(message, Outcomes)
    assert message.rows == (OUTCOMES[0]._replace(remaining=2**31 - 1), *OUTCOMES[1:])
    assert message.columns().ends.tolist() == [3, 3, 4]


def test_speculations_of_many_requests_are_columns_and_bring_their_q() -> None:
    message = decode_at_target(encode(speculations()))
    assert isinstance(message, Speculations)
    assert message.rows == SPECULATIONS
    assert message.columns().q_ends.tolist() == [4, 4, 4]


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (outcomes(), {"session": b"1234567"}),
        (outcomes(), {"base": pack_tokens([1, 2])}),
        (outcomes(), {"counts": pack_tokens([3, 0, 2])}),
        (outcomes(), {"counts": pack_tokens([5, -2, 1])}),
        (outcomes(), {"counts": pack_tokens([4])}),
        (outcomes(), {"tokens": b"abc"}),
        (speculations(), {"epoch": b""}),
        (speculations(), {"source": pack_tokens([1, 0, 5])}),
        (speculations(), {"source": pack_tokens([1, 0, -1])}),
        (speculations(), {"tokens": pack_tokens([4, 5])}),
        (speculations(), {"q_width": pack_tokens([2, 0, 1])}),
        (speculations(), {"q_width": pack_tokens([-2, 0, 0])}),
        (speculations(), {"q_ids": speculations().q_ids[:-1]}),
        (speculations(), {"q": pack_floats([0.5, 0.5, 1, float("nan")])}),
    ],
)
def test_columns_that_do_not_fit_are_refused(message: Outcomes | Speculations, changes: dict[str, bytes]) -> None:
    with pytest.raises(BadFrame):
        _ = msgspec.structs.replace(message, **changes).rows


def test_no_rows_are_a_message_too() -> None:
    assert Outcomes.of(1, 1, 0, (), ()).rows == ()
    assert Speculations.of(1, 1, (), Build()).rows == ()


def test_a_hello_of_any_version_says_its_version() -> None:
    """Older ones had fewer fields; of later ones nobody knows the rest."""
    assert version_of_hello(encode(hello())) == PROTOCOL_VERSION
    assert version_of_hello(msgspec.msgpack.encode(["hello", 1])) == 1
    assert version_of_hello(msgspec.msgpack.encode(["hello", 99, {"new": [1.5]}, None])) == 99
    others = (b"", b"\xc1", encode(Prefill(1, 2, 3, b"", Sampling())), msgspec.msgpack.encode({"hello": 1}))
    assert [version_of_hello(frame) for frame in others] == [None] * 4
    assert version_of_hello(msgspec.msgpack.encode(["hello", "4"])) is None


def test_a_token_block_is_int32() -> None:
    assert np.frombuffer(outcomes().tokens, "<i4").tolist() == [1, 2, 3, 9]

"""The wire between the scheduler (target side, DEALER) and the draft server (ROUTER).

Every message is one MessagePack array that begins with its tag, so decoding is validation: a frame that is
not one of these raises :class:`BadFrame` and nothing else. What a message says of many requests travels as columns:
little-endian int32 bytes (int64 for sessions), one value a request, and the tokens of all requests behind one another.

Two messages never change, whatever the version: ``["hello", version, ...]`` and ``["refused", reason, hello_again]``.
So a server can answer a target of any version, older or newer, in a sentence: see :func:`version_of_hello`.

Lengths: a request's *length* counts its committed tokens, prompt and output, the pending bonus token
included. ``base`` is such a length; a speculation with base ``n`` proposes the tokens at positions ``n, n+1, ...``

One round may be answered by several Speculations: what was prepared at once, what is drafted on demand when it is
done. A row with base 0 (source ``none``) says that the draft server does not know the session, or not the text that
the outcome continues: the target sends a Prefill under a new epoch if it still wants drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

PROTOCOL_VERSION = 4
MAX_LEGAL = 64
"""Where a grammar allows more tokens than this, a Legal message does not list them."""

MAX_FRAME_BYTES = 64 << 20
"""Upper bound for one frame (a prompt of 16 M tokens); both sockets refuse more (``ZMQ_MAXMSGSIZE``)."""

Tokens: TypeAlias = NDArray[np.int32]
Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float32]


class BadFrame(ValueError):
    """The frame is no message of this protocol version; count it, log it at a bounded rate, drop it."""


class Sampling(msgspec.Struct, array_like=True, frozen=True):
    """What the draft needs to draw as the target will. Temperature 0 is greedy; ``seed`` keys the noise.

    A ``top_k`` of 2^30 and more keeps all. The logit bias is sparse: token ids as int32, their values as float32.
    """

    temperature: float = 0.0
    seed: int = 0
    top_k: int = 1 << 30
    top_p: float = 1.0
    min_p: float = 0.0
    bias_ids: bytes = b""
    bias: bytes = b""


class Hello(msgspec.Struct, array_like=True, tag="hello", frozen=True):
    """T->D, first message of a connection: who asks, and for what.

    ``verify`` is ``coupled`` or ``rejection``; then a draft token is sampled from a q of at most ``support`` tokens,
    of which the likeliest are weighed down by ``saguaro_c``, and q comes with it. ``planner`` says which outcomes are
    prepared: a name in :mod:`sglang_ssd.policy.planners`.
    """

    version: int
    vocab_size: int
    fingerprint: str
    num_steps: int
    verify: str
    mode: str
    wait: str
    fan_out: int
    target: str
    support: int = 64
    saguaro_c: float = 1.0
    planner: str = "confidence"


class Welcome(msgspec.Struct, array_like=True, tag="welcome", frozen=True):
    """D->T: accepted. ``boot`` names this run of the draft server; every later message echoes it."""

    boot: int
    draft: str
    vocab_size: int
    context_length: int
    capacity: int


class Refused(msgspec.Struct, array_like=True, tag="refused", frozen=True):
    """D->T: not accepted (or an unknown ``boot``: say Hello again), and why, in one sentence."""

    reason: str
    hello_again: bool = False


class Prefill(msgspec.Struct, array_like=True, tag="prefill", frozen=True):
    """T->D: the authoritative tokens of a session. A new epoch replaces whatever was known of it.

    ``num_steps`` is the most drafts that this request takes in a round; 0 leaves it to the Hello.
    """

    boot: int
    session: int
    epoch: int
    tokens: bytes
    sampling: Sampling
    num_steps: int = 0


class Outcome(NamedTuple):
    """One request's part of a round: ``tokens`` (int32 bytes) is all that was committed since ``base``, the length that
    the draft last confirmed. Normally that is k accepted drafts and the bonus token. ``remaining`` is how many
    more tokens the request may emit: a speculation longer than ``remaining - 1`` is wasted.
    """

    session: int
    epoch: int
    base: int
    verified_len: int
    remaining: int
    tokens: bytes


class OutcomeColumns(NamedTuple):
    """The outcomes of R requests: all [R], int64, but the tokens, int32; those of request i are
    ``tokens[ends[i] - counts[i] : ends[i]]``.
    """

    session: Ints
    epoch: Ints
    base: Ints
    verified_len: Ints
    remaining: Ints
    counts: Ints
    ends: Ints
    tokens: Tokens


class Outcomes(msgspec.Struct, array_like=True, tag="outcomes", frozen=True):
    """T->D: how a forward ended, and what the next round is to be.

    ``fallback[i]`` answers a round with ``i + 1`` missed rows (the last entry also answers more): ``jit``, ``ngram`` or
    ``none``; ``jit_steps[i]`` is how many tokens it may draft then, all that are of use where there is no entry.
    ``num_steps`` is K of the next round. ``verify_us`` is the target's next forward in microseconds, 0 if unknown. The
    columns are those of :class:`OutcomeColumns`.
    """

    boot: int
    round: int
    verify_us: int
    fallback: tuple[str, ...]
    jit_steps: tuple[int, ...]
    num_steps: int
    session: bytes
    epoch: bytes
    base: bytes
    verified_len: bytes
    remaining: bytes
    counts: bytes
    tokens: bytes

    @classmethod
    def of(
        cls,
        boot: int,
        round: int,
        verify_us: int,
        fallback: tuple[str, ...],
        rows: Sequence[Outcome],
        jit_steps: tuple[int, ...] = (),
        num_steps: int = 1 << 30,
    ) -> Outcomes:
        """From rows."""
        session = _packed(rows, attrgetter("session"), "<i8")
        epoch, base, verified = (_packed(rows, attrgetter(name)) for name in ("epoch", "base", "verified_len"))
        left = _packed(rows, attrgetter("remaining"))
        tokens, counts = _joined([row.tokens for row in rows])
        return cls(
            boot, round, verify_us, fallback, jit_steps, num_steps, session, epoch, base, verified, left, counts, tokens
        )

    def columns(self) -> OutcomeColumns:
        """The rows as arrays. Raises BadFrame when the columns do not fit one another."""
        session = _column(self.session, "<i8")
        epoch, base, verified, left = map(_column, (self.epoch, self.base, self.verified_len, self.remaining))
        counts, ends, tokens = _blocks(self.counts, self.tokens)
        if any(len(column) != len(session) for column in (epoch, base, verified, left, counts)):
            raise BadFrame("columns of outcomes differ in length")
        return OutcomeColumns(session, epoch, base, verified, left, counts, ends, tokens)

    @property
    def rows(self) -> tuple[Outcome, ...]:
        """One by one. Raises BadFrame."""
        at = self.columns()
        numbers = zip(*(column.tolist() for column in at[:5]), strict=True)
        return tuple(
            Outcome(*row, _part(at.tokens, at.ends[i], at.counts[i]))  # type: ignore[call-arg]
            for i, row in enumerate(numbers)
        )


class LegalRow(msgspec.Struct, array_like=True, frozen=True):
    """What a grammar lets follow the text of length ``base`` and its chain in flight.

    ``counts[k]`` is how many tokens may follow exactly k accepted drafts, at most ``MAX_LEGAL``; -1: more, or unknown.
    ``tokens`` are those tokens, one position after another.
    """

    session: int
    epoch: int
    base: int
    counts: tuple[int, ...]
    tokens: bytes


class Legal(msgspec.Struct, array_like=True, tag="legal", frozen=True):
    """T->D, when a forward begins: the structured requests in it for which few tokens are legal somewhere. Nothing
    depends on it but which guesses are worth a branch.
    """

    boot: int
    rows: tuple[LegalRow, ...]


SOURCES = ("none", "hit", "partial", "jit", "ngram")
"""What made an answer; it travels as the place in this list. ``none`` has no tokens."""


class Speculation(NamedTuple):
    """One request's answer. ``source`` is one of ``SOURCES``.

    Of tokens that were sampled, q comes with them: M ids (int32) and M probabilities (float32) for each, a 0 where q
    has fewer. Both are empty where the tokens are a deterministic proposal.
    """

    session: int
    epoch: int
    base: int
    source: str
    tokens: bytes
    q_ids: bytes = b""
    q: bytes = b""


class Build(msgspec.Struct, array_like=True, frozen=True):
    """Running totals of one draft server for one target, so that any window can be computed.

    ``rows`` are tokens run for branches and drafts, ``path_rows`` those run because the text or the chain served had no
    KV there yet: together all that ``forwards`` decoded. Prefill chunks are not in it. ``steps`` are (rows,
    microseconds) of a draft step, for every size of step that was seen.
    """

    forwards: int = 0
    rows: int = 0
    path_rows: int = 0
    forward_us: int = 0
    steps: tuple[tuple[int, int], ...] = ()


class SpeculationColumns(NamedTuple):
    """The answers to R requests: all [R], int64, ``source`` a place in ``SOURCES``, ``q_width`` M of each, 0 without q.

    The tokens of request i are ``tokens[ends[i] - counts[i] : ends[i]]``; its q is ``q_ids`` and ``q`` (float32) from
    ``q_ends[i] - counts[i] * q_width[i]`` to ``q_ends[i]``.
    """

    session: Ints
    epoch: Ints
    base: Ints
    source: Ints
    counts: Ints
    ends: Ints
    tokens: Tokens
    q_width: Ints
    q_ends: Ints
    q_ids: Tokens
    q: Floats


class Speculations(msgspec.Struct, array_like=True, tag="speculations", frozen=True):
    """D->T: the answer to the Outcomes of ``round``. The columns are those of :class:`SpeculationColumns`."""

    boot: int
    round: int
    build: Build
    session: bytes
    epoch: bytes
    base: bytes
    source: bytes
    counts: bytes
    tokens: bytes
    q_width: bytes
    q_ids: bytes
    q: bytes

    @classmethod
    def of(cls, boot: int, round: int, rows: Sequence[Speculation], build: Build) -> Speculations:
        """From rows."""
        tokens, counts = _joined([row.tokens for row in rows])
        widths = [len(row.q_ids) // len(row.tokens) if row.tokens else 0 for row in rows]
        return cls(
            boot=boot,
            round=round,
            build=build,
            session=_packed(rows, attrgetter("session"), "<i8"),
            epoch=_packed(rows, attrgetter("epoch")),
            base=_packed(rows, attrgetter("base")),
            source=_packed(rows, lambda row: SOURCES.index(row.source)),
            counts=counts,
            tokens=tokens,
            q_width=pack_tokens(widths),
            q_ids=b"".join(row.q_ids for row in rows),
            q=b"".join(row.q for row in rows),
        )

    def columns(self) -> SpeculationColumns:
        """The rows as arrays. Raises BadFrame when the columns do not fit one another."""
        session = _column(self.session, "<i8")
        epoch, base, source, q_width = map(_column, (self.epoch, self.base, self.source, self.q_width))
        counts, ends, tokens = _blocks(self.counts, self.tokens)
        if any(len(column) != len(session) for column in (epoch, base, source, q_width, counts)):
            raise BadFrame("columns of speculations differ in length")
        if len(source) and (source.min() < 0 or source.max() >= len(SOURCES) or q_width.min() < 0):
            raise BadFrame("an answer has a source or a width of q that does not exist")
        q_ids, q, q_ends = _column(self.q_ids, "<i4", np.int32), unpack_floats(self.q), np.cumsum(counts * q_width)
        if not len(q_ids) == len(q) == (q_ends[-1] if len(q_ends) else 0):
            raise BadFrame("the probabilities of draft tokens do not fit their number")
        return SpeculationColumns(session, epoch, base, source, counts, ends, tokens, q_width, q_ends, q_ids, q)

    @property
    def rows(self) -> tuple[Speculation, ...]:
        """One by one. Raises BadFrame."""
        at, found = self.columns(), []
        for i, source in enumerate(at.source.tolist()):
            tokens = _part(at.tokens, at.ends[i], at.counts[i])
            q = [_part(part, at.q_ends[i], at.counts[i] * at.q_width[i]) for part in (at.q_ids, at.q)]
            who = int(at.session[i]), int(at.epoch[i]), int(at.base[i])
            found.append(Speculation(*who, SOURCES[source], tokens, *q))
        return tuple(found)


class Close(msgspec.Struct, array_like=True, tag="close", frozen=True):
    """T->D: these sessions have ended."""

    boot: int
    sessions: tuple[int, ...]


class Reset(msgspec.Struct, array_like=True, tag="reset", frozen=True):
    """T->D: forget every session of this target and every cached prefix (flush_cache, weight update)."""

    boot: int


class Ping(msgspec.Struct, array_like=True, tag="ping", frozen=True):
    """T->D: are you there?"""

    nonce: int


class Pong(msgspec.Struct, array_like=True, tag="pong", frozen=True):
    """D->T, from the I/O thread: alive; ``busy_us`` is how long the present forward has run; figures to report."""

    boot: int
    nonce: int
    busy_us: int
    figures: dict[str, int]


ToDraft: TypeAlias = Hello | Prefill | Legal | Outcomes | Close | Reset | Ping
ToTarget: TypeAlias = Welcome | Refused | Speculations | Pong

_encoder = msgspec.msgpack.Encoder()
_to_draft: msgspec.msgpack.Decoder[ToDraft] = msgspec.msgpack.Decoder(ToDraft)
_to_target: msgspec.msgpack.Decoder[ToTarget] = msgspec.msgpack.Decoder(ToTarget)


def encode(message: ToDraft | ToTarget) -> bytes:
    """One frame for ``message``."""
    return _encoder.encode(message)


def decode_at_draft(frame: bytes) -> ToDraft:
    """The message that a target sent. Raises BadFrame."""
    try:
        return _to_draft.decode(frame)
    except msgspec.DecodeError as error:
        raise BadFrame(str(error)) from error


def decode_at_target(frame: bytes) -> ToTarget:
    """The message that a draft server sent. Raises BadFrame."""
    try:
        return _to_target.decode(frame)
    except msgspec.DecodeError as error:
        raise BadFrame(str(error)) from error


def version_of_hello(frame: bytes) -> int | None:
    """The version in a Hello of any version; None for a frame that is no Hello. See the module's first lines."""
    try:
        message = msgspec.msgpack.decode(frame)
    except msgspec.DecodeError:
        return None
    if isinstance(message, list) and message[:1] == ["hello"] and len(message) > 1 and isinstance(message[1], int):
        return message[1]
    return None


def other_version(version: int) -> str:
    """Why a draft server refuses a target that speaks another version."""
    return (
        f"the target speaks protocol version {version}, this draft server {PROTOCOL_VERSION}: "
        "install the same sglang_ssd on both sides"
    )


def pack_tokens(tokens: Sequence[int] | Tokens) -> bytes:
    """Token ids as little-endian int32 bytes."""
    return np.asarray(tokens, dtype="<i4").tobytes()


def unpack_tokens(block: bytes, vocab_size: int) -> Tokens:
    """Token ids [n] int32. Raises BadFrame when the block is cut or an id is outside ``[0, vocab_size)``."""
    if len(block) % 4:
        raise BadFrame(f"a token block of {len(block)} bytes is no whole number of int32")
    tokens = np.frombuffer(block, dtype="<i4")
    if tokens.size and tokens.view("<u4").max() >= vocab_size:  # unsigned, negative ids are the largest
        raise BadFrame(f"a token id is outside [0, {vocab_size})")
    return tokens


def pack_floats(values: Sequence[float] | Floats) -> bytes:
    """Numbers as little-endian float32 bytes."""
    return np.asarray(values, dtype="<f4").tobytes()


def unpack_floats(block: bytes) -> Floats:
    """Numbers [n] float32. Raises BadFrame when the block is cut or one of them is not finite."""
    if len(block) % 4:
        raise BadFrame(f"a block of {len(block)} bytes is no whole number of float32")
    values = np.frombuffer(block, dtype="<f4")
    if not np.isfinite(values).all():
        raise BadFrame("a number is not finite")
    return values


def _packed(rows: Sequence[Any], value: Callable[[Any], int], dtype: str = "<i4") -> bytes:
    """A column of ``rows``; what does not fit is as large as it can be."""
    highest = np.iinfo(dtype).max
    return np.array([min(value(row), highest) for row in rows], dtype=dtype).tobytes()


def _joined(blocks: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Token blocks behind one another, and the column of their lengths."""
    return b"".join(blocks), pack_tokens([len(block) // 4 for block in blocks])


def _column(block: bytes, dtype: str = "<i4", into: type[np.integer[Any]] = np.int64) -> NDArray[Any]:
    """A column as an array. Raises BadFrame when it is cut."""
    if len(block) % np.dtype(dtype).itemsize:
        raise BadFrame(f"a column of {len(block)} bytes is no whole number of {dtype}")
    return np.frombuffer(block, dtype=dtype).astype(into, copy=False)


def _part(flat: NDArray[Any], end: int, count: int) -> bytes:
    return flat[end - count : end].tobytes()


def _blocks(counts: bytes, tokens: bytes) -> tuple[Ints, Ints, Tokens]:
    """Lengths and ends of the parts of one block of tokens. Raises BadFrame when they do not fit."""
    lengths, flat = _column(counts), _column(tokens, "<i4", np.int32)
    ends = np.cumsum(lengths)
    if (len(lengths) and lengths.min() < 0) or len(flat) != (ends[-1] if len(ends) else 0):
        raise BadFrame(f"{len(flat)} tokens do not fit their counts")
    return lengths, ends, flat


FIGURES_KEY = "ssd"
"""Name under which a request's (rounds, hits, partial, misses) travel from the scheduler to the HTTP process."""

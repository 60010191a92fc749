"""The order of a run: cells in turn, variants alternating inside a block, and which K of ``sync`` still takes part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from sglang_ssd.bench.settings import OFF, SSD, STANDALONE, SYNC, Cell, Plan


@dataclass(frozen=True)
class Variant:
    """What is compared: a server, and the limit that its requests ask for."""

    name: str
    server: str
    num_steps: int | None = None


@dataclass(frozen=True)
class Block:
    """The ``number``-th time that a cell is measured: all variants on the same prompts."""

    cell: Cell
    number: int


OFF_VARIANT, SSD_VARIANT = Variant(OFF, OFF), Variant(SSD, SSD)


def sync_variant(num_steps: int) -> Variant:
    """``sync`` with at most so many drafts a round."""
    return Variant(f"{SYNC} K={num_steps}", SYNC, num_steps)


def steps_of(variant: str) -> int:
    """The K in the name of a :func:`sync_variant`."""
    return int(variant.partition("=")[2])


def blocks_in_turn(cells: Sequence[Cell]) -> list[Block]:
    """Every block of every cell, those first whose cell has had the smaller part of its own."""
    everything = [(cell, number) for cell in cells for number in range(cell.blocks)]
    everything.sort(key=lambda item: (item[1] / item[0].blocks, item[1]))
    return [Block(cell, number) for cell, number in everything]


def variants_of(block: Block, plan: Plan, records: Sequence[dict[str, Any]]) -> list[Variant]:
    """Who takes part in ``block``, in its order: each starts first as often as the others.

    ``sync`` is tried with every K in the first quarter of a cell's blocks and with the two that have been fastest there
    so far in the second; afterwards the fastest stands for it.
    """
    steps = _best_steps(block.cell, records)
    if not steps or 4 * block.number < block.cell.blocks:
        steps = list(plan.sync_steps)
    elif 2 * block.number < block.cell.blocks:
        steps = steps[:2]
    else:
        steps = steps[:1]
    variants = [OFF_VARIANT, *map(sync_variant, steps), SSD_VARIANT]
    if plan.standalone_flags:
        variants.append(Variant(STANDALONE, STANDALONE))
    turn = block.number % len(variants)
    return variants[turn:] + variants[:turn]


def _best_steps(cell: Cell, records: Sequence[dict[str, Any]]) -> list[int]:
    """K of ``sync`` at this batch size, temperature and loop, fastest first; empty before any was tried.

    Rates are compared to those of ``off`` in the same block, so that a slow minute of the machine is nobody's fault.
    """
    rates: dict[int, dict[str, float]] = defaultdict(dict)
    for record in records:
        if record["cell"] == cell.key:
            rates[record["block"]][record["variant"]] = record["tokens"] / record["wall_s"]
    ratios: dict[int, list[float]] = defaultdict(list)
    for block in rates.values():
        for name, rate in block.items():
            if name.startswith(f"{SYNC} K=") and OFF in block:
                ratios[steps_of(name)].append(rate / block[OFF])
    return sorted(ratios, key=lambda steps: -geometric_mean(ratios[steps]))

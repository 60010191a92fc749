"""The results file: a line of JSON for the run, and one for each block of each variant, appended when it is done."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Key = tuple[str, int, str]
"""(cell, number of the block, variant)."""


class ResultsError(ValueError):
    """The file cannot be continued or read; the message says why and what to do."""


@dataclass
class Results:
    """A run's header and its records, in order; written as they come when it was made with :meth:`open`."""

    header: dict[str, Any]
    records: list[dict[str, Any]] = field(default_factory=list)
    path: Path | None = None

    @classmethod
    def open(cls, path: Path, header: dict[str, Any]) -> Results:
        """Go on with the file of the same plan, or begin it; a complete one is put aside. Raises ResultsError."""
        if path.exists():
            earlier = cls.read(path)
            if not earlier.complete:
                if earlier.header["plan"] != _as_read(header["plan"]):
                    raise ResultsError(f"{path.name} holds part of another plan: finish that, or delete the file.")
                if earlier.header["versions"] != header["versions"]:
                    raise ResultsError(f"{path.name} was begun with other versions: delete it.")
                return earlier
            path.replace(path.with_suffix(".previous.json"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(header) + "\n")
        return cls(header, [], path)

    @classmethod
    def read(cls, path: Path) -> Results:
        """A file's content; a last line that was cut off is dropped. Raises ResultsError."""
        lines = path.read_text().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        if len(whole) < len(lines):
            path.write_text("".join(whole))
        if not whole:
            raise ResultsError(f"{path.name} is empty: delete it.")
        header, *records = (json.loads(line) for line in whole)
        if not isinstance(header, dict) or "plan" not in header:
            raise ResultsError(f"{path.name} is no results file of this benchmark.")
        return cls(header, records, path)

    @property
    def complete(self) -> bool:
        """Whether the run came to its end."""
        return any(record.get("event") == "complete" for record in self.records)

    @property
    def blocks(self) -> list[dict[str, Any]]:
        """The records of measured blocks."""
        return [record for record in self.records if "cell" in record]

    def add(self, record: dict[str, Any]) -> None:
        """Append one record to the file."""
        self.records.append(record)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(record, separators=(",", ":")) + "\n")

    def done(self) -> set[Key]:
        """What need not be measured again."""
        return {(block["cell"], block["block"], block["variant"]) for block in self.blocks}

    def events(self, kind: str) -> Iterator[dict[str, Any]]:
        """Records that are no blocks."""
        return (record for record in self.records if record.get("event") == kind)


def _as_read(value: Any) -> Any:  # noqa: ANN401
    """Tuples become lists, as in a file."""
    return json.loads(json.dumps(value))

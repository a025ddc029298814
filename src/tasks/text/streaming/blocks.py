"""Tokenized blocks of rows, in a folder of bounded size that all processes of a machine fill and read together."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import main_thread

import numpy as np
import pyarrow as pa
from filelock import FileLock
from pyarrow import feather

from src.config.errors import RunError, UserError, naming
from src.tasks.text.packing import Chunk, ChunkLists
from src.tasks.text.reading import BLOCK, SKIP, Encoders, Source, read_text
from src.tasks.text.tokenizing import Chunker, Labelling

Maker = Chunker | Labelling
"""Makes the chunks of each row."""
ROOM = 0.9
"""Fraction of the limit that stays in use when blocks make room for others."""
LOCKS = 256
"""Number of lock files: blocks that share one are not made at the same time."""
POLL = 0.005
"""Seconds between two tries to get a lock."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """Makes blocks, and keeps them in the folder. The least recently used make room for new ones."""

    columns: Encoders
    """Columns that a row needs, and their encoders."""
    maker: Maker
    skips_bad_rows: bool
    key: str
    """Changes with all of these, and with the code that makes chunks."""
    folder: Path
    limit: int
    """Bytes that the folder may hold."""

    def read(self, source: Source, rows: np.ndarray) -> Iterator[list[Chunk]]:
        """Yield the chunks of each of these rows, one or more; the only one of an unusable row has a `length` of 0.
        Raise a UserError that names the row if it may not be skipped."""
        ends = np.cumsum(source.sizes)
        of_row = np.searchsorted(ends, rows, side="right")
        places = rows - (ends - source.sizes)[of_row]
        keys = [*zip(of_row.tolist(), (places // BLOCK).tolist(), strict=True)]
        needed = sorted({*keys})
        # each process begins with another block, so that they do not wait for each other
        start = os.getpid() % max(len(needed), 1)
        blocks = {}
        for key in needed[start:] + needed[:start]:
            # an exiting process waits for its threads, but for no longer than a block takes
            if not main_thread().is_alive():
                raise RunError("the process has ended")
            blocks[key] = self._open(source, *key)
        for key, place in zip(keys, (places % BLOCK).tolist(), strict=True):
            yield blocks[key][place]

    def _open(self, source: Source, group: int, number: int) -> ChunkLists:
        """Return the chunks of each row of a block."""
        first = number * BLOCK
        last = min(first + BLOCK, int(source.sizes[group]))
        key = f"{source.version(group)} {first} {last} {self.key}"
        name = hashlib.sha256(key.encode()).hexdigest()
        file = self.folder / f"{name}.arrow"
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / f"{int(name[:4], 16) % LOCKS}.lock", poll_interval=POLL):
            try:
                os.utime(file)
                table = feather.read_table(file, memory_map=False)
            except FileNotFoundError:  # not made yet, or removed to make room
                table = pa.Table.from_pylist([*self._make(source, group, first, last)])
                unfinished = file.with_suffix(".unfinished")
                with naming(file):
                    feather.write_feather(table, unfinished)
                self._publish(unfinished, file)
        by_row: ChunkLists = [[] for _ in range(last - first)]
        for chunk in table.to_pandas().to_dict("records"):
            by_row[chunk.pop("row")].append(chunk)
        return by_row

    def _publish(self, unfinished: Path, file: Path) -> None:
        """Rename a finished block. If the limit is exceeded, first remove others until a tenth of it is free."""
        counted = self.folder / "bytes"  # saves listing the folder for each block: a full one has tens of thousands
        with FileLock(self.folder / "room.lock", poll_interval=POLL):
            own = unfinished.stat().st_size
            size = own + int(counted.read_bytes() if counted.exists() else self.limit)
            if size > self.limit:
                others = sorted(self.folder.glob("*.arrow"), key=lambda other: other.stat().st_mtime)
                size = own + sum(other.stat().st_size for other in others)
                for other in others:
                    if size > ROOM * self.limit:
                        size -= other.stat().st_size
                        other.unlink()
            unfinished.replace(file)
            recount = counted.with_suffix(".unfinished")
            recount.write_bytes(b"%d" % size)
            recount.replace(counted)

    def _make(self, source: Source, group: int, first: int, last: int) -> Iterator[Chunk]:
        """Yield the chunks of a block, each with the `row` that it comes from."""
        rows, bad = read_text(source, (group, first, last), self.columns)
        if bad and not self.skips_bad_rows:
            place = min(bad)
            raise UserError(f"{source.name(group, first + place)}: {bad[place]}; fix it, {SKIP}")
        good = [place for place in range(last - first) if place not in bad]
        usable = {name: [values[place] for place in good] for name, values in rows.items()}
        made = self.maker.chunks_by_row(usable) if good else []
        chunks = dict(zip(good, made, strict=True))
        for place in range(last - first):
            for chunk in chunks.get(place) or [self.maker.filler]:
                yield {"row": place, **{name: chunk[name] for name in self.maker.filler}}

"""Tokenized blocks of rows, in a folder of bounded size that all processes of a machine fill and read together."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from threading import main_thread

import numpy as np
import pyarrow as pa
from filelock import FileLock
from pyarrow import feather

from src.config.errors import RunError, UserError, naming
from src.tasks.streaming.order import ranges
from src.tasks.text.packing import Chunk
from src.tasks.text.reading import BLOCK, CODE, SKIP, Encoders, Source, read_text
from src.tasks.text.tokenizing import Chunker

FILLER: Chunk = {"input_ids": [], "labels": [], "length": 0}
"""Stands for a row that cannot be used."""
BLOCK_CODE = [*CODE, Path(__file__).read_bytes()]
"""The source code that makes blocks: when it changes, they are made again."""
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
    chunker: Chunker
    skips_bad_rows: bool
    key: str
    """Changes with all of these, and with the code that makes chunks."""
    folder: Path
    limit: int
    """Bytes that the folder may hold."""

    def read(self, source: Source, rows: np.ndarray) -> pa.Table:
        """Return the chunks of these rows, one or more each, with the place in `rows` that they are of as `row`; int64.
        The only chunk of an unusable row has a `length` of 0. Raise a UserError that names such a row if it may not be
        skipped."""
        ends = np.cumsum(source.sizes)
        of_row = np.searchsorted(ends, rows, side="right")
        within = rows - (ends - source.sizes)[of_row]
        keys = np.stack([of_row, within // BLOCK], 1)
        needed, of_block = np.unique(keys, axis=0, return_inverse=True)
        if not len(rows):
            needed = np.zeros((1, 2), int)  # for the columns
        # each process begins with another block, so that they do not wait for each other
        order = np.roll(np.arange(len(needed)), -(os.getpid() % max(len(needed), 1)))
        found = []
        for number in order:
            # an exiting process waits for its threads, but for no longer than a block takes
            if not main_thread().is_alive():
                raise RunError("the process has ended")
            block = self._open(source, *needed[number].tolist())
            places = np.flatnonzero(of_block == number)
            places = places[np.argsort(within[places])]
            # the chunks of each row are next to each other
            starts, stops = (np.searchsorted(block["row"], within[places] % BLOCK, side) for side in ("left", "right"))
            index = ranges(starts, stops - starts)
            # a window's rows of a block follow each other, unless two passes meet in it: a slice copies nothing
            is_slice = len(index) > 0 and (np.diff(index) == 1).all()
            own = block.slice(index[0], len(index)) if is_slice else block.take(index)
            found.append(own.set_column(own.column_names.index("row"), "row", [np.repeat(places, stops - starts)]))
        # a block without a usable row has no types
        return pa.concat_tables(found, promote_options="permissive")

    def _open(self, source: Source, group: int, number: int) -> pa.Table:
        """Return the chunks of a block, with the `row` of it that each is of."""
        first = number * BLOCK
        last = min(first + BLOCK, int(source.sizes[group]))
        key = f"{source.version(group)} {first} {last} {self.key}"
        name = hashlib.sha256(key.encode()).hexdigest()
        file = self.folder / f"{name}.arrow"
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / f"{int(name[:4], 16) % LOCKS}.lock", poll_interval=POLL):
            try:
                os.utime(file)
                return feather.read_table(file, memory_map=False)
            except FileNotFoundError:  # not made yet, or removed to make room
                table = self._make(source, group, first, last)
                unfinished = file.with_suffix(".unfinished")
                with naming(file):
                    feather.write_feather(table, unfinished)
                self._publish(unfinished, file)
                return table

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

    def _make(self, source: Source, group: int, first: int, last: int) -> pa.Table:
        """Return the chunks of a block, with the `row` that each is of, in ascending order."""
        rows, bad = read_text(source, (group, first, last), self.columns)
        if bad and not self.skips_bad_rows:
            place = min(bad)
            raise UserError(f"{source.name(group, first + place)}: {bad[place]}; fix it, {SKIP}")
        good = [place for place in range(last - first) if place not in bad]
        parts, lacking = [], np.arange(last - first)
        if good:
            made = self.chunker.chunks({name: [values[place] for place in good] for name, values in rows.items()})
            places = np.array(good)[made["row"].to_numpy()]
            parts.append(made.select([*FILLER]).append_column("row", [places]))
            lacking = np.setdiff1d(lacking, places)
        if not len(lacking):
            return parts[0]  # already in order, and sorting would copy all tokens
        parts.append(pa.Table.from_pylist([{**FILLER, "row": place} for place in lacking.tolist()]))
        return pa.concat_tables(parts, promote_options="permissive").sort_by("row")

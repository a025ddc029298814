"""Tokenized blocks of rows, in a folder of bounded size that all processes of a machine fill and read together."""

import hashlib
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import main_thread

import datasets
import pyarrow as pa
from datasets.fingerprint import Hasher
from filelock import FileLock
from pyarrow import feather

from src.config.errors import RunError, UserError, naming
from src.tasks.streaming.index import Block, read_block
from src.tasks.text.packing import Chunk
from src.tasks.text.rows import CODE, Encoders, encode_row, place_of
from src.tasks.text.text_task import SKIP
from src.tasks.text.tokenizing import Chunker

FILLER: Chunk = {"input_ids": [], "labels": [], "length": 0}
"""Stands for a row that cannot be used."""
CACHE_CODE = [*CODE, *(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))]
"""The source code that makes blocks: when it changes, they are made again."""
KEPT = 0.9
"""Fraction of the limit that stays in use when blocks are removed to make room for others."""
POLL = 0.005
"""Seconds between two tries to get a lock."""


@dataclass(frozen=True, eq=False)
class TokenCache:
    """Tokenizes blocks, and keeps them in the folder. The least recently used make room for new ones."""

    encoders: Encoders
    chunker: Chunker
    skips_bad_rows: bool
    limit_gb: float
    """Gigabytes that the folder may hold."""

    @cached_property
    def key(self) -> str:
        """Return what changes with the chunks of a row."""
        return Hasher.hash([self.encoders, self.chunker, self.skips_bad_rows, CACHE_CODE])

    @property
    def folder(self) -> Path:
        """Return where blocks are kept."""
        return Path(datasets.config.HF_DATASETS_CACHE, "blocks")

    def read(self, block: Block) -> pa.Table:
        """Return the chunks of a block's rows, with the columns of FILLER, which stands for each unusable row. Raise a
        UserError that names such a row if it may not be skipped."""
        # an exiting process waits for its threads, but for no longer than a block takes
        if not main_thread().is_alive():
            raise RunError("the process has ended")
        name = hashlib.sha256(f"{block} {self.key}".encode()).hexdigest()
        file = self.folder / f"{name}.arrow"
        self.folder.mkdir(parents=True, exist_ok=True)
        # one of 256 locks: blocks that share one are not made at the same time
        with FileLock(self.folder / f"{name[:2]}.lock", poll_interval=POLL):
            try:
                os.utime(file)
                return feather.read_table(file, memory_map=False)
            except FileNotFoundError:  # not made yet, or removed to make room
                table = self._make(block)
                unfinished = file.with_suffix(".unfinished")
                with naming(file):
                    feather.write_feather(table, unfinished)
                self._publish(unfinished, file)
                return table

    def _make(self, block: Block) -> pa.Table:
        """Return the chunks of a block."""
        rows = []
        for number, row, reason, _ in read_block(block, [*self.encoders]):
            encoded, reason = encode_row(row, reason, self.encoders)
            if reason and not self.skips_bad_rows:
                raise UserError(f"{place_of(block['file'], number)}: {reason}; fix it, {SKIP}")
            rows += [encoded] * (not reason)
        made = self.chunker.chunks({name: [row[name] for row in rows] for name in self.chunker.columns.values()})
        fillers = [FILLER] * (block["rows"] - len(made["row"].unique()))
        chunks = made.select([*FILLER])
        return pa.concat_tables([chunks, pa.Table.from_pylist(fillers, chunks.schema)])

    def _publish(self, unfinished: Path, file: Path) -> None:
        """Rename a finished block. If the limit is exceeded, first remove others until a tenth of it is free."""
        limit = self.limit_gb * 1e9
        counted = self.folder / "bytes"  # saves listing the folder for each block: a full one has tens of thousands
        with FileLock(self.folder / "room.lock", poll_interval=POLL):
            own = unfinished.stat().st_size
            size = own + int(counted.read_bytes() if counted.exists() else limit)
            if size > limit:
                others = sorted(self.folder.glob("*.arrow"), key=lambda other: other.stat().st_mtime)
                size = own + sum(other.stat().st_size for other in others)
                for other in others:
                    if size > KEPT * limit:
                        size -= other.stat().st_size
                        other.unlink()
            unfinished.replace(file)
            recount = counted.with_suffix(".unfinished")
            recount.write_bytes(b"%d" % size)
            recount.replace(counted)

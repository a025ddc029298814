"""Predict a number from the other columns of a csv: a residual MLP on standardized numbers and embedded categories."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pandas as pd
import torch
from pydantic import NonNegativeInt, PositiveInt, PrivateAttr
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from src.process import UserError, explained
from src.tasks.base import Task

HINT = "`python -m examples.make_data` makes data/friedman.csv"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.narrow(nn.functional.gelu(self.wide(self.norm(hidden))))


class Regressor(nn.Module):
    _no_split_modules = ["Block"]

    def __init__(self, numbers: int, categories: list[int], width: int, depth: int) -> None:
        super().__init__()
        self.numbers = nn.Linear(numbers, width)
        self.categories = nn.ModuleList(nn.Embedding(size, width) for size in categories)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """Return standardized predictions, shape (rows,), from fp32 numbers and int64 categories, shape (rows, …)."""
        hidden = self.numbers(numbers)
        for embedding, column in zip(self.categories, categories.unbind(1), strict=True):
            hidden = hidden + embedding(column)
        return self.head(self.blocks(hidden)).squeeze(1)


class TabularRegression(Task):
    """Predicts a number from the other columns of a csv."""

    name: Literal["tabular_regression"] = "tabular_regression"
    """The task to train."""
    csv: str = "data/friedman.csv"
    """The table to train on, with a header."""
    eval_csv: str | None = None
    """Another table to evaluate on; null: a fifth of the rows of csv, which are then not trained on."""
    split_seed: NonNegativeInt = 0
    """Draws that fifth."""
    target: str = "y"
    """Column to predict."""
    categories: list[str] = ["site"]
    """Columns of categories. All others are numbers; cells may be empty."""
    width: PositiveInt = 64
    """Units of each block."""
    depth: PositiveInt = 3
    """Blocks."""
    metric_names: ClassVar[tuple[str, ...]] = ("rmse", "r2")
    _known: dict[str, Any] = PrivateAttr(default_factory=dict)

    def build_datasets(self) -> tuple[TensorDataset, TensorDataset]:
        train = self._read(self.csv)
        if not self.eval_csv:
            is_kept = np.random.default_rng(self.split_seed).permutation(len(train)) < len(train) // 5
            train, evaluation = train[~is_kept], train[is_kept]
        if not self._known:
            numbers, categories = train.drop(columns=self.categories), train[self.categories]
            self._known = {
                "mean": numbers.mean().to_dict(),
                "std": numbers.std(ddof=0).replace(0, 1).to_dict(),
                "categories": {name: sorted(column.dropna().unique()) for name, column in categories.items()},
            }
        return self._tensors(train), self._tensors(self._read(self.eval_csv) if self.eval_csv else evaluation)

    def _read(self, path: str) -> pd.DataFrame:
        """Return the columns in use, numbers and text. Raise a UserError with a line for each mistake."""
        with explained(f"{path}: cannot be read ({HINT}), ", (OSError, ValueError)):
            table = pd.read_csv(path, dtype=str)
        numbers = self._known.get(
            "mean", dict.fromkeys([*table.columns.drop(self.categories, errors="ignore"), self.target])
        )
        mistakes = [f"has no column {name}" for name in [*numbers, *self.categories] if name not in table]
        mistakes += [] if len(table) > 4 else ["has too few rows"]
        mistakes += [] if isinstance(table.index, pd.RangeIndex) else ["has rows with more cells than its header"]
        for name in table.columns.intersection([*numbers]):
            cells, table[name] = (
                table[name],
                pd.to_numeric(table[name], errors="coerce").replace([np.inf, -np.inf], np.nan),
            )
            bad = table[name].isna() & (cells.notna() | (name == self.target))
            if bad.any():
                where = f"{name} in row {bad.argmax() + 1} is {cells[bad].iloc[0]!r}"
                mistakes.append(f"{where}, not a number: mend it, or name the column in task.categories")
        if mistakes:
            raise UserError("\n".join(f"{path}: {mistake}" for mistake in mistakes))
        return table[[*numbers, *self.categories]]

    def _tensors(self, table: pd.DataFrame) -> TensorDataset:
        """Return numbers (0 and an indicator where a cell is empty), categories (0: unknown), targets, row numbers."""
        scaled = (table[[*self._known["mean"]]] - self._known["mean"]) / self._known["std"]
        numbers = scaled.drop(columns=self.target)
        known = self._known["categories"].items()
        ids = [pd.Categorical(table[name], values).codes.astype(np.int64) + 1 for name, values in known]
        return TensorDataset(
            torch.from_numpy(np.hstack([numbers.fillna(0), numbers.isna()], dtype=np.float32)),
            torch.from_numpy(np.array(ids, np.int64).reshape(-1, len(table)).T),
            torch.from_numpy(scaled[self.target].to_numpy(np.float32)),
            torch.from_numpy(table.index.to_numpy()),
        )

    def fingerprint(self, dataset: Any) -> str:
        return sha256(b"".join(tensor.numpy().tobytes() for tensor in dataset.tensors)).hexdigest()

    def data_state(self) -> dict[str, Any]:
        return self._known

    def load_data_state(self, state: dict[str, Any]) -> None:
        self._known = state

    def build_model(self) -> nn.Module:
        sizes = [len(values) + 1 for values in self._known["categories"].values()]
        return Regressor(2 * len(self._known["mean"]) - 2, sizes, self.width, self.depth)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return self.evaluate(model, batch)[:2]

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, Tensor]]:
        numbers, categories, targets, _ = batch
        found = model(numbers, categories).float()
        mean, std = (self._known[name][self.target] for name in ("mean", "std"))
        outputs = {"predictions": found * std + mean, "references": targets * std + mean}
        return nn.functional.mse_loss(found, targets, reduction="sum"), len(targets), outputs

    def metrics(self, outputs: dict[str, Tensor]) -> dict[str, float]:
        references = outputs["references"].double()
        squares = (outputs["predictions"] - references).square()
        r2 = 1 - squares.sum() / (references - references.mean()).square().sum()
        return {"rmse": squares.mean().sqrt().item(), "r2": r2.item()}

    def predictions(self, outputs: dict[str, Tensor], dataset: Any) -> dict[str, list[Any]]:
        return {"row": dataset.tensors[3].tolist(), **super().predictions(outputs, dataset)}

    def export(self, model: nn.Module, weights: dict[str, Tensor], folder: Path) -> None:
        super().export(model, weights, folder)
        (folder / "columns.json").write_text(json.dumps(self._known))

    def load_export(self, folder: Path) -> nn.Module:
        self._known = json.loads((folder / "columns.json").read_text())
        return super().load_export(folder)

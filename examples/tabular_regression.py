"""Predict a number from the other columns of a csv: a residual MLP on standardized numbers and one-hot categories."""

from collections.abc import Iterator
from hashlib import sha256
from typing import Any, ClassVar, Literal

import numpy as np
import pandas as pd
import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from src.config.errors import as_user_error, raise_if_any
from src.config.terminal import BIN
from src.tasks.base import Counts, Task


class Block(nn.Sequential):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + super().forward(hidden)


class TabularRegression(Task):
    """Predicts a number from the other columns of a csv."""

    name: Literal["tabular_regression"] = "tabular_regression"
    """The task to train."""
    csv: str = "data/friedman.csv"
    """The table to train on, with a header."""
    eval_csv: str | None = None
    """Another table to evaluate on; null: a fifth of the rows of csv, which are then held out from training."""
    split_seed: NonNegativeInt = 0
    """Seed that draws that fifth."""
    target: str = "y"
    """Column to predict."""
    categories: list[str] = ["site"]
    """Columns of categories. All others are numbers, whose cells may be empty."""
    width: PositiveInt = 64
    """Units between the blocks."""
    depth: PositiveInt = 3
    """Number of blocks."""
    metric_names: ClassVar[tuple[str, ...]] = ("rmse", "r2")

    @property
    def _known(self) -> dict[str, dict[str, Any]]:
        """Return, by column of the training rows, the mean and std of numbers and the values of categories."""
        return self.state.data

    def validation_errors(self) -> Iterator[str]:
        if self.target in self.categories:
            yield f"task.categories names {self.target}, which is task.target: a number to predict; leave it out"

    def build_datasets(self) -> tuple[TensorDataset, TensorDataset]:
        train = self._read(self.csv)
        is_kept = np.random.default_rng(self.split_seed).permutation(len(train)) < len(train) // 5
        kept, train = train[is_kept], train if self.eval_csv else train[~is_kept]
        if not self._known:
            self.state.data |= self._statistics(train)
        rows = self._read(self.eval_csv) if self.eval_csv else kept
        for name, values in self._known["values"].items():
            unknown = rows[name].dropna().loc[lambda cells, known=values: ~cells.isin(known)]
            says = f"{name}: {len(unknown):,} of {len(rows):,} evaluation rows have a value that no training row has"
            self.state.remarks += [f"{says}, such as {value}" for value in unknown[:1]]
        return self._tensors(train), self._tensors(rows)

    def _statistics(self, train: pd.DataFrame) -> dict[str, dict[str, Any]]:
        """Return what `_known` holds. Raise a UserError that names the columns without a finite mean and std."""
        # a column without any number has no mean: it is left out
        numbers = train.drop(columns=self.categories).dropna(axis="columns", how="all")
        with np.errstate(over="ignore", invalid="ignore"):
            mean, std = numbers.mean(), numbers.std(ddof=0)
        std = std.where(numbers.max() > numbers.min(), 0).replace(0, 1)  # equal numbers have 1e-15 by rounding
        odd = numbers.columns[~np.isfinite(mean + std)]
        raise_if_any(f"{self.csv}: {name} has numbers that are too large to have a standard deviation" for name in odd)
        values = {name: sorted({*train[name].dropna()}) for name in self.categories}
        return {"mean": mean.to_dict(), "std": std.to_dict(), "values": values}

    def _read(self, path: str) -> pd.DataFrame:
        """Return the columns in use, numbers and text. Raise a UserError with a line for each mistake."""
        with as_user_error(
            f"{path}: not a csv (`{BIN}python -m examples.make_table` makes one): ", (OSError, ValueError)
        ):
            # only an empty cell is missing: NA is Namibia
            table = pd.read_csv(path, dtype=str, keep_default_na=False, na_values=[""])
            header = [*pd.read_csv(path, header=None, nrows=1, dtype=str).iloc[0]]  # without the names pandas makes up
        numbers = [*self._known.get("mean", [name for name in table if name not in self.categories])]
        wanted = dict.fromkeys([*numbers, self.target, *self.categories])
        mistakes = [f"has no column {name}" for name in wanted if name not in table]
        mistakes += [f"has several columns {name}" for name in wanted if header.count(name) > 1]
        nameless = [name for name in table.columns.intersection(numbers) if name.startswith("Unnamed: ")]
        if table[nameless].notna().any(axis=None):
            mistakes.append("has a column without a name, such as row numbers: name it, or leave it out (index=False)")
        mistakes += ["has fewer than 5 rows"] if len(table) < 5 else []
        mistakes += [] if isinstance(table.index, pd.RangeIndex) else ["has rows with more cells than its header"]
        for name in table.columns.intersection(numbers):
            values = pd.to_numeric(table[name], errors="coerce").replace([np.inf, -np.inf], np.nan)
            bad = values.isna() & (table[name].notna() | (name == self.target))
            for i in np.flatnonzero(bad)[:1]:
                found = f"{name} in row {i + 1} is {table[name].iloc[i]}, not a finite number"
                mistakes.append(f"{found}; list columns of categories in task.categories")
            table[name] = values
        raise_if_any(f"{path}: {mistake}" for mistake in mistakes)
        return table[[*wanted]]

    def _tensors(self, table: pd.DataFrame) -> TensorDataset:
        """Return inputs, shape (rows, columns), and scaled targets, both fp32, targets as they are, float64 seen as
        int64, and row numbers, shape (rows,). An empty number becomes the mean, with a 1 in a column of its own; an
        empty or unknown category is 0 in all columns of its values."""
        scaled = (table[[*self._known["mean"]]] - self._known["mean"]) / self._known["std"]
        numbers = scaled.drop(columns=self.target)
        one_hot = [table[name] == value for name, values in self._known["values"].items() for value in values]
        inputs = np.column_stack([numbers.fillna(0), numbers.isna(), *one_hot])
        targets, exact = scaled[self.target].to_numpy(np.float32), table[self.target].to_numpy(np.float64)
        columns = inputs.astype(np.float32), targets, exact.view(np.int64), np.array(table.index)
        return TensorDataset(*map(torch.tensor, columns))

    def fingerprint(self, dataset: Any) -> str:
        return sha256(b"".join(tensor.numpy().tobytes() for tensor in dataset.tensors)).hexdigest()

    def preview(self, dataset: Any, index: int) -> str:
        inputs, target, _, row = (column[index].tolist() for column in dataset.tensors)
        return f"row {row}: {target:.4g} from {', '.join(f'{value:.4g}' for value in inputs)}"

    def build_model(self) -> Any:
        width, numbers, values = self.width, self._known["mean"], self._known["values"].values()
        layers: list[nn.Module] = [nn.Linear(2 * len(numbers) - 2 + sum(map(len, values)), width)]
        for _ in range(self.depth):
            wide = nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
            layers.append(Block(nn.LayerNorm(width), *wide))
        model: Any = nn.Sequential(*layers, nn.LayerNorm(width), nn.Linear(width, 1))
        model._no_split_modules = ["Block"]
        return model

    def count(self, batch: Any) -> Counts:
        return {"targets": len(batch[1])}

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.evaluate(model, batch)[0]

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        inputs, targets, exact, _ = batch
        found = model(inputs).float()[:, 0]
        # a sum: the loop divides by the rows of all processes, which may have unequal shares
        loss = nn.functional.mse_loss(found, targets, reduction="sum")
        # float64: in fp32, a time in Unix seconds is rounded to two minutes. Apple's GPUs do not have it
        found, exact = (values.cpu() if values.is_mps else values for values in (found, exact))
        mean, std = (self._known[name][self.target] for name in ("mean", "std"))
        return loss, {"predictions": found.double() * std + mean, "references": exact.view(torch.float64)}

    def metrics(self, outputs: dict[str, Tensor]) -> dict[str, float]:
        predictions, references = outputs["predictions"], outputs["references"]
        mse, variance = (predictions - references).square().mean().item(), references.var(correction=0).item()
        is_constant = references.max() == references.min()  # else its variance is noise, as of a column
        return {"rmse": mse**0.5, "r2": float(mse == 0) if is_constant else 1 - mse / variance}  # as in scikit-learn

    def predictions(self, outputs: dict[str, Tensor], dataset: Any) -> dict[str, list[Any]]:
        return {"row": dataset.tensors[-1].tolist(), **super().predictions(outputs, dataset)}

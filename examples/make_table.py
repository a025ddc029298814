"""Make the data of tabular_regression.py: `python -m examples.make_table` writes data/friedman.csv."""

from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.datasets import make_friedman1


def write(file: Path) -> None:
    """Write 4,000 rows of Friedman's first function (1991, https://doi.org/10.1214/aos/1176347963): nonlinear in five
    of ten numbers, plus noise of standard deviation 1. The shift by site and the empty cells are not his."""
    inputs, target = make_friedman1(4000, noise=1.0, random_state=0)
    random = np.random.default_rng(0)
    sites = random.integers(4, size=len(target))
    target = target + np.array([-4.0, 0.0, 3.0, 5.0])[sites]
    inputs[random.random(inputs.shape) < 0.01] = np.nan
    table = pd.DataFrame({f"x{i}": column for i, column in enumerate(inputs.T.round(4))})
    file.parent.mkdir(parents=True, exist_ok=True)
    table.assign(site=np.array(["north", "east", "south", "west"])[sites], y=target.round(4)).to_csv(file, index=False)


if __name__ == "__main__":
    write(Path("data/friedman.csv"))

"""A table, whose prices follow from its other columns."""

import random
from pathlib import Path

import pytest

from src.config.errors import UserError
from tests.task_tests import TaskTests


class TestTabularRegression(TaskTests):
    settings = """
        --task.name=tabular_regression --task.csv={folder}/table.csv --task.target=price --task.categories=[street]
        --max_steps=8 --global_batch_size=16 --optim.lr=1e-4
    """
    """An epoch has three steps, the last of 15 rows: one of two processes gets 7."""
    mistake = "--task.widht=32", "unknown setting, did you mean task.width?"

    @staticmethod
    def write(folder: Path) -> None:
        """Write 58 rows, of which the task holds 11 out to evaluate on. One cell is empty."""
        draw = random.Random(0)
        lines = ["floors,area,street,price"]
        for i in range(58):
            floors, street = draw.randint(1, 5), draw.choice(["Main", "Oak"])
            area = 25 * floors + draw.randint(-5, 5)
            price = 3000 * area + 20_000 * (street == "Oak") + draw.randint(-2000, 2000)
            lines.append(f"{floors},{area if i else ''},{street},{price}")
        (folder / "table.csv").write_text("\n".join(lines))

    def test_all_mistakes_in_a_table_are_told_at_once(self, tmp_path: Path) -> None:
        (tmp_path / "table.csv").write_text("floors,area,price\n1,large,2\n2,,3\n3,,\n")
        task = self.task(tmp_path)
        with pytest.raises(UserError) as error:
            task.build_datasets()
        hint = "list columns of categories in task.categories"
        assert str(error.value).replace(f"{tmp_path}/", "").splitlines() == [
            "table.csv: has no column street",
            "table.csv: has fewer than 5 rows",
            f"table.csv: area in row 1 is large, not a finite number; {hint}",
            f"table.csv: price in row 3 is nan, not a finite number; {hint}",
        ]

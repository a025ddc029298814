"""The settings of `--task.name=mnist`."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt

from src.config.groups import TaskSettings
from src.config.optim import Fraction
from src.config.settings import ResumeSafe


class MnistSettings(TaskSettings):
    """Settings of the task of classifying handwritten digits."""

    name: Literal["mnist"] = "mnist"
    """The task to train."""
    source: Literal["mnist", "digits"] = "mnist"
    """mnist: 60,000 + 10,000 images, downloaded once; digits: 1,438 + 359 that come with scikit-learn."""
    data_dir: ResumeSafe[str] = "data"
    """Folder where torchvision keeps MNIST, as MNIST/raw; downloaded if missing."""
    shift: Annotated[NonNegativeInt, Field(le=8)] = 2
    """Largest shift of a training image along each axis, in pixels, redrawn in each epoch."""
    rotation: Annotated[float, Field(ge=0, le=180)] = 10.0
    """Largest rotation of a training image, in degrees, redrawn in each epoch."""
    dropout: Annotated[float, Field(ge=0, lt=2)] = 0.2
    """Factor for the model's two dropout rates, 0.25 and 0.5; 0 turns them off."""
    label_smoothing: Fraction = 0.1
    """Fraction of the training target that is spread evenly over all ten digits; the evaluation loss has none."""
    task_class: ClassVar[str] = "src.tasks.mnist:Mnist"
    metric_names: ClassVar[tuple[str, ...]] = ("accuracy",)

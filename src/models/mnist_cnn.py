"""The CNN of pytorch/examples/mnist, its layers named as there."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MnistCnn(nn.Module):
    """1,199,882 parameters. Source: https://github.com/pytorch/examples/blob/main/mnist/main.py"""

    _no_split_modules = ["Conv2d", "Linear"]

    def __init__(self, dropout: float = 1.0) -> None:
        """Make the layers; `dropout` scales both dropout rates."""
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25 * dropout)
        self.dropout2 = nn.Dropout(0.5 * dropout)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape (batch, 10) for images of shape (batch, 28, 28), uint8."""
        # MNIST's mean and standard deviation, as everyone uses them
        x = ((images.unsqueeze(1).float() / 255) - 0.1307) / 0.3081
        if torch.is_autocast_enabled(x.device.type):  # half-precision convolutions are faster so; fp32 ones are not
            x = x.to(memory_format=torch.channels_last)
        x = F.relu(self.conv1(x))
        x = self.dropout1(F.relu(F.max_pool2d(self.conv2(x), 2)))  # the same as ReLU before pooling, on a quarter
        x = self.dropout2(F.relu(self.fc1(torch.flatten(x, 1))))
        return self.fc2(x)

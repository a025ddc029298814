"""MNIST to the first step, as in Accelerate's documentation: what the start-up of train.py is compared with.

python -m benchmarks.startup_mnist DATA_DIR
"""

import sys

from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.utils.data import DataLoader
from torchvision.datasets import MNIST
from torchvision.transforms import Compose, Normalize, ToTensor

from benchmarks.mnist_peer import build_model


def main(data_dir: str) -> None:
    accelerator = Accelerator(cpu=True)
    dataset = MNIST(data_dir, train=True, transform=Compose([ToTensor(), Normalize(0.1307, 0.3081)]))
    model = build_model()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(dataset, 64, shuffle=True))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    model.train()
    for images, labels in batches:
        loss = cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        print(f"step 1/ loss {loss.item():.4f}", flush=True)
        break


if __name__ == "__main__":
    main(sys.argv[1])

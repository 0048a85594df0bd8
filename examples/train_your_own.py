"""Your own model, your own loop: only the three lines of a training step change.

python examples/train_your_own.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import edgetrain as et
from edgetrain.zoo import datasets

data = datasets.load("digits")
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
    nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Dropout(0.2), nn.Linear(64 * 4 * 4, 10),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


first = data.train.batch(torch.arange(64))
step = et.prepare(model, loss, optimizer, example=first)
print(step.plan)

for epoch in range(5):
    value = torch.zeros(())
    for indices in torch.randperm(len(data.train)).split(64):  # the last batch is smaller: captured by itself
        value = step(*data.train.batch(indices))
    scheduler.step()
    print(f"epoch {epoch + 1}: loss {value:.4f}")

model.eval()
with torch.no_grad():
    x, y = data.test.batch(torch.arange(len(data.test)))
    print(f"test accuracy {100 * (model(x).argmax(1) == y).float().mean():.1f} %")
model.train()
print(step.trace_memory(*first))

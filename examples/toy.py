"""A small regression: random inputs, and a model that is to learn what was done to them."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import Dataset

INPUT_SIZE, OUTPUT_SIZE = 5, 2


class RandomDataset(Dataset):
    """``length`` samples, the same on every process: a sampler gives each its part."""

    def __init__(self, length: int):
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(length, INPUT_SIZE, generator=generator)
        self.targets = (self.inputs @ torch.randn(INPUT_SIZE, OUTPUT_SIZE, generator=generator)).tanh()

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]

    def __len__(self) -> int:
        return len(self.inputs)


class Model(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.fc = nn.Sequential(
            nn.Linear(INPUT_SIZE, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, OUTPUT_SIZE)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)

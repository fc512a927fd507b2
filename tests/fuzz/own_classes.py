"""Classes and functions that random models are made of: some named as those of torch and transformers, none of them one.

A model's source imports all names.
"""

# ruff: noqa: E501, F401
from __future__ import annotations

import functools
import types
from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import GELUTanh as LibraryGELUTanh
from transformers.pytorch_utils import Conv1D as LibraryConv1D

W = 32


class ReLU(nn.Module):
    def forward(self, x):
        return torch.relu(x) ** 2 + x


class GELU(nn.Module):
    approximate = "none"

    def forward(self, x):
        return torch.tanh(x) * 2


class SiLU(nn.SiLU):
    def forward(self, x):
        return -super().forward(x)


class Shifted(nn.ReLU):
    def forward(self, x):
        return torch.relu(x + 1)


class PytorchGELUTanh(nn.Module):
    def forward(self, x):
        return x.sin()


class Conv1D(nn.Module):
    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.weight, self.bias = nf, nn.Parameter(torch.randn(nx, nf) / nx**0.5), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return torch.relu(x @ self.weight + self.bias) * 2


class Linear(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class Plain(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class Called(nn.Linear):
    def __call__(self, x):
        return super().__call__(x) + x


class Named(nn.Linear):
    gain = 2.0


class Residual(nn.Sequential):
    def forward(self, x):
        for layer in self:
            x = x + layer(x)
        return x


class Tripled(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * 3


class Built(nn.Sequential):
    def __init__(self, *layers):
        super().__init__(*layers)
        self.note = 1


class Twice(nn.Sequential):
    def __iter__(self):
        return iter([*self._modules.values()] * 2)


class GPT2MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc, self.act, self.c_proj = nn.Linear(W, 2 * W), nn.ReLU(), nn.Linear(2 * W, W)

    def forward(self, x):
        h = self.c_fc(x)
        return self.c_proj(self.act(h) + 0.5 * h)


class Helper:
    def __init__(self, layer):
        self.layer = layer

    def run(self, x):
        return self.layer(x) * 2


def is_plain(layer):
    return isinstance(layer, nn.Linear)


def gain_of(layer):
    return 2.0 if type(layer).__name__ == "Linear" else 1.0


@functools.singledispatch
def factor(layer):
    return 1.0


@factor.register(nn.Linear)
def _(layer):
    return 3.0


TABLE = {nn.Linear: 2.0, Plain: 3.0}


def apply_all(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def count(module):
    return sum(isinstance(m, nn.Linear) for m in module.modules())

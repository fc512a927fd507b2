"""A function of a model's author that another module calls by the name of this one."""

from torch import nn


def is_plain_layer(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear)

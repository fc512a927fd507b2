"""What a product asks the L2 for when it has no load left of its own: the weight that the next product reads first.

A product whose CTAs own the register file lets its successor start late. Between the last load of the one and the
first of the other the memory would idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from qcut.cuda.plans import has_pdl, target
from qcut.dispatch.gpus import Target
from qcut.emitters.stream.ahead import MOST_BYTES, UNIT_BYTES

if TYPE_CHECKING:
    from qcut.cuda.prebuild import LayerCall

BYTES = 8 << 20
"""Most bytes that a product asks for; 0: none asks. Engines read the number when they capture a step."""


def asks(gpu: Target) -> bool:
    """Whether kernels of a GPU may ask: those of a closed set do not."""
    return has_pdl(gpu) and not gpu.closed


def first_read(weight: Tensor, tile_bytes: int, calls: Sequence[LayerCall]) -> Tensor | None:
    """What the CTAs of a layer's product read first.

    Args:
        weight: on a CUDA device.
        tile_bytes: bytes of 16 rows.
        calls: of the layer, at one number of rows.

    Returns:
        uint8 ``[parts, bytes]``, a view of the weight: the beginning of what each CTA, or each cluster, reads. None
        where no kernel asks, where the product is on a kernel of many tokens, or where kernels read a copy.
    """
    device = weight.get_device()
    if BYTES <= 0 or len(calls) != 1 or not asks(target(device)):
        return None
    stride = _row_tiles(cast(Any, calls[0]), device, target(device)) * tile_bytes
    if not stride or not weight.is_contiguous() or weight.data_ptr() % UNIT_BYTES:
        return None
    memory = weight.detach().view(torch.uint8).flatten()
    ctas = -(-len(memory) // stride)
    size = min(stride, len(memory), BYTES // ctas, MOST_BYTES) // UNIT_BYTES * UNIT_BYTES
    return memory.unfold(0, size, stride) if size else None


@lru_cache(maxsize=1 << 10)  # the layers of a model are alike
def _row_tiles(call: LayerCall, device: int, gpu: Target) -> int:
    """Tiles of 16 rows that a CTA, or a cluster, of the call's product reads; 0: not known."""
    return call.launches(device)[-1].row_tiles


def arguments(ahead: Tensor | None) -> tuple[int, ...]:
    """The last arguments of a kernel that asks; parts that do not start at multiples of 16 bytes are not asked for."""
    if ahead is None:
        return ()
    (parts, size), stride, address = ahead.shape, ahead.stride(0), ahead.data_ptr()
    size = min(size, MOST_BYTES) // UNIT_BYTES * UNIT_BYTES
    if not size or address % UNIT_BYTES or stride % UNIT_BYTES:
        parts = 0
    return address, stride, size, parts

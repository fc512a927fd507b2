"""Quantizes small random models of every architecture of transformers that can be built from its configuration.

``python -m tests.conversion.sweep [--only NAME …] [--schemes w8a8 codebook4]`` prints what came of each class: served,
with the numbers of layers quantized and left and the error of the output; not run, where no batch that is known here
runs in float, and only the saved state is compared; refused, with qcut's reason; not built, where the common small
sizes make no model; or failed. A failure ends the run with status 1.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from typing import Any

import torch

from qcut.errors import CheckpointError, QuantizationError
from tests.support.architectures import BOUNDS, check, inputs_of, tiny_model

_MAPPINGS = (
    *("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    *("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
    *("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", "MODEL_FOR_CTC_MAPPING_NAMES", "MODEL_MAPPING_NAMES"),
)


def classes() -> list[str]:
    """Names of model classes, one for each model type."""
    from transformers.models.auto import modeling_auto

    chosen: dict[str, str] = {}
    for mapping in _MAPPINGS:
        for kind, name in getattr(modeling_auto, mapping, {}).items():
            chosen.setdefault(kind, name if isinstance(name, str) else name[0])
    return list(dict.fromkeys(chosen.values()))


def main(argv: list[str] | None = None) -> int:
    """Runs the sweep and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="classes of transformers")
    parser.add_argument("--schemes", nargs="*", default=list(BOUNDS))
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    count: Counter[str] = Counter()
    for name in options.only or classes():
        outcome, detail = attempt(name, options.schemes)
        count[outcome] += 1
        print(f"{outcome:<9} {name:<44} {detail}", flush=True)
    print(", ".join(f"{number} {outcome}" for outcome, number in count.items()))
    return 1 if count["failed"] else 0


def attempt(name: str, schemes: list[str]) -> tuple[str, str]:
    """What came of one class, and the details."""
    try:
        model: Any = tiny_model(name)
    except Exception as error:  # not built only from its configuration: no case for qcut
        return "not built", _first_line(error)
    batch = inputs_of(model)
    details = []
    one = None
    for scheme in schemes:
        try:
            one = check(model, batch, scheme)
            details.append(f"{scheme} {one.layers}+{one.left} {one.error:.3f}")
        except (QuantizationError, CheckpointError) as error:
            details.append(f"{scheme} refused: {_first_line(error)}")
        except Exception as error:
            return "failed", f"{'; '.join(details)} {scheme} {_first_line(error)}"
    if one is None:
        return "refused", "; ".join(details)
    shares = ", ".join(f"{share:.0f} % {kind}" for kind, share in one.percent.items() if share >= 0.5)
    return "served" if batch else "not run", f"{'; '.join(details)} ({shares})"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


if __name__ == "__main__":
    sys.exit(main())

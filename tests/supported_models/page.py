"""The page ``docs/supported-models.md``: written from findings, and read back."""

from __future__ import annotations

import math

import torch
import transformers

from benchmarks.publish.markdown import markdown
from qcut.engine.families import FAMILIES
from tests.support import ROOT
from tests.supported_models.checking import NO, Finding

PAGE = ROOT / "docs" / "supported-models.md"

GROUPS: dict[str, tuple[str, ...]] = {
    "Decoders": (
        *("GPT2LMHeadModel", "GPTNeoForCausalLM", "GPTNeoXForCausalLM", "GPTJForCausalLM", "GPTBigCodeForCausalLM"),
        *("OPTForCausalLM", "BloomForCausalLM", "MptForCausalLM", "FalconForCausalLM", "LlamaForCausalLM"),
        *("MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM"),
        *("Gemma3ForCausalLM", "PhiForCausalLM", "Phi3ForCausalLM", "OlmoForCausalLM", "Olmo2ForCausalLM"),
        *("Olmo3ForCausalLM", "StableLmForCausalLM", "Starcoder2ForCausalLM", "GraniteForCausalLM"),
        *("CohereForCausalLM", "SmolLM3ForCausalLM", "Glm4ForCausalLM", "NemotronForCausalLM"),
    ),
    "Mixtures of experts": (
        *("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"),
        *("GptOssForCausalLM", "OlmoeForCausalLM", "GraniteMoeForCausalLM"),
        *("PhimoeForCausalLM", "Glm4MoeForCausalLM"),
        *("MiniMaxM2ForCausalLM", "NemotronHForCausalLM", "JambaForCausalLM", "Llama4ForCausalLM"),
        *("JetMoeForCausalLM", "LongcatFlashForCausalLM"),
    ),
    "State spaces and other recurrences": (
        *("MambaForCausalLM", "Mamba2ForCausalLM", "FalconH1ForCausalLM", "Lfm2ForCausalLM", "RwkvForCausalLM"),
    ),
    "Encoders": (
        *("BertForMaskedLM", "RobertaForMaskedLM", "XLMRobertaForMaskedLM", "DistilBertForMaskedLM"),
        *("ModernBertForMaskedLM", "DebertaV2ForMaskedLM", "ElectraForMaskedLM", "AlbertForMaskedLM"),
        *("MPNetForMaskedLM", "XLNetLMHeadModel"),
    ),
    "Encoders with decoders": (
        *("T5ForConditionalGeneration", "MT5ForConditionalGeneration", "BartForConditionalGeneration"),
        *("MBartForConditionalGeneration", "PegasusForConditionalGeneration", "MarianMTModel"),
    ),
    "Images and sound": (
        *("ViTForImageClassification", "DeiTForImageClassification", "BeitForImageClassification"),
        *("SwinForImageClassification", "SegformerForImageClassification", "Dinov2Model", "CLIPModel", "SiglipModel"),
        *("LlavaForConditionalGeneration", "BlipForConditionalGeneration", "WhisperForConditionalGeneration"),
        *("Wav2Vec2ForCTC", "HubertForCTC"),
    ),
}
"""Classes of transformers by the heading of their table."""

_KINDS = {"linear layers": "other linear layers"}
_HEADER = [
    *("`model_type`", "class", "layers", "float, %", "most of it", "cosine `w8a8`", "cosine `codebook4`"),
    *("`qcut.save`", "`save_pretrained`", "while loading", "`generate`", "engine", "notes"),
]


def versions() -> tuple[str, str]:
    """Those of torch and of transformers, without the name of a build."""
    return torch.__version__.partition("+")[0], transformers.__version__


def cells(found: Finding) -> list[str]:
    """A row, except the numbers of its notes."""
    cosines = (found.cosines.get(scheme) for scheme in ("w8a8", "codebook4"))
    return [
        found.kind,
        f"`{found.model_class}`",
        str(found.layers),
        f"{found.percent_float:.1f}",
        _KINDS.get(found.largest, found.largest),
        *(NO if cosine is None else f"{math.floor(1e4 * cosine) / 1e4:.4f}" for cosine in cosines),
        *(found.saved, found.pretrained, found.loading, found.generates, found.engine),
    ]


def page(findings: list[Finding]) -> str:
    """The whole page."""
    by_class = {found.model_class: found for found in findings}
    notes: dict[str, int] = {}
    for found in findings:
        for note in found.notes:
            notes.setdefault(note, len(notes) + 1)
    parts = [_INTRODUCTION.format(*versions(), families=", ".join(f"`{name}`" for name in FAMILIES))]
    for title, names in GROUPS.items():
        rows = [
            [*cells(by_class[name]), ", ".join(str(notes[note]) for note in by_class[name].notes)] for name in names
        ]
        parts.append(f"## {title}\n\n{markdown(_HEADER, rows)}")
    assert set(by_class) == set(CLASSES)
    listed = "\n".join(f"{number}. {note}" for note, number in notes.items())
    parts.append(f"## Notes\n\n{listed}")
    return "\n\n".join(parts) + "\n"


def rows(text: str) -> dict[str, list[str]]:
    """Cells of a page by class, with the texts of the notes in place of their numbers as the last one."""
    numbered = {}
    for line in text.partition("## Notes\n\n")[2].splitlines():
        number, _, note = line.partition(". ")
        numbered[number] = note
    table = {}
    for line in text.splitlines():
        found = [cell.strip() for cell in line.strip("|").split("|")]
        if len(found) == len(_HEADER) and found[1].strip("`") in CLASSES:
            notes = [numbered[number] for number in found[-1].split(", ") if number]
            table[found[1].strip("`")] = [*found[:-1], *notes]
    return table


CLASSES = [name for names in GROUPS.values() for name in names]

_INTRODUCTION = """\
# Supported models

Written by `python -m tests.supported_models` with torch {0} and transformers {1}, on a CPU. The script makes a small
model with random weights for each architecture, quantizes it as `w8a8` and as `codebook4`, saves, loads and runs it. A
*yes* holds under both schemes. Models of other classes, including your own, are quantized too if they consist of
`nn.Linear` or `Conv1D` layers; `python -m tests.conversion.sweep` tries every class of transformers.

- **layers**: the linear layers that `qcut.quantize` replaces in a model with the default sizes of its configuration
  class. **float** is the share of that model's parameters that stays in float, and **most of it** names the largest
  kind. With `embeddings="w8a16"`, token embeddings and the classifier are quantized too. All experts
  of a projection of a mixture are one layer; routers stay in float ([Mixtures of experts](mixtures.md)).
- **cosine**: between the outputs of the quantized and the float model, logits or hidden states, the last digit rounded
  down. With random weights this shows that the architecture is computed correctly, not the quality of a trained model:
  for that see [Performance](performance.md).
- **`qcut.save`**: the model that `qcut.load` reads back computes the same output, bit by bit. **`save_pretrained`**:
  the same with `from_pretrained`. **while loading**: `from_pretrained` with a [`QcutConfig`](transformers.md) computes
  the same as `qcut.quantize` on the loaded float model, bit by bit.
- **`generate`**: the model's own `generate` of transformers runs.
- **engine**: `qcut.Engine` generates the tokens of greedy `generate`. The engine has the families {families}; `qcut
  generate` runs other decoders through transformers. The engine refuses a subclass, a forward, a hook or an attribute
  that changes the result of transformers' classes, by the module's name, and code of a downloaded folder. Quantized
  layers, activations of torch and transformers, and adapters of PEFT (LoRA, IA3, AdaLoRA) are supported.
- **–**: does not apply."""

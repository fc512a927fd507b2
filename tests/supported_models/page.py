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
        *("GptOssForCausalLM", "JambaForCausalLM"),
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

_KINDS = {"experts": "matrices in one parameter", "linear layers": "other linear layers"}
_HEADER = [
    *("`model_type`", "class", "layers", "float, %", "most of it", "cosine `w8a8`", "cosine `codebook4`"),
    *("`qcut.save`", "`save_pretrained`", "while loading", "`generate`", "engine", "notes"),
]


def versions() -> tuple[str, str]:
    """Those of torch and of transformers, without the name of a build."""
    return torch.__version__.partition("+")[0], transformers.__version__


def cells(found: Finding) -> list[str]:
    """A row, but for the numbers of its notes."""
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

Written by `python -m tests.supported_models` with torch {0} and transformers {1}, on a CPU: for each
architecture a small model with random weights is made, quantized as `w8a8` and as `codebook4`, saved, loaded and run.
A claim has to hold under both schemes. Models of other classes are quantized too, your own included, as far as they
consist of `nn.Linear` or `Conv1D` layers; `python -m tests.conversion.sweep` tries every class of transformers.

- **layers**: the linear layers that `qcut.quantize` replaces in a model of the sizes that the configuration's class
  starts from; **float** is the share of that model's parameters that stays as it is, and **most of it** says what that
  is. With `embeddings="w8a16"`, token tables and the classifier do not stay. Matrices that lie in one
  three-dimensional parameter do: the experts of a mixture.
- **cosine**: between the outputs of the quantized and of the float model, logits or hidden states, the last digit
  rounded down. Random weights show that the architecture is computed as it should be, and nothing of the quality of a
  trained model: for that see [Performance](performance.md).
- **`qcut.save`**: what `qcut.load` reads back computes the same output, bit by bit. **`save_pretrained`**: the same of
  `from_pretrained`. **while loading**: `from_pretrained` with a [`QcutConfig`](transformers.md) computes, bit by bit,
  what `qcut.quantize` makes of the loaded float model.
- **`generate`**: transformers' own runs.
- **engine**: `qcut.Engine` serves the model with the tokens of greedy `generate`. The engine has the families
  {families}; `qcut generate` runs other decoders through transformers. It serves what computes as transformers'
  own classes do: a subclass, a forward, a hook or an attribute that changes the result is refused by the module's name,
  and so is code of a downloaded folder. Quantized layers, activations of torch and transformers, and adapters of PEFT
  (LoRA, IA3, AdaLoRA) are served.
- **–**: does not apply."""

"""``qcut quantize``: reads a float model, quantizes it, and writes a folder."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcut.cli.answer import Answer
from qcut.cli.arguments import add_command, add_making_options, add_quantizing_options
from qcut.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from qcut.cli.quantizing import Quantizing
    from qcut.conversion.report import Report

_DESCRIPTION = """\
Makes a model smaller: reads it, replaces its linear layers by quantized ones, and writes the result to a folder, which
`qcut generate`, `qcut eval`, `qcut info`, qcut.load and transformers take. MODEL itself is not changed. The folder
appears when it is complete; if anything fails, nothing is left.

MODEL may be a model for any task, of text, images or sound. Its layers are quantized while it is loaded, one after
another, so that it takes the memory of the quantized model and of one layer; with --calibrate, that of the float model.

w8a8 keeps weights and activations in 8 bits and suits long prompts and many sequences; codebook4 keeps weights in 4
bits and suits few sequences and little memory; w8a16 loses the least. --bits mixes codebooks of 2, 3, 4 and 4+4 bits
and w8a16 so that the model loses the least for its size.
"""

FIELDS = {
    "model": "MODEL as given",
    "out": "the folder that was written",
    "schemes": "number of layers by scheme",
    "bytes_before, bytes_after": "bytes of the model in memory, shared tensors once",
    "file_bytes": "bytes of the folder's files",
    "report": "what became of each layer: {layers, skipped, bytes_before, bytes_after, parameters, already, verified, "
    "held, unseen, smoothed}, see qcut.conversion.report.Report",
}


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of ``qcut``."""
    parser = add_command(
        commands,
        "quantize",
        help="quantize a model and write it to a folder",
        description=_DESCRIPTION,
        example="qcut quantize models/gpt2-5m --scheme codebook4 --out gpt2-4bit\n"
        "qcut quantize models/gpt2-5m --scheme w8a8_static --calibrate book.txt --out gpt2-int8\n"
        "qcut quantize models/gpt2-5m --bits 3.5 --calibrate book.txt --out gpt2-mixed",
        fields=FIELDS,
    )
    add_quantizing_options(parser)
    add_making_options(parser, "DIR", "the folder to write", most=32, batch=8, dtype="that of the model's files")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> Answer:
    """Run the command."""
    from qcut.cli.out_folder import new_folder
    from qcut.cli.quantizing import Quantizing

    out: Path = arguments.out
    quantizing = Quantizing.of(arguments)
    if quantizing.scheme is None and quantizing.bits is None:
        raise ConfigError("quantize: give --scheme NAME, such as w8a8 or codebook4, --plan FILE, or --bits B")
    if Path(arguments.model).is_dir() and out.exists() and out.resolve() == Path(arguments.model).resolve():
        raise ConfigError(f"--out {out}: this is MODEL itself, which is not replaced")
    with new_folder(out, arguments.overwrite) as folder:  # first: nobody computes for a folder that cannot be written
        report = _write(arguments, quantizing, folder)
    sizes = [path.stat().st_size for path in out.iterdir() if path.is_file()]
    schemes: dict[str, int] = {}
    for layer in report.layers:
        schemes[layer.scheme] = schemes.get(layer.scheme, 0) + 1
    data = {"model": arguments.model, "out": str(out), "schemes": schemes}
    data |= {"bytes_before": report.bytes_before, "bytes_after": report.bytes_after, "file_bytes": sum(sizes)}
    text = f"{report}\n{out}: {sum(sizes) / 1e6:.2f} MB in {len(sizes)} files"
    return Answer({**data, "report": report.to_json()}, text)


def _write(arguments: argparse.Namespace, quantizing: Quantizing, folder: Path) -> Report:
    """Quantize the model, and write it to an empty folder."""
    import qcut
    from qcut.checkpoints import hub
    from qcut.checkpoints.tokenizers import fetch_processors
    from qcut.cli.quantizing import open_quantized, shown

    name = arguments.model
    on_disk = Path(name).is_dir() or not hub.answers(name)
    model, tokenizer, report = open_quantized(arguments, quantizing, _stored_dtype(name, on_disk))
    try:
        qcut.save(model, folder, progress=shown(), tokenizer=tokenizer)
        if not Path(name).is_dir():
            fetch_processors(name, folder, on_disk)
    except CheckpointError as error:
        raise CheckpointError(str(error).replace(str(folder), str(arguments.out))) from error
    except OSError as error:
        raise CheckpointError(f"{arguments.out}: cannot be written: {error.strerror or error}") from error
    return report


def _stored_dtype(name: str, on_disk: bool) -> Any:
    """The floating dtype of a model's files, as its configuration states it; float32 where it does not."""
    import torch

    from qcut.checkpoints.headers import read_config
    from qcut.common import versions

    folder = Path(name)
    config: dict[str, Any] = {}
    if folder.is_dir():
        if (folder / "config.json").is_file():
            config = read_config(folder / "config.json")
    else:
        transformers = versions.transformers()
        try:
            config, _ = transformers.PretrainedConfig.get_config_dict(name, local_files_only=on_disk)
        except Exception as error:  # the hub's, of dozens of kinds
            raise CheckpointError(f"{name}: {' '.join(str(error).split())[:600]}") from error
    stated = config.get("dtype") or config.get("torch_dtype")
    return getattr(torch, stated) if stated in ("float16", "bfloat16", "float32") else torch.float32

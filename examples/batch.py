"""Continue every prompt of a file with continuous batching, and resume after an interruption.

python examples/batch.py prompts.jsonl answers.jsonl                       # with the checkpoint in models/gpt2-5m
python examples/batch.py prompts.jsonl answers.jsonl Qwen/Qwen2.5-7B w8a8  # any folder or name on the hub

A line of the first file is {"id": …, "prompt": …}, with a text or a chat as prompt; a line of the second is {"id": …,
"text": …, "reason": …}. Prompts with an answer in the second file are skipped.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

import qcut
from qcut.checkpoints.pretrained import device_of, dtype_for, load_pretrained

MODEL = Path(__file__).resolve().parents[1] / "models" / "gpt2-5m"
BATCH, TOKENS = 16, 64


def objects(path: Path, data: bytes, *fields: str) -> Iterator[dict[str, Any]]:
    """The object of each line.

    Raises:
        SystemExit: a line is not an object with these fields, or its id is neither a string nor a number. The message
            names the file and the line.
    """
    for number, line in enumerate(data.splitlines(), 1):
        try:
            one = json.loads(line)
        except (ValueError, RecursionError):
            one = None
        if not isinstance(one, dict) or not set(fields) <= one.keys() or not isinstance(one["id"], str | int | float):
            raise SystemExit(f"{path}, line {number}: found {line[:60]!r}; allowed: an object with {', '.join(fields)}")
        yield one


def answered(path: Path) -> set[Any]:
    """Ids of complete lines; an incomplete last line of a killed process is cut off."""
    if not path.exists():
        return set()
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return {one["id"] for one in objects(path, whole, "id", "text")}


def results(scheduler: qcut.Scheduler, prompts: list[Any]) -> Iterator[tuple[Any, qcut.Generated]]:
    """Results in order; at most two batches of prompts are submitted at a time."""
    requests: deque[tuple[Any, qcut.Request]] = deque()
    for one in prompts:
        requests.append((one["id"], scheduler.submit(one["prompt"], TOKENS, stop=scheduler.engine.end_tokens)))
        if len(requests) == 2 * BATCH:
            key, request = requests.popleft()
            yield key, request.result()
    for key, request in requests:
        yield key, request.result()


def main(prompts: str, answers: str, name: str = str(MODEL), scheme: str = "w8a8") -> None:
    done = answered(Path(answers))
    todo = [one for one in objects(Path(prompts), Path(prompts).read_bytes(), "id", "prompt") if one["id"] not in done]
    device = device_of("auto")
    model, tokenizer = load_pretrained(name, dtype=dtype_for("auto", device), device=device)
    qcut.quantize(model, scheme)
    engine = qcut.Engine(model, batch=BATCH, tokenizer=tokenizer)
    with qcut.Scheduler(engine) as scheduler, Path(answers).open("a") as out:
        for key, result in tqdm(results(scheduler, todo), total=len(todo), unit="prompt"):
            print(json.dumps({"id": key, "text": result.text, "reason": result.reason}), file=out, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

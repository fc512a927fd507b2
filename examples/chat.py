"""Chat in the terminal: each line is a message, and the answer is streamed. Ctrl-D ends the chat.

python examples/chat.py                          # the checkpoint in models/gpt2-5m, which is too small for good answers
python examples/chat.py Qwen/Qwen2.5-7B-Instruct # any folder or name on the hub with a chat template
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import qcut
from qcut.checkpoints.pretrained import device_of, dtype_for, load_pretrained

MODEL = Path(__file__).resolve().parents[1] / "models" / "gpt2-5m"
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def main(lines: Iterable[str], name: str = str(MODEL)) -> None:
    device = device_of("auto")
    model, tokenizer = load_pretrained(name, dtype=dtype_for("auto", device), device=device)
    tokenizer.chat_template = tokenizer.chat_template or PLAIN
    engine = qcut.Engine(model, tokenizer=tokenizer)
    sampling = qcut.Sampling(temperature=0.7, top_p=0.9)
    chat: list[dict[str, str]] = []
    for line in lines:
        chat.append({"role": "user", "content": line.strip()})
        answer = ""
        for event in engine.stream(chat, 100, sampling=sampling, stop=[*engine.end_tokens, "\nuser:"]):
            print(event.text, end="", flush=True)
            answer += event.text or ""
        print()
        chat.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main(sys.stdin, *sys.argv[1:])

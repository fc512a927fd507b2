"""Stream a completion from a qcut server with OpenAI's client.

qcut serve models/gpt2-5m --scheme w8a8          # in one terminal
python examples/client.py "The import statement"  # in another; needs: pip install openai
"""

from __future__ import annotations

import sys

from openai import OpenAI


def main(text: str, url: str = "http://localhost:8000/v1") -> None:
    with OpenAI(base_url=url, api_key="none") as client:
        (model,) = client.models.list().data
        for piece in client.completions.create(model=model.id, prompt=text, max_tokens=64, stream=True):
            print(piece.choices[0].text, end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The tokenizer of a GGUF file, which holds its tokens, merges or scores, and the name of how it cuts texts.

Sources: llama.cpp, ``src/llama-vocab.cpp`` (names of kinds, and what a file without a flag means); the regular
expressions are those of the models' own ``tokenizer.json``. transformers reads such files too (``gguf_file=``), but
gives some models tokens beyond their vocabulary, cuts numbers otherwise, or leaves out the token that begins texts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn

from qcut.checkpoints.formats.gguf.container import GgufModel
from qcut.common import versions
from qcut.errors import CheckpointError, UnsupportedError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3, _QWEN2 = _WORDS % "{1,3}", _WORDS % ""
_BEFORE, _UPPER, _LOWER = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = rf"{_BEFORE}{_UPPER}*{_LOWER}+%s|{_BEFORE}{_UPPER}+{_LOWER}*%s|\p{{N}}%s"
_BEHIND = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _CASES % ("", "", "") + _BEHIND
_GPT_4O = _CASES % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", "{1,3}") + _BEHIND
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
_WHOLE = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken")
"""Of which a word that is a token is not made of merges; and a token begins each text."""
_COMPOSED = ("mpt", "olmo", "qwen2", "deepseek-r1-qwen", "hunyuan")
"""Of which texts are brought into Unicode's form NFC, as their models' own tokenizers do."""
_CUTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", *_COMPOSED[:2]), (_GPT2,)),
    **dict.fromkeys(("starcoder", "refact", "smollm"), (r"\p{N}", _GPT2)),
    **dict.fromkeys((*_WHOLE[:-1], "dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(_COMPOSED[2:], (_QWEN2,)),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT_4O,)),
    "tekken": (_TEKKEN,),
    "deepseek-coder": _DEEPSEEK_CODER,
}
"""By ``tokenizer.ggml.pre``, what cuts a text into words, one regular expression after another."""
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE = "\u2581"
_MOST_CHARACTERS, _MOST_TEMPLATE = 1 << 10, 1 << 20
_MOST_SPLITS = 1 << 24
_NEXT_TO_IT = "or the tokenizer's own files next to the file"


def tokenizer_of(file: GgufModel) -> Any:
    """The tokenizer that a file describes, a ``PreTrainedTokenizerFast``, with the file's chat template.

    A token that the file marks as control is special; one that it marks as user-defined is found whole in texts.

    Args:
        file: the file.

    Raises:
        UnsupportedError: a kind of tokenizer that is not read (named); transformers is missing or too old.
        CheckpointError: an entry is missing, of another type, or too long, or contradicts another one (named).

    Exactness: the tokens of the model's own tokenizer. Files do not say how a model's tokenizer of the kind ``llama``
    treats spaces next to special tokens; texts between these begin with a space, as in llama.cpp.
    """
    return _Described(file).tokenizer()


class _Described:
    """The entries of a tokenizer, each held to its type.

    Args:
        file: the file.
    """

    def __init__(self, file: GgufModel) -> None:
        self._where, self._data = file.path, file.metadata
        self._kind, self._pre = self._entry("ggml.model", str, ""), self._entry("ggml.pre", str, "")
        if self._kind not in ("gpt2", "llama"):
            self._refuse("ggml.model", f"'gpt2', 'llama', {_NEXT_TO_IT}")
        if self._kind == "gpt2" and self._pre not in _CUTS:
            self._refuse("ggml.pre", f"{', '.join(_CUTS)}, {_NEXT_TO_IT}")
        self._tokens: list[str] = self._list("ggml.tokens", str, each=False)
        table = file.tensors.get("token_embd.weight")
        if table is not None and len(self._tokens) > table.shape[0]:
            self._wrong("ggml.tokens", f"{len(self._tokens)} tokens", f"at most {table.shape[0]}, those of token_embd")
        longest = max(map(len, self._tokens), default=0)
        if longest > _MOST_CHARACTERS:
            self._wrong("ggml.tokens", f"one of {longest} characters", f"up to {_MOST_CHARACTERS}")
        self._vocabulary = {token: i for i, token in enumerate(self._tokens) if token}
        for i, token in enumerate(self._tokens):
            if token and self._vocabulary[token] != i:
                self._wrong("ggml.tokens", f"{token[:40]!r} twice", "different tokens")
        typed = "tokenizer.ggml.token_type" in self._data
        self._types: list[int] = self._list("ggml.token_type", int) if typed else [_NORMAL] * len(self._tokens)

    def tokenizer(self) -> Any:
        """See `tokenizer_of`."""
        special = {f"{name}_token": self._special(key) for name, key in _SPECIAL.items()}
        adds = {
            f"add_{name}_token": self._entry(f"ggml.add_{name}_token", bool, name == "bos" and self._begins())
            for name in ("bos", "eos")
        }
        for name in ("bos", "eos"):
            if adds[f"add_{name}_token"] and special[f"{name}_token"] is None:
                self._wrong(f"ggml.{name}_token_id", None, "a token, since texts get it")
        template = self._entry("chat_template", str, None)
        if template is not None and len(template) > _MOST_TEMPLATE:
            self._wrong("chat_template", f"{len(template)} characters", f"up to {_MOST_TEMPLATE}")
        made = versions.transformers().PreTrainedTokenizerFast(
            tokenizer_object=self._backend(),
            clean_up_tokenization_spaces=False,
            chat_template=template,
            **{key: token for key, token in special.items() if token is not None},
            **adds,
        )
        if len(made) > len(self._tokens):
            self._wrong("ggml.tokens", f"{len(made)} tokens when read", f"{len(self._tokens)}")
        return made

    def _begins(self) -> bool:
        """Whether a token begins texts in files that do not say so."""
        return self._kind == "llama" or self._pre in _WHOLE

    def _backend(self) -> Any:
        from tokenizers import AddedToken, Tokenizer

        backend = Tokenizer(self._model())
        self._set_steps(backend)
        for kind, add in ((_CONTROL, backend.add_special_tokens), (_USER_DEFINED, backend.add_tokens)):
            found = [token for token, its in zip(self._tokens, self._types, strict=True) if its == kind and token]
            add([AddedToken(one, normalized=False, rstrip=self._strips_behind(one, kind)) for one in found])
        return backend

    def _strips_behind(self, token: str, kind: int) -> bool:
        """Whether spaces behind a token are left out, as Phi-3 does."""
        phi3 = self._kind == "llama" and self._data.get("general.architecture") == "phi3"
        return phi3 and (kind == _CONTROL or token == "</s>") and token not in ("<unk>", "<s>", "<|endoftext|>")

    def _model(self) -> Any:
        from tokenizers.models import BPE

        if self._kind == "llama":
            unknown = self._special("unknown")
            known = {} if unknown is None else {"unk_token": unknown, "fuse_unk": True}
            return BPE(vocab=self._vocabulary, merges=self._scored_merges(), byte_fallback=True, **known)
        merges = []
        for merge in self._list("ggml.merges", str, each=False):
            left, _, right = merge.partition(" ")
            if any(one not in self._vocabulary for one in (left, right, left + right)):
                self._wrong("ggml.merges", f"{merge[:80]!r}", "two tokens that make a third one")
            merges.append((left, right))
        return BPE(vocab=self._vocabulary, merges=merges, ignore_merges=self._pre in _WHOLE)

    def _scored_merges(self) -> list[tuple[str, str]]:
        """All pairs of normal tokens that make another one, that with the largest score first."""
        from transformers.tokenization_utils_base import generate_merges

        scores = dict(zip(self._tokens, self._list("ggml.scores", float), strict=True))
        if not all(map(math.isfinite, scores.values())):
            self._wrong("ggml.scores", "NaN or Inf", "finite scores")
        if (characters := sum(map(len, self._tokens))) > _MOST_SPLITS:
            self._wrong("ggml.tokens", f"{characters} characters in all", f"up to {_MOST_SPLITS}")
        others = {token for token, kind in zip(self._tokens, self._types, strict=True) if kind != _NORMAL}
        return list(generate_merges(self._vocabulary, scores, others | {""}))

    def _set_steps(self, backend: Any) -> None:
        """Set what comes before the merges, and after the tokens."""
        from tokenizers import Regex, decoders, normalizers, pre_tokenizers

        if self._kind == "gpt2":
            cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in _CUTS[self._pre]]
            last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            if self._pre in _COMPOSED:
                backend.normalizer = normalizers.NFC()
            backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, last])
            backend.decoder = decoders.ByteLevel()
            return
        begins = self._entry("ggml.add_space_prefix", bool, True)
        replaces = normalizers.Replace(" ", _SPACE)
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replaces]) if begins else replaces
        steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if begins else steps)

    def _special(self, name: str) -> str | None:
        found = self._entry(f"ggml.{name}_token_id", int, None)
        if found is None:
            return None
        if not 0 <= found < len(self._tokens):
            self._wrong(f"ggml.{name}_token_id", found, f"0 to {len(self._tokens) - 1}")
        return self._tokens[found] or None

    def _entry(self, key: str, kind: type[Any], default: Any) -> Any:
        found = self._data.get(f"tokenizer.{key}", default)
        if found is not default and type(found) is not kind:
            self._wrong(key, found, f"{'an' if kind is int else 'a'} {kind.__name__}")
        return found

    def _list(self, key: str, kind: type[Any], *, each: bool = True) -> list[Any]:
        """A list of values of one type, one for each token where ``each`` says so."""
        found = self._data.get(f"tokenizer.{key}")
        if not isinstance(found, list) or not all(type(one) is kind for one in found):
            self._wrong(key, found, f"a list of {kind.__name__}")
        if each and len(found) != len(self._tokens):
            self._wrong(key, f"{len(found)} values", f"{len(self._tokens)}, one for each token")
        return found

    def _refuse(self, key: str, allowed: str) -> NoReturn:
        raise UnsupportedError(
            f"{self._where}: a tokenizer that is not read: tokenizer.ggml.model is {self._kind!r:.80} and "
            f"tokenizer.ggml.pre {self._pre!r:.80}; allowed for {key}: {allowed}"
        )

    def _wrong(self, key: str, found: Any, allowed: str) -> NoReturn:
        what = f"a list of {len(found)}" if isinstance(found, list) else f"{found!s:.80}"
        raise CheckpointError(f"{self._where}: metadata tokenizer.{key}: found {what}; allowed: {allowed}")


_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}

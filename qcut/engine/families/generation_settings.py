"""What a model's ``generation_config`` asks for: kept by the engine, without influence on it, or refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from qcut.errors import ConfigError, UnsupportedError, shown
from qcut.numerics.sampling import Ban, Sampling

_KEPT = ("repetition_penalty", "min_length", "min_new_tokens", "suppress_tokens", "begin_suppress_tokens")
_ELSEWHERE = (
    # arguments of a call
    *("max_length", "max_new_tokens", "eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id"),
    # of draws and of beams
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("early_stopping", "length_penalty", "diversity_penalty", "num_return_sequences", "low_memory"),
    # how transformers computes and what it returns
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size"),
    *("compile_config", "disable_compile", "continuous_batching_config", "return_legacy_cache"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
    *("use_mtp", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "speculation_type"),
    *("assistant_confidence_threshold", "prompt_lookup_num_tokens", "max_matching_ngram_size"),
    *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
    # what greedy tokens do not depend on
    *("renormalize_logits", "remove_invalid_values", "transformers_version", "generation_kwargs"),
)
_NEUTRAL: dict[str, object] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "guidance_scale", "encoder_repetition_penalty"), 1),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), None),  # 0 is a token
}
"""Values that request nothing, besides None, False, 0 and empty ones."""


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of a model by which all its sequences go.

    Attributes:
        vocabulary: number of token ids.
        repetition_penalty: of a `Sampling` that names none.
        min_length: tokens of prompt and continuation before which no stop token is chosen.
        min_new_tokens: the same of only the continuation, if a call names no number.
        suppressed: ids that are never chosen.
        suppressed_first: ids that no continuation begins with.
    """

    vocabulary: int
    repetition_penalty: float = 1.0
    min_length: int = 0
    min_new_tokens: int = 0
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()

    @classmethod
    def of(cls, model: Any, vocabulary: int) -> GenerationSettings:
        """The settings in a model's ``generation_config``.

        Raises:
            UnsupportedError: a setting that changes greedy tokens, and that the engine does not have.
            ConfigError: a setting that the engine has, outside of its range.
        """
        config = getattr(model, "generation_config", None)
        if config is None:
            return cls(vocabulary)
        from transformers import GenerationConfig

        known = vars(GenerationConfig())  # other entries are read by nobody
        for name, value in vars(config).items():
            if name.startswith("_") or name not in known or name in _KEPT or name in _ELSEWHERE:
                continue
            if value not in (None, _NEUTRAL.get(name, False), (), [], {}):
                raise UnsupportedError(
                    f"generation_config.{name} is {shown(value)}, which the engine does not have; allowed: None. Set it"
                    " to None to do without, or call model.generate"
                )
        found = {name: value for name in _KEPT if (value := getattr(config, name, None)) is not None}
        least = {name: _whole(name, found.get(name, 0)) for name in ("min_length", "min_new_tokens")}
        try:
            penalty = Sampling(repetition_penalty=found.get("repetition_penalty")).repetition_penalty
        except ConfigError as error:
            raise ConfigError(f"generation_config.{error}") from None
        return cls(
            vocabulary,
            1.0 if penalty is None else float(penalty),
            least["min_length"],
            least["min_new_tokens"],
            _ids("suppress_tokens", found, vocabulary),
            _ids("begin_suppress_tokens", found, vocabulary),
        )

    def sampling(self, given: Sampling | None) -> Sampling:
        """How tokens are chosen, by a call and, if it leaves that open, by the model."""
        given = given or Sampling()
        if given.repetition_penalty is not None:
            return given
        return replace(given, repetition_penalty=self.repetition_penalty)

    def bans(self, stops: Sequence[int], length: int, min_new_tokens: int | None) -> tuple[Ban, ...]:
        """Tokens that a sequence does not choose, at first or at all.

        Args:
            stops: ids that end the sequence.
            length: tokens of the prompt.
            min_new_tokens: least number of new tokens before a stop token; None: the model's.
        """
        least = self.min_new_tokens if min_new_tokens is None else min_new_tokens
        bans = (
            Ban(self.suppressed),
            Ban(self.suppressed_first, length + 1),
            Ban(tuple(token for token in stops if 0 <= token < self.vocabulary), max(length + least, self.min_length)),
        )
        return tuple(ban for ban in bans if ban.tokens and (ban.until is None or ban.until > length))


def _whole(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise ConfigError(f"generation_config.{name} is {shown(value)}; allowed: 0 to {2**31 - 1}")
    return value


def _ids(name: str, found: dict[str, Any], vocabulary: int) -> tuple[int, ...]:
    ids = found.get(name, ())
    is_list = isinstance(ids, list | tuple)
    if not is_list or not all(isinstance(token, int) and 0 <= token < vocabulary for token in ids):
        raise ConfigError(f"generation_config.{name} is {shown(ids)}; allowed: ids of tokens, 0 to {vocabulary - 1}")
    return tuple(sorted(set(ids)))

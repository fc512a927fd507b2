"""The engine against Hugging Face's own generation, its limits, and what it leaves behind."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

import qcut
from qcut import errors
from qcut.engine.engine import DEFAULT_CONTEXT, Engine
from qcut.engine.families import decoder_of
from qcut.layers.linear import Linear
from qcut.numerics.int8 import sqnr_db
from qcut.numerics.sampling import Sampling
from tests.support import ROOT
from tests.support.decoders import KINDS, VOCABULARY, kept, last_logits, prompts_of, sizes, small, theirs

TRAINED = [
    ROOT / "models" / "gpt2-5m",
    *(path for name in ("gpt2-14m", "llama-13m") if (path := ROOT.parent / "shared" / "models" / name).is_dir()),
]


# ── against Hugging Face ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("scheme", [None, "w8a8", "w8a8_rotated", "codebook4"])
@pytest.mark.parametrize("folder", TRAINED, ids=lambda folder: folder.name)
def test_greedy_tokens_of_trained_models_are_hugging_faces(folder: Path, scheme: str | None) -> None:
    """Of random ones, with every scheme: `test_stacked_engine`."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    if scheme is not None:
        qcut.quantize(model, scheme, allow_growth=True, progress=False)
    prompts = prompts_of(model.config.vocab_size, 5, 17)
    got = Engine(model, batch=3, context=64).generate(prompts, 6)
    assert [g.tokens for g in got] == [theirs(model, prompt, 6) for prompt in prompts]
    assert {g.reason for g in got} == {"length"}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_hugging_faces(kind: str) -> None:
    """Both are float32 sums of the same products in some order, of 2 layers: 1e-4 of the largest logit is ample."""
    model = small(kind)
    engine = Engine(model, batch=4)
    prompts = prompts_of(VOCABULARY, 3, 40, 1, 17)
    logits = engine.prefill(prompts)
    for step in range(4):
        for row, prompt in zip(logits, prompts, strict=True):
            want = last_logits(model, prompt)
            assert (row - want).abs().max() <= 1e-4 * want.abs().max()
        chosen = [(7 * step + i) % VOCABULARY for i in range(4)]
        logits = engine.decode(chosen)
        prompts = [[*prompt, token] for prompt, token in zip(prompts, chosen, strict=True)]
    assert engine.lengths == (7, 44, 5, 21)


def test_a_quantized_table_and_classifier() -> None:
    model = small("llama")
    qcut.quantize(model, "codebook4_g32_qr", embeddings="w8a16", skip=[], allow_growth=True, progress=False)
    prompt = prompts_of(VOCABULARY, 9)[0]
    assert Engine(model).generate([prompt], 12)[0].tokens == theirs(model, prompt, 12)


@pytest.mark.parametrize(
    "kind",
    [
        *("gpt2", "qwen2", "qwen3", "olmo2", "phi3_partial", "smollm3", "starcoder2", "gpt_neox", "gemma2"),
        *("qwen3_moe", "granitemoe", "ernie4_5_moe", "gpt_oss"),
    ],
)
def test_ragged_prompts_are_the_single_ones(kind: str) -> None:
    model = small(kind)
    prompts = prompts_of(VOCABULARY, 30, 2, 11, 1)
    together = Engine(model, batch=6).generate(prompts, 20)
    alone = [Engine(model).generate([prompt], 20)[0] for prompt in prompts]
    assert together == alone
    as_tensor = torch.tensor([prompts[0], prompts[0]])
    assert Engine(model, batch=2).generate(as_tensor, 20) == [together[0]] * 2


def test_half_precision() -> None:
    model = small("llama").to(torch.bfloat16)
    prompt = prompts_of(VOCABULARY, 12)[0]
    engine = Engine(model)
    logits = engine.prefill([prompt])
    assert logits.dtype is torch.bfloat16
    want = last_logits(model, prompt)
    assert (logits[0] - want).abs().max() <= 2.0**-4 * want.abs().max()


class Norms(TorchDispatchMode):
    """Counts norms that are called by themselves."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.qcut.add_norm.early_read
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "of_heads"), [("llama", 0), ("qwen3", 0), ("gemma3", 0), ("olmo2", 2)])
def test_steps_normalize_heads_within_attention(kind: str, of_heads: int) -> None:
    """Norms of whole queries and keys come before."""
    model = small(kind)
    block, engine = decoder_of(model).blocks[0], Engine(model)
    engine.prefill([[1, 2, 3]])
    with Norms() as norms:
        engine.decode([4])
    others = (block.attention_norm, block.mlp_norm, block.attention_end, block.mlp_end)
    assert norms.count == 2 * (sum(norm is not None for norm in others) + of_heads) + 1


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_norms_quantize_if_all_readers_take_int8(kind: str) -> None:
    model = small(kind)
    assert decoder_of(model).blocks[0].attention_norm.k_padded is None
    qcut.quantize(model, "w8a8", skip=["*.1.mlp.*"], progress=False)
    first, second = decoder_of(model).blocks[:2]
    assert first.attention_norm.k_padded == second.attention_norm.k_padded == 48
    assert first.mlp_norm.k_padded == 48
    assert second.mlp_norm.k_padded is None


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_int8_tokens_change_nothing(kind: str) -> None:
    """The same layers, wrapped so that the engine calls them with floats, give the same bits."""
    model = small(kind)
    qcut.quantize(model, "w8a8", progress=False)
    prompts = prompts_of(VOCABULARY, 7, 12)
    engine = Engine(model, batch=2)
    got = engine.prefill(prompts), engine.decode([3, 4])
    for name, layer in list(model.named_modules()):
        if isinstance(layer, Linear):
            model.set_submodule(name, nn.Sequential(layer))
    engine = Engine(model, batch=2)
    assert engine.decoder.blocks[0].mlp_norm.k_padded is None
    for one, other in zip(got, (engine.prefill(prompts), engine.decode([3, 4])), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kv_cache", ["auto", "int8"])
def test_prompts_in_parts_are_the_prompts(kv_cache: Any) -> None:
    model, prompts = small("llama"), prompts_of(VOCABULARY, 7, 12, 5)
    whole, parts = (Engine(model, batch=3, kv_cache=kv_cache) for _ in range(2))
    parts.runner.max_prefill_tokens = 24  # two sequences of twelve
    results = [(e.prefill(prompts), e.decode([1, 2, 3]), torch.cat(e.score(prompts))) for e in (whole, parts)]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


# ── generation ───────────────────────────────────────────────────────────────────────────────────


def test_stop_tokens_end_one_sequence_and_leave_the_others() -> None:
    model = small("llama")
    prompts = prompts_of(VOCABULARY, 6, 13)
    free = [g.tokens for g in Engine(model, batch=2).generate(prompts, 20)]
    stop = next(token for token in free[0] if token not in free[1])
    end = free[0].index(stop) + 1
    heard: list[tuple[int, int]] = []
    engine = Engine(model, batch=2)
    got = engine.generate(prompts, 20, stop=[stop], on_token=lambda i, token: heard.append((i, token)))
    assert (got[0].tokens, got[0].reason) == (free[0][:end], "stop")
    assert (got[1].tokens, got[1].reason) == (free[1], "length")
    for i in range(2):
        assert [token for j, token in heard if j == i] == got[i].tokens
    # What has ended has kept its place: both go on as if they were the only ones.
    logits = engine.decode([g.tokens[-1] for g in got])
    for row, prompt, g in zip(logits, prompts, got, strict=True):
        want = last_logits(model, prompt + g.tokens)
        assert (row - want).abs().max() <= 1e-4 * want.abs().max()


def test_generation_fills_the_context_and_says_so() -> None:
    model = small("gpt2")
    prompts = prompts_of(VOCABULARY, 9, 3)
    engine = Engine(model, batch=2, context=12)
    got = engine.generate(prompts)
    assert [(len(g.tokens), g.reason) for g in got] == [(4, "context"), (10, "context")]
    wide = Engine(model, batch=2).generate(prompts, 10)
    assert [g.tokens for g in got] == [w.tokens[: len(g.tokens)] for w, g in zip(wide, got, strict=True)]
    assert engine.lengths == (12, 12)
    with pytest.raises(errors.ContextError, match="sequence 0 has 12 tokens, the engine's whole context"):
        engine.decode([1, 2])
    assert engine.generate(prompts_of(VOCABULARY, 12), 5)[0].reason == "context"


def test_sampling_follows_its_seed_alone() -> None:
    model = small("qwen2")
    prompts = prompts_of(VOCABULARY, 4, 4, 9)
    engine = Engine(model, batch=3)
    hot = Sampling(temperature=1.5, top_k=40, top_p=0.95, seed=3)
    first = engine.generate(prompts, 12, sampling=hot)
    assert engine.generate(prompts, 12, sampling=hot) == first
    assert engine.generate(prompts, 12, sampling=Sampling(1.5, 40, 0.95, 4)) != first
    assert engine.generate(prompts[:1], 12, sampling=hot)[0] == first[0]
    assert engine.generate(prompts, 12, sampling=Sampling(1e-6)) == engine.generate(prompts, 12)


def test_what_the_callback_raises_comes_through_and_the_engine_goes_on() -> None:
    model = small("llama")
    engine = Engine(model, batch=1)
    prompt = prompts_of(VOCABULARY, 5)

    def fail(sequence: int, token: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompt, 5, on_token=fail)
    assert engine.generate(prompt, 5) == Engine(model).generate(prompt, 5)


def test_a_model_that_fails_leaves_the_engine_usable() -> None:
    model = small("llama")
    engine = Engine(model)
    prompt = prompts_of(VOCABULARY, 5)
    want = engine.generate(prompt, 5)

    def fail(module: nn.Module, given: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    for call, argument, lengths in ((engine.prefill, prompt, ()), (engine.decode, [3], (5,))):
        engine.prefill(prompt)
        hook = model.model.layers[1].mlp.down_proj.register_forward_pre_hook(fail)
        with hook, pytest.raises(torch.OutOfMemoryError):
            call(argument)
        assert engine.lengths == lengths
        assert engine.generate(prompt, 5) == want


def test_ten_thousand_tokens_take_no_more_memory() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**sizes(hidden_size=12, num_hidden_layers=1, intermediate_size=8))
    model = LlamaForCausalLM(config).eval()
    engine = Engine(model, batch=100)
    prompts = prompts_of(VOCABULARY, *(14 for _ in range(100)))

    def tensors() -> int:
        gc.collect()
        return sum(t.nbytes for t in gc.get_objects() if type(t) is Tensor)

    engine.generate(prompts, 3)
    before = tensors()
    for _ in range(2):
        assert sum(len(g.tokens) for g in engine.generate(prompts, 50)) == 5000
    assert tensors() == before


# ── the cache ────────────────────────────────────────────────────────────────────────────────────


def test_int8_keys_and_values_are_near_and_half_the_memory() -> None:
    model = small("llama").to(torch.float16).float()
    prompt = prompts_of(VOCABULARY, 33)
    exact, small_cache = Engine(model), Engine(model, kv_cache="int8")
    want, got = exact.prefill(prompt), small_cache.prefill(prompt)
    for token in (3, 4):
        assert sqnr_db(want, got) > 25
        want, got = exact.decode([token]), small_cache.decode([token])
    assert small_cache.cache.nbytes == exact.cache.nbytes * (8 + 4) // 32


def test_scores_are_the_logits_likelihoods() -> None:
    model = small("qwen2")
    prompts = prompts_of(VOCABULARY, 12, 5, 1)
    engine = Engine(model, batch=3)
    for prompt, scores in zip(prompts, engine.score(prompts), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0]
        want = -logits.log_softmax(-1)[torch.arange(len(prompt) - 1), prompt[1:]]
        assert torch.allclose(scores, want, atol=1e-4)
    assert engine.lengths == (12, 5, 1)


def test_prefill_and_decode_fill_the_same_cache() -> None:
    model = small("llama")
    prompt = prompts_of(VOCABULARY, 20)[0]
    whole, steps = Engine(model, kv_cache="int8"), Engine(model, kv_cache="int8")
    want = whole.prefill([prompt])
    steps.prefill([prompt[:-1]])
    got = steps.decode(prompt[-1:])
    assert (got - want).abs().max() <= 1e-3 * want.abs().max()


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────


def test_models_that_are_no_decoders_are_refused_by_name() -> None:
    opt = OPTForCausalLM(
        OPTConfig(hidden_size=16, num_hidden_layers=1, ffn_dim=32, num_attention_heads=2, word_embed_proj_dim=16)
    )
    strange = small("llama")
    strange.model.rotary_emb.rope_type = "proportional"
    strange_layers = small("gemma3")
    strange_layers.model.rotary_emb.rope_type["full_attention"] = "proportional"
    crossed = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=16, n_layer=1, n_head=2, add_cross_attention=True))
    for model, message in (
        (opt, "OPTForCausalLM: a model of type 'opt'; allowed: .* gpt2, llama, mistral, qwen2"),
        (nn.Linear(2, 2), "Linear: a model of type None"),
        (small("llama").model, r"\.LlamaModel is not the .*\.LlamaForCausalLM of transformers"),
        (strange, "rotary positions of type 'proportional'"),
        (strange_layers, "Gemma3ForCausalLM: rotary positions of type 'proportional'"),
        (small("gemma3", use_bidirectional_attention=True), "use_bidirectional_attention is set"),
        (crossed, "GPT2LMHeadModel: add_cross_attention is set"),
    ):
        with pytest.raises(errors.UnsupportedError, match=message):
            Engine(model)


def test_sizes_are_checked() -> None:
    model = small("llama")
    for options, message in (
        ({"batch": 0}, "batch is 0; allowed: 1 and more"),
        ({"context": 0}, "context is 0; allowed for LlamaForCausalLM: 1 to 64"),
        ({"context": 65}, "context is 65; allowed for LlamaForCausalLM: 1 to 64"),
        ({"kv_cache": "int3"}, "kv_cache is 'int3'; allowed: auto, int8, int4, int8/int4"),
    ):
        with pytest.raises(errors.ConfigError, match=message):
            Engine(model, **options)
    long = small("phi3_long")  # its frequencies change past that
    with pytest.raises(errors.ConfigError, match="context is 49; allowed for Phi3ForCausalLM: 1 to 48"):
        Engine(long, context=49)
    config = LlamaConfig(**sizes(max_position_embeddings=100_000, num_hidden_layers=1))
    assert Engine(LlamaForCausalLM(config)).context == DEFAULT_CONTEXT


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        ([], errors.ShapeError, "no prompt"),
        ([[1], []], errors.ShapeError, "prompt 1 is empty"),
        ([[1], [2], [3]], errors.ContextError, "3 prompts; this engine's batch is 2"),
        ([[1] * 17], errors.ContextError, "prompt 0 has 17 tokens; this engine's context is 16"),
        ([[1, VOCABULARY]], errors.ConfigError, f"token id {VOCABULARY}; allowed: 0 to {VOCABULARY - 1}"),
        ([[-1]], errors.ConfigError, "token id -1"),
        ([[0.5]], errors.DtypeError, "token ids are float32; allowed: integers"),
        (torch.zeros(3, dtype=torch.int64), errors.ShapeError, r"prompts have shape \[3\]; allowed: \[B, T\]"),
        (torch.zeros(1, 3), errors.DtypeError, "token ids are float32"),
    ],
)
def test_bad_prompts_are_refused_and_change_nothing(prompts: Any, error: Any, message: str) -> None:
    engine = Engine(small("llama"), batch=2, context=16)
    engine.prefill([[1, 2], [3]])
    want = kept(engine.cache, 0)
    with pytest.raises(error, match=message):
        engine.generate(prompts, 3)
    assert engine.lengths == (2, 1)
    for one, other in zip(kept(engine.cache, 0), want, strict=True):
        assert torch.equal(one, other)


def test_bad_steps_are_refused() -> None:
    engine = Engine(small("llama"), batch=2)
    with pytest.raises(errors.ShapeError, match=r"decode: \[1\] tokens; allowed: \[0\]"):
        engine.decode([1])
    engine.prefill([[1, 2], [3]])
    for tokens, error, message in (
        ([1], errors.ShapeError, r"decode: \[1\] tokens; allowed: \[2\], one for each prompt"),
        ([1, VOCABULARY], errors.ConfigError, "token id 96"),
        ([0.5, 1.0], errors.DtypeError, "token ids are float32"),
    ):
        with pytest.raises(error, match=message):
            engine.decode(tokens)  # type: ignore[arg-type]
    with pytest.raises(errors.ConfigError, match="max_new_tokens is 0"):
        engine.generate([[1]], 0)
    assert engine.lengths == (2, 1)

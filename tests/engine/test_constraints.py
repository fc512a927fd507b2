"""Constraints: answers have their form, however tokens are chosen, and neighbours keep their tokens."""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from typing import Any, Literal

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import qcut
from qcut.engine.request import Request
from qcut.errors import ConfigError, ConstraintError, RequestError
from qcut.numerics.sampling import only_allowed
from qcut.text.constraint import MOST_BYTES, MOST_DEPTH
from tests.support import ROOT

pytest.importorskip("llguidance")
pydantic = pytest.importorskip("pydantic")

MODEL = ROOT / "models" / "gpt2-5m"
PROMPT = "def parse(text):\n"
DRAWS = [
    qcut.Sampling(),
    qcut.Sampling(1.0, seed=7),
    qcut.Sampling(1.5, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.3, presence_penalty=0.5, seed=3),
    qcut.Sampling(0.7, logit_bias={5: 100.0, 90: -100.0}, seed=1),
]
NUMBERS = qcut.Constraint.regex("[0-9]{3}(-[0-9]{3}){2}")
LETTERS = qcut.Constraint.regex("[a-z]{400,450}")


class Item(pydantic.BaseModel, extra="forbid"):
    name: str = pydantic.Field(max_length=8)
    kind: Literal["list", "set"]


class Found(pydantic.BaseModel, extra="forbid"):
    count: int = pydantic.Field(ge=0, le=99)
    items: list[Item] = pydantic.Field(max_length=2)
    note: str | None = pydantic.Field(max_length=10)


SCHEMA = qcut.Constraint.json_schema(Found.model_json_schema())


@cache
def loaded() -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    qcut.quantize(model, "w8a8", progress=False)
    return model, AutoTokenizer.from_pretrained(MODEL)


def engine_of(batch: int = 1, **options: Any) -> qcut.Engine:
    model, tokenizer = loaded()
    return qcut.Engine(model, tokenizer=tokenizer, batch=batch, **options)


def scheduler_of(batch: int, ahead: bool = False, **options: Any) -> qcut.Scheduler:
    scheduler = qcut.Scheduler(engine_of(batch, **options))
    scheduler._batch.runs_ahead = ahead  # as on a GPU
    return scheduler


def finished(scheduler: qcut.Scheduler) -> None:
    while scheduler.step():
        pass


def text_of(request: Request) -> str:
    found = request.result()
    assert found.text is not None
    return found.text


@pytest.mark.parametrize("sampling", DRAWS)
def test_answers_are_of_their_schema(sampling: qcut.Sampling) -> None:
    found = engine_of(2).generate([PROMPT, "A list of"], 400, sampling=sampling, constraint=SCHEMA)
    for each in found:
        assert each.reason == "stop"
        Found.model_validate_json(each.text or "")
    (free,) = engine_of().generate(PROMPT, 40, sampling=sampling)
    with pytest.raises(pydantic.ValidationError):
        Found.model_validate_json(free.text or "")


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        (NUMBERS, NUMBERS.text),
        (qcut.Constraint.choice(["yes", 'é😀 "quoted"\n\\', "no"]), 'yes|é😀 "quoted"\n\\\\|no'),
        (qcut.Constraint.grammar('start: "(" (start | NUMBER){0,2} ")"\nNUMBER: /[0-9]{1,3}/'), r"[()0-9]+"),
        (qcut.Constraint.grammar('root ::= "v" [0-9] "." [0-9]'), r"v\d\.\d"),
    ],
)
def test_kinds_of_constraints(constraint: qcut.Constraint, pattern: str) -> None:
    for seed in range(3):
        (found,) = engine_of().generate(PROMPT, 300, sampling=qcut.Sampling(1.0, seed=seed), constraint=constraint)
        assert found.reason == "stop"
        assert re.fullmatch(pattern, found.text or "")


def test_any_object_is_an_object() -> None:
    engine = engine_of()
    braces = qcut.Sampling(1.0, logit_bias={engine.tokenizer("}")["input_ids"][0]: 3.0}, seed=2)
    for prompt in (PROMPT, 'x = {"a": 1}\ny = '):
        (found,) = engine.generate(prompt, 400, constraint=qcut.Constraint.json_object(), sampling=braces)
        assert found.reason == "stop"
        assert isinstance(json.loads(found.text or ""), dict)


def test_tokens_are_the_likeliest_that_are_allowed() -> None:
    engine, tokens = engine_of(), []
    (found,) = engine.generate(PROMPT, 30, constraint=NUMBERS)
    logits = engine.prefill(PROMPT)[0]
    text = ""
    while not re.fullmatch(NUMBERS.text, text):
        tails = [text + each for each in engine.tokenizer.batch_decode([[t] for t in range(len(logits))])]
        right = [tail > text and fits(tail) for tail in tails]
        tokens.append(int(logits.float().masked_fill(~torch.tensor(right), -torch.inf).argmax()))
        text = tails[tokens[-1]]
        logits = engine.decode(tokens[-1:])[0]
    assert found.tokens == tokens


def fits(text: str) -> bool:
    """Whether a text is the beginning of one of `NUMBERS`."""
    return re.fullmatch(NUMBERS.text, text + "000-000-000"[len(text) :]) is not None


@pytest.mark.parametrize("ahead", [False, True])
def test_requests_with_and_without_constraints(ahead: bool) -> None:
    scheduler = scheduler_of(3, ahead)
    asked = [SCHEMA, None, NUMBERS, None, SCHEMA, qcut.Constraint.choice(["on", "off"])]
    requests = [
        scheduler.submit(PROMPT, None if each else 20, sampling=DRAWS[i % 4], constraint=each)
        for i, each in enumerate(asked)
    ]
    finished(scheduler)
    texts = [text_of(request) for request in requests]
    for i in (0, 4):
        Found.model_validate_json(texts[i])
    assert re.fullmatch(NUMBERS.text, texts[2])
    assert texts[5] in ("on", "off")
    assert [request.reason for request in requests] == ["stop", "length", "stop", "length", "stop", "stop"]


@pytest.mark.parametrize("ahead", [False, True])
def test_neighbours_keep_their_tokens(ahead: bool) -> None:
    def neighbours(constraint: qcut.Constraint | None) -> list[list[int]]:
        scheduler = scheduler_of(3, ahead)
        first = scheduler.submit(PROMPT, 24, sampling=DRAWS[1])
        middle = scheduler.submit("The import", 24, constraint=constraint)
        last = scheduler.submit("A list is", 24)
        finished(scheduler)
        assert constraint is None or re.fullmatch("[a-z]+", text_of(middle))
        return [first.tokens, last.tokens]

    assert neighbours(LETTERS) == neighbours(None)


@pytest.mark.parametrize("ahead", [False, True])
def test_other_requests_do_not_change_the_answer(ahead: bool) -> None:
    (single,) = engine_of().generate(PROMPT, 400, constraint=SCHEMA, sampling=DRAWS[2])
    scheduler = scheduler_of(2, ahead)
    first = scheduler.submit(PROMPT, constraint=SCHEMA, sampling=DRAWS[2])
    others = [scheduler.submit(PROMPT, n, constraint=LETTERS) for n in (3, 9, 4)]
    finished(scheduler)
    Found.model_validate_json(text_of(first))
    assert first.tokens == single.tokens
    assert [len(each.tokens) for each in others] == [3, 9, 4]


def test_samples_have_answers_of_their_own() -> None:
    scheduler = scheduler_of(4)
    requests = scheduler.submit_samples(PROMPT, 4, constraint=NUMBERS, sampling=qcut.Sampling(2.0, seed=4))
    finished(scheduler)
    texts = {text_of(request) for request in requests}
    assert len(texts) > 1
    assert all(re.fullmatch(NUMBERS.text, text) for text in texts)


def test_end_tokens_come_where_the_text_is_complete() -> None:
    engine = engine_of()
    bias = qcut.Sampling(logit_bias={engine.end_tokens[0]: 100.0})
    (found,) = engine.generate(PROMPT, 50, constraint=qcut.Constraint.regex("[ab]{3,40}"), sampling=bias)
    assert re.fullmatch("[ab]{3,5}", found.text or "")  # a token may have several letters
    assert (found.reason, found.tokens[-1]) == ("stop", engine.end_tokens[0])
    (found,) = engine.generate(PROMPT, 50, constraint=qcut.Constraint.regex("[ab]{3}"), sampling=bias)
    assert engine.end_tokens[0] not in found.tokens  # nothing may follow: no step is spent on the end
    assert (found.reason, len(found.text or "")) == ("stop", 3)


def test_least_tokens_give_way_to_complete_answers() -> None:
    engine = engine_of()
    bias = qcut.Sampling(logit_bias={engine.end_tokens[0]: 100.0})
    options = {"sampling": bias, "min_new_tokens": 20}
    (short,) = engine.generate(PROMPT, 50, constraint=qcut.Constraint.regex("[ab]{3}"), **options)
    assert (short.reason, len(short.text or "")) == ("stop", 3)
    (long,) = engine.generate(PROMPT, 50, constraint=qcut.Constraint.regex("[ab]{3,90}"), **options)
    assert (long.reason, len(long.tokens)) == ("stop", 21)


def test_limits_cut_answers() -> None:
    (found,) = engine_of().generate(PROMPT, 7, constraint=LETTERS)
    assert (found.reason, len(found.tokens)) == ("length", 7)
    stop = (found.text or "")[3:5]
    (found,) = engine_of().generate(PROMPT, 80, constraint=LETTERS, stop=[stop])
    assert found.reason == "stop"
    assert stop not in (found.text or "")
    (found,) = engine_of(context=16).generate([[1, 2, 3]], constraint=LETTERS)
    assert (found.reason, len(found.tokens)) == ("context", 14)
    (whole,) = engine_of().generate(PROMPT, constraint=NUMBERS)
    (found,) = engine_of().generate(PROMPT, len(whole.tokens), constraint=NUMBERS)
    assert (found.reason, found.tokens) == ("stop", whole.tokens)


def test_cached_prefixes_change_no_answer() -> None:
    scheduler = scheduler_of(1)
    requests = [scheduler.submit(PROMPT * 3, constraint=SCHEMA) for _ in range(2)]
    finished(scheduler)
    assert requests[1].reused_tokens > 0
    assert requests[0].tokens == requests[1].tokens


@pytest.mark.parametrize("ahead", [False, True])
def test_drafts_rest_while_a_constraint_runs(ahead: bool) -> None:
    prompt = "a, b, c, d, " * 6
    (want,) = engine_of().generate(prompt, 30)
    (answer,) = engine_of().generate(prompt, constraint=SCHEMA)
    scheduler = scheduler_of(2, ahead, speculate=qcut.Lookup())
    free = scheduler.submit(prompt, 30)
    bound = scheduler.submit(prompt, constraint=SCHEMA)
    finished(scheduler)
    assert (free.tokens, bound.tokens) == (want.tokens, answer.tokens)
    assert bound.drafted_tokens == 0
    assert bound.reason == "stop"


def test_log_probabilities_are_the_models() -> None:
    (found,) = engine_of().generate(PROMPT, constraint=NUMBERS, top=1)
    scores = found.log_probabilities or []
    assert len(scores) == len(found.tokens)
    assert any(each.chosen < each.top[0][1] for each in scores)


@pytest.mark.parametrize("ahead", [False, True])
def test_cancelled_requests_leave_others_alone(ahead: bool) -> None:
    scheduler = scheduler_of(2, ahead)
    cancelled, other = (scheduler.submit(PROMPT, constraint=each) for each in (LETTERS, SCHEMA))
    for _ in range(6):
        scheduler.step()
    cancelled.cancel()
    finished(scheduler)
    assert cancelled.result().reason == "cancelled"
    Found.model_validate_json(text_of(other))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_failure_is_its_own_requests(ahead: bool) -> None:
    scheduler = scheduler_of(3, ahead)
    # After its first letters, the states of this expression are more than llguidance's limits allow.
    wrong = scheduler.submit(PROMPT, constraint=qcut.Constraint.regex("(.{0,1000}[a-z]){0,100}"))
    others = [scheduler.submit(PROMPT, constraint=SCHEMA), scheduler.submit(PROMPT, 12)]
    finished(scheduler)
    with pytest.raises(RequestError, match=r"the constraint fails after \d+ tokens: lexer error"):
        wrong.result()
    Found.model_validate_json(text_of(others[0]))
    assert others[1].reason == "length"
    assert scheduler.submit(PROMPT, 2).is_cancelled is False


def test_a_failure_does_not_spoil_its_constraint() -> None:
    constraint = qcut.Constraint.regex("(.{0,1000}[a-z]){0,100}")
    engine, ends = engine_of(), []
    for _ in range(3):
        with pytest.raises(RequestError, match="the constraint fails after") as found:
            engine.generate(PROMPT, 100, constraint=constraint)
        ends.append(str(found.value))
    assert len(set(ends)) == 1


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (qcut.Constraint.json_schema({"type": "strin"}), "json_schema: Invalid type: strin; allowed: JSON Schema"),
        (qcut.Constraint.json_schema({"not": {}}), 'Unimplemented keys: ["not"]'),
        (qcut.Constraint.json_schema({"not": {}, "x-guidance": {"lenient": True}}), 'Unimplemented keys: ["not"]'),
        (qcut.Constraint.json_schema({"$ref": "file:///etc/hostname"}), "does not fetch resources"),
        (qcut.Constraint.json_schema({"$ref": "https://example.com/a"}), "does not fetch resources"),
        (qcut.Constraint.json_schema({"minimum": 2, "maximum": 1, "type": "integer"}), "Unsatisfiable schema"),
        (qcut.Constraint.regex("a("), "unclosed group"),
        (qcut.Constraint.grammar("start: other"), 'at 1(8): unknown name: "other"'),
        (qcut.Constraint.grammar("start: <|other|>"), 'unknown special token: "<|other|>"'),
        (qcut.Constraint.grammar("root ::= other"), "'other' not found; allowed: Lark's syntax"),
    ],
)
def test_wrong_constraints_say_where(constraint: qcut.Constraint, words: str) -> None:
    with pytest.raises(ConstraintError, match=re.escape(words)) as found:
        engine_of().generate(PROMPT, 5, constraint=constraint)
    assert len(str(found.value)) < 700
    with pytest.raises(ConfigError):
        scheduler_of(1).submit(PROMPT, 5, constraint=constraint)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("make", "given", "words"),
    [
        ("json_schema", "[1]", "allowed: a JSON object"),
        ("json_schema", "{", "is no JSON"),
        ("json_schema", "[" * 100_000, "is no JSON"),
        ("json_schema", {"enum": [object()]}, "is no JSON"),
        ("json_schema", {"const": float("nan")}, "is no JSON"),
        ("json_schema", {"enum": ["x" * 1000] * 140}, "bytes; allowed: 131072"),
        ("json_schema", " " * (MOST_BYTES["json_schema"] + 1), "1 character and more"),
        ("json_schema", nested(MOST_DEPTH + 1), "nested deeper than allowed: 64"),
        ("regex", "", "1 character and more"),
        ("regex", "a" * 5000, "regex has 5000 bytes; allowed: 4096"),
        ("regex", 5, "regex is 5"),
        ("grammar", "é" * 40_000, "grammar has 80000 bytes; allowed: 65536"),
        ("choice", [], "choice has 0 strings"),
        ("choice", ["a"] * 1025, "choice has 1025 strings; allowed: a list of 1 to 1024"),
        ("choice", ["a", ""], "choice has ''"),
        ("choice", "ab", "choice is 'ab'"),
    ],
)
def test_limits_of_constraints(make: str, given: Any, words: str) -> None:
    with pytest.raises(ConstraintError, match=re.escape(words)):
        getattr(qcut.Constraint, make)(given)


CHAIN = "start: r0\n" + "".join(f'r{i}: r{i + 1} | "x"\n' for i in range(3000)) + 'r3000: "y"\n'
TOKENS = ("<|endoftext|>", "<[300]>")
ALL_AT_ONCE = {"allOf": [{"type": "string", "pattern": f"a{i}"} for i in range(50)]}


@pytest.mark.parametrize(
    "constraint",
    [
        qcut.Constraint.grammar(CHAIN),
        *(qcut.Constraint.grammar(f"start: {token} chain\n{CHAIN.replace('start', 'chain')}") for token in TOKENS),
        qcut.Constraint.json_schema(ALL_AT_ONCE),
    ],
)
def test_endless_work_ends_in_another_process(constraint: qcut.Constraint) -> None:
    with pytest.raises(ConstraintError, match="too many parts that depend on one another; allowed: what llguidance"):
        engine_of().generate(PROMPT, 3, constraint=constraint)


def test_deepest_and_largest_constraints_are_taken() -> None:
    deep = qcut.Constraint.json_schema(nested(MOST_DEPTH))
    wide = qcut.Constraint.json_schema({"enum": [f"choice number {i}" for i in range(4000)]})
    for constraint in (deep, wide, qcut.Constraint.choice([f"choice {i}" for i in range(1024)])):
        engine_of().generate(PROMPT, 3, constraint=constraint)


def test_constraints_need_tokens_and_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = loaded()
    with pytest.raises(ConstraintError, match="the engine has no tokenizer"):
        qcut.Engine(model).generate([[1]], 2, constraint=NUMBERS)
    with pytest.raises(ConfigError, match=r"constraint is '\[0-9\]'; allowed: a qcut.Constraint"):
        engine_of().generate(PROMPT, 2, constraint="[0-9]")  # type: ignore[arg-type]
    other = qcut.Engine(model, tokenizer=lambda_tokenizer(tokenizer))
    with pytest.raises(ConstraintError, match="allowed: tokenizers of the library tokenizers"):
        other.generate([[1]], 2, constraint=NUMBERS)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConstraintError, match=r"pip install 'qcut-inference\[serve\]'"):
        engine_of().generate(PROMPT, 2, constraint=NUMBERS)


def lambda_tokenizer(tokenizer: Any) -> Any:
    """A tokenizer in Python, of the same tokens."""

    class Slow:
        eos_token_id = tokenizer.eos_token_id
        all_special_ids = tokenizer.all_special_ids

        def __call__(self, text: str, **options: Any) -> Any:
            return tokenizer(text, **options)

        def decode(self, ids: list[int], **options: Any) -> str:
            return str(tokenizer.decode(ids, **options))

        def __len__(self) -> int:
            return len(tokenizer)

    return Slow()


@pytest.mark.parametrize("columns", [1, 7, 8, 9, 64, 1001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_leave_only_allowed_logits(columns: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(columns)
    logits = torch.randn(5, columns, generator=generator).to(dtype)
    allowed = torch.rand(5, columns, generator=generator) < 0.5
    padded = torch.ones(5, (columns + 31) // 32 * 32 + 64, dtype=torch.int64)
    padded[:, :columns] = allowed
    bits = (padded.view(5, -1, 8) << torch.arange(8)).sum(2).to(torch.uint8)
    before = logits.clone()
    found = only_allowed(logits, bits.view(torch.int32))
    assert torch.equal(found, torch.where(allowed, logits, -torch.inf))
    assert found.dtype == dtype
    assert torch.equal(logits, before)

"""Guides of 4-bit keys on the GPU: those of the CPU, and the same tokens every time."""

from __future__ import annotations

import copy

import torch

from qcut.engine.engine import Engine
from qcut.numerics import int4
from qcut.numerics.int8 import sqnr_db
from tests.gpu.support.decoders import llama
from tests.gpu.support.oracles import DEVICE
from tests.support.decoders import VOCABULARY, prompts_of


def test_calibration_is_near_the_cpus() -> None:
    cpu = llama(None, torch.float16, "cpu").float()
    prompts = prompts_of(VOCABULARY, 100, 7, 64, 33, 20)
    here = Engine(cpu, kv_cache="int4", calibration_prompts=prompts)
    there = Engine(copy.deepcopy(cpu).to(DEVICE, torch.float16), kv_cache="int4", calibration_prompts=prompts)
    for layer in range(2):
        want, guide = here.cache.calibration(layer), there.cache.calibration(layer)
        assert want is not None
        assert guide is not None
        assert guide.device.type == DEVICE
        one, other = int4._fields(want), int4._fields(guide.cpu())
        torch.testing.assert_close(other.mean, one.mean, atol=0.01 * float(one.mean.abs().max()), rtol=0)
        torch.testing.assert_close(other.costs.double(), one.costs.double(), rtol=0.1, atol=800)
        torch.testing.assert_close(other.strengths, one.strengths, rtol=0.1, atol=1e-4)


def test_an_engine_draws_and_answers_the_same_every_time() -> None:
    model, prompts = llama("codebook4"), prompts_of(VOCABULARY, 40, 90)
    engines = [Engine(model, batch=2, kv_cache="int4") for _ in range(2)]
    exact = Engine(model, batch=2)
    guides = [[engine.cache.calibration(layer) for layer in range(2)] for engine in engines]
    for one, other in zip(*guides, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
    first, second = (engine.generate(prompts, 60) for engine in engines)
    assert first == second
    # It varies by some decibels with the weights and with the prompts that calibrate keys.
    assert sqnr_db(exact.prefill(prompts), engines[0].prefill(prompts)) > 10

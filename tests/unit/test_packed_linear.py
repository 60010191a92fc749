"""Packed layers multiply as plain ones do, bit for bit, and nothing else is packed."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import nn
from torch.nn.functional import linear

from sglang_ssd.cpu.packed_linear import PackedOutput, PackedWeight, can_pack, pack_linear_layers

BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(
    not can_pack(torch.zeros(8, 8, dtype=BF16)), reason="oneDNN has no bfloat16 products on this processor."
)


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


@pytest.mark.parametrize("rows", [1, 2, 7, 32, 33, 300])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_those_of_torch(rows, with_bias):
    weight, x = tensor(130, 96, seed=1), tensor(rows, 96, seed=2)
    bias = tensor(130, seed=3) if with_bias else None
    assert torch.equal(PackedWeight(weight).apply(nn.Module(), x, bias), linear(x, weight, bias))


class Plain(nn.Module):
    def __init__(self, method: object, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.weight = nn.Parameter(tensor(8, 8).to(dtype), requires_grad=False)
        self.quant_method = method


class Special(UnquantizedLinearMethod):
    """Does something else with its weight."""


def test_plain_layers_are_packed_and_no_others():
    model = nn.Module()
    model.plain, model.special = Plain(UnquantizedLinearMethod()), Plain(Special())
    model.wide, model.none = Plain(UnquantizedLinearMethod(), torch.float32), Plain(None)
    model.embed = nn.Embedding(8, 8, dtype=BF16)
    model.lm_head = model.embed  # tied
    assert pack_linear_layers(model) == 2
    assert isinstance(model.plain.quant_method, PackedWeight)
    assert model.plain.weight.numel() == 0
    assert isinstance(model.lm_head, PackedOutput)
    assert not hasattr(model.lm_head, "weight")
    for other in (model.special, model.wide, model.none, model.embed):
        assert other.weight.numel() == 64


def test_a_torch_without_one_dnn_keeps_its_weights(monkeypatch):
    model = nn.Module()
    model.plain = Plain(UnquantizedLinearMethod())
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert pack_linear_layers(model) == 0
    assert model.plain.weight.numel() == 64

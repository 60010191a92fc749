"""Linear layers whose weights lie as a CPU's matrix units read them.

In bfloat16 torch hands a product to oneDNN, which brings the weights into its own order at every call: with few rows
that takes longer than the product. Here it is done once, and the products are the same, bit for bit. A weight that is
changed afterwards would not be seen, so this is for models that keep theirs.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import Tensor, nn

_OPERATIONS = ("_is_mkldnn_bf16_supported", "_linear_pointwise", "_reorder_linear_weight")
"""Of ``torch.ops.mkldnn``; a torch without oneDNN has none of them."""
_ROWS = 32
"""What oneDNN is told to expect; other numbers of rows work as well."""


class PackedWeight:
    """A weight [out, in] in oneDNN's order, in place of a layer's ``quant_method``, whose ``apply`` SGLang calls."""

    def __init__(self, weight: Tensor) -> None:
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS)

    def apply(self, _layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x`` [..., in] times the transposed weight, plus ``bias`` [out]: [..., out]."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return product


class PackedOutput(nn.Module):
    """An output layer without a ``weight``: SGLang's LogitsProcessor then asks its ``quant_method``."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.quant_method = PackedWeight(weight)


def pack_linear_layers(model: Any) -> int:  # noqa: ANN401 - any of SGLang's models
    """Pack every plain bfloat16 layer of ``model`` and its output layer; how many there were.

    Weights of layers are given back; that of the output layer may be the embedding's too and stays.
    """
    layers = [
        module for module in model.modules() if type(getattr(module, "quant_method", None)) is UnquantizedLinearMethod
    ]
    layers = [layer for layer in layers if can_pack(layer.weight)]
    for layer in layers:
        layer.quant_method = PackedWeight(layer.weight)
        layer.weight.data = layer.weight.data.new_empty(0)
    head = getattr(getattr(model, "lm_head", None), "weight", None)
    if isinstance(head, Tensor) and can_pack(head):
        model.lm_head = PackedOutput(head)
        return len(layers) + 1
    return len(layers)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN is there and multiplies it in bfloat16 on this processor."""
    plain = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and weight.dim() == 2
    there = all(hasattr(torch.ops.mkldnn, name) for name in _OPERATIONS)
    return plain and there and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())

"""A draft engine in plain torch for Llama checkpoints: for tests, and for machines without SGLang.

Attention gathers each row's keys by the block table and pads to the longest row. It is simple and right; the engine
on SGLang's ModelRunner is the fast one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from sglang_ssd.draft_server.drawing import draft_draw, to_host
from sglang_ssd.draft_server.edits import Edit, Entries, Forks
from sglang_ssd.draft_server.engine import Candidates, EngineLimits, EngineSettings, Ints, Rows
from sglang_ssd.draft_server.rope import rope_tables, rotate
from sglang_ssd.draft_server.token_map import load_token_map
from sglang_ssd.draft_server.transfer import to_device
from sglang_ssd.sampling.candidates import find_candidates


class UnsupportedModel(ValueError):
    """The checkpoint is not one that this engine runs; the message says why and what to use."""


class TorchEngine:
    """See :class:`~sglang_ssd.draft_server.engine.DraftEngine`. Raises UnsupportedModel, UnknownRope, ConfigError,
    OSError.
    """

    def __init__(self, settings: EngineSettings) -> None:
        config = _read_config(Path(settings.model_path))
        self._device = torch.device(settings.device)
        self._dtype = _dtype(settings.dtype, config)
        self._layers: int = config["num_hidden_layers"]
        self._heads: int = config["num_attention_heads"]
        self._kv_heads: int = config.get("num_key_value_heads") or self._heads
        self._head_dim: int = config.get("head_dim") or config["hidden_size"] // self._heads
        self._epsilon: float = config["rms_norm_eps"]
        self._weights = _load_weights(Path(settings.model_path), self._device, self._dtype)
        self._token_map = _mapped(settings, config["vocab_size"], self._device)
        self._output = self._output_rows()
        self._count = min(settings.candidates, len(self._output))
        longest = config["max_position_embeddings"]
        self.limits = EngineLimits(
            slots=settings.slots,
            rows=settings.rows,
            context_length=min(settings.context_length or longest, longest),
            vocab_size=config["vocab_size"],
        )
        cosine, sine = rope_tables(config, self._head_dim, self.limits.context_length)
        self._cosine, self._sine = (table.to(self._device, self._dtype) for table in (cosine, sine))
        shape = (self._layers, settings.slots + 1, self._kv_heads, self._head_dim)
        self._keys = torch.zeros(shape, dtype=self._dtype, device=self._device)
        self._values = torch.zeros_like(self._keys)
        table = (self.limits.rows, self.limits.context_length)
        self._table = torch.zeros(table, dtype=torch.int32, device=self._device)

    def write(self, rows: Ints, positions: Ints, slots: Ints) -> None:
        """See DraftEngine."""
        self._change(Entries.of(rows, positions, slots))

    def fork(self, sources: Ints, lengths: Ints, targets: Ints) -> None:
        """See DraftEngine."""
        self._change(Forks.of(sources, lengths, targets))

    def decode(self, batch: Rows) -> Candidates:
        """See DraftEngine."""
        logits = self.logits(batch)
        draw = to_device(draft_draw(batch), self._device)
        return to_host(find_candidates(logits, draw, self._count, self._token_map))

    @torch.inference_mode()
    def logits(self, batch: Rows) -> Tensor:
        """The forward of :meth:`decode`: float32 [B, V], or [B, M] with a token map: what each row predicts
        for the position after its own.
        """
        self.write(batch.rows, batch.positions, batch.slots)
        positions = self._put(batch.positions)
        reach = int(batch.positions.max()) + 1
        index = self._table[self._put(batch.rows), :reach].long()  # [B, reach]
        visible = torch.arange(reach, device=self._device) <= positions[:, None]  # [B, reach]
        hidden = self._layers_over(batch.tokens, positions, batch.slots, index, visible[:, None])
        hidden = self._norm(hidden, "model.norm")
        return linear(hidden, self._output).float()

    @torch.inference_mode()
    def extend(self, row: int, start: int, tokens: Ints, slots: Ints) -> None:
        """See DraftEngine."""
        places = np.arange(start, start + len(tokens))
        self.write(np.full_like(places, row), places, slots)
        positions = self._put(places)
        index = self._table[row, : start + len(tokens)].long()[None]  # [1, reach]
        visible = torch.arange(start + len(tokens), device=self._device) <= positions[:, None]  # [n, reach]
        self._layers_over(tokens, positions, slots, index, visible[None])

    def _change(self, edit: Edit) -> None:
        to_device(edit, self._device).apply(self._table)

    def _layers_over(self, tokens: Ints, positions: Tensor, slots: Ints, index: Tensor, visible: Tensor) -> Tensor:
        """Hidden states [n, hidden] of ``tokens``.

        ``index`` [G, L] are the slots of G sequences and ``visible`` [G, n / G, L] says which of them each token sees.
        In every layer all tokens write their keys and values before any of them reads.
        """
        hidden = self._weights["model.embed_tokens.weight"][self._put(tokens)]
        turn = self._cosine[positions], self._sine[positions]
        where = self._put(slots)
        for layer in range(self._layers):
            name = f"model.layers.{layer}"
            x = self._norm(hidden, f"{name}.input_layernorm")
            hidden = hidden + self._attention(x, layer, turn, where, (index, visible))
            x = self._norm(hidden, f"{name}.post_attention_layernorm")
            gate, up = self._linear(x, f"{name}.mlp.gate_proj"), self._linear(x, f"{name}.mlp.up_proj")
            hidden = hidden + self._linear(silu(gate) * up, f"{name}.mlp.down_proj")
        return hidden

    def _attention(
        self, x: Tensor, layer: int, turn: tuple[Tensor, Tensor], slots: Tensor, sees: tuple[Tensor, Tensor]
    ) -> Tensor:
        name = f"model.layers.{layer}.self_attn"
        queries = rotate(self._split(x, f"{name}.q_proj"), *turn)
        self._keys[layer, slots] = rotate(self._split(x, f"{name}.k_proj"), *turn)
        self._values[layer, slots] = self._split(x, f"{name}.v_proj")
        index, visible = sees
        attended = scaled_dot_product_attention(
            queries.view(len(index), -1, self._heads, self._head_dim).transpose(1, 2),
            self._keys[layer, index].transpose(1, 2),
            self._values[layer, index].transpose(1, 2),
            attn_mask=visible[:, None],
            enable_gqa=self._heads != self._kv_heads,
        )  # [G, heads, n / G, head_dim]
        return self._linear(attended.transpose(1, 2).reshape(len(x), -1), f"{name}.o_proj")

    def _split(self, x: Tensor, name: str) -> Tensor:
        """A projection by heads: [n, heads, head_dim]."""
        return self._linear(x, name).view(len(x), -1, self._head_dim)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self._weights[f"{name}.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], self._weights[f"{name}.weight"], self._epsilon)

    def _output_rows(self) -> Tensor:
        tied = self._weights["model.embed_tokens.weight"]
        rows = self._weights.get("lm_head.weight", tied)
        return rows if self._token_map is None else rows[self._token_map]

    def _put(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _read_config(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    architectures = config.get("architectures")
    if architectures != ["LlamaForCausalLM"]:
        raise UnsupportedModel(f"the torch engine runs LlamaForCausalLM, not {architectures}; use --engine sglang")
    if config.get("attention_bias") or config.get("mlp_bias") or config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel("the torch engine has no biases and no activation but silu; use --engine sglang")
    return config


def _mapped(settings: EngineSettings, vocab_size: int, device: torch.device) -> Tensor | None:
    return None if settings.token_map is None else load_token_map(settings.token_map, vocab_size).to(device)


def _dtype(asked: str, config: dict[str, Any]) -> torch.dtype:
    """``auto``: float32 stays, any 16-bit checkpoint runs in bfloat16."""
    kept = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = asked if asked != "auto" else ("float32" if kept == "float32" else "bfloat16")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def _load_weights(path: Path, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor of the checkpoint's safetensors files. Raises UnsupportedModel when there are none."""
    weights: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        weights |= {name: tensor.to(dtype) for name, tensor in load_file(file, device=str(device)).items()}
    if not weights:
        raise UnsupportedModel(f"{path} has no safetensors file")
    return weights

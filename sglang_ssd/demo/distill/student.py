"""The student: the target with fewer layers; embedding and output layer stay the target's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_ssd.demo.distill.attention import PACKED, register


def load_target(path: str, device: str, attention: str = PACKED) -> Any:  # noqa: ANN401 - a transformers model
    """The target in bfloat16, frozen, with attention of ours."""
    from transformers import AutoModelForCausalLM

    register()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation=attention)
    return model.to(device).eval().requires_grad_(False)


def make_student(target: Any, layers: int, start: Path | None = None) -> Any:  # noqa: ANN401
    """A float32 student of ``layers`` layers, from ``start`` (a safetensors file) or the target's outermost layers.

    Its embedding and its output layer are the target's own tensors. Raises ValueError when ``start`` is of another
    shape.
    """
    from transformers import AutoModelForCausalLM

    config = type(target.config).from_dict(target.config.to_dict() | {"num_hidden_layers": layers})
    student = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=PACKED)
    weights = load_file(start) if start else _outermost(target, layers)
    student.set_input_embeddings(target.get_input_embeddings())
    student.set_output_embeddings(target.get_output_embeddings())
    missing, unexpected = student.load_state_dict(weights, strict=False)
    absent = [name for name in missing if name in layer_tensors(student)]
    if absent or unexpected:
        raise ValueError(f"{start} does not fit a student of {layers} layers: {(absent + unexpected)[0]} differs.")
    return student.to(target.device)


def load_draft(path: str, target: Any) -> Any:  # noqa: ANN401
    """A trained draft in bfloat16: a checkpoint folder, or a file of the layers that ``target`` lacks."""
    if Path(path).is_dir():
        return load_target(path, str(target.device))
    layers = {name.split(".")[2] for name in load_file(path) if name.startswith("model.layers.")}
    return make_student(target, len(layers), Path(path)).to(torch.bfloat16).eval().requires_grad_(False)


def layer_tensors(student: Any) -> dict[str, Tensor]:  # noqa: ANN401
    """What is trained and shipped: every tensor but embedding and output layer, by its name in a checkpoint."""
    return {name: each for name, each in student.named_parameters() if each.requires_grad}


def save_layers(student: Any, path: Path) -> None:  # noqa: ANN401
    """:func:`layer_tensors` in bfloat16."""
    tensors = {name: each.detach().cpu().bfloat16().contiguous() for name, each in layer_tensors(student).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def make_token_map(counts: Counter[int], size: int, vocab_size: int) -> Tensor:
    """Ascending ids int64 [size] that the student may say: those counted, the most frequent first, then the lowest ids.

    A BPE vocabulary is in the order of its merges, so low ids are the frequent ones of the tokenizer's own text.
    """
    chosen = [token for token, _ in counts.most_common(size)]
    known = set(chosen)
    chosen += [token for token in range(vocab_size) if token not in known][: size - len(chosen)]
    return torch.tensor(sorted(chosen))


def _outermost(target: Any, layers: int) -> dict[str, Tensor]:  # noqa: ANN401
    """The first half of the student's layers are the target's first ones, the second half its last ones."""
    first, count = (layers + 1) // 2, target.config.num_hidden_layers
    source = [*range(first), *range(count - (layers - first), count)]
    weights = {"model.norm.weight": target.model.norm.weight.float()}
    for place, layer in enumerate(source):
        tensors = target.model.layers[layer].state_dict()
        weights |= {f"model.layers.{place}.{name}": each.float() for name, each in tensors.items()}
    return weights

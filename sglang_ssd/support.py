"""What SGLang can do that SSD cannot yet; the launcher refuses it, and so does the plugin under ``sglang serve``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_ssd.config import ConfigError

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

_NOT_YET: tuple[tuple[Callable[[ServerArgs], bool], str], ...] = (
    (lambda s: s.pp_size > 1, "pipeline parallelism: use --pp-size 1 (and --tp-size for several GPUs)"),
    (
        lambda s: s.enable_dp_attention or s.attn_dp_size > 1,
        "data-parallel attention: leave --enable-dp-attention away",
    ),
    (lambda s: bool(s.enable_lora or s.lora_paths), "LoRA adapters: leave --enable-lora and --lora-paths away"),
    (lambda s: s.tokenizer_worker_num > 1, "several tokenizer processes: use --tokenizer-worker-num 1"),
    (lambda s: s.nnodes > 1, "several nodes: use --nnodes 1"),
    (lambda s: s.disaggregation_mode != "null", "split prefill and decode: leave --disaggregation-mode away"),
    (lambda s: s.use_ray or s.encoder_only, "Ray and encoder-only servers: leave --use-ray and --encoder-only away"),
    (
        lambda s: s.grammar_backend == "outlines",
        "the grammar backend outlines, which cannot take tokens back: use --grammar-backend xgrammar",
    ),
    (lambda s: s.smg_grpc_mode or s.grpc_mode, "the gRPC server mode: leave --grpc-mode and --smg-grpc-mode away"),
)


def check_settings(server: ServerArgs) -> None:
    """Raises ConfigError, one sentence that says what to do, for a setting that speculation does not support."""
    for asked_for, what in _NOT_YET:
        if asked_for(server):
            raise ConfigError(f"SSD does not support {what}.")

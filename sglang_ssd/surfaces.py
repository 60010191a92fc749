"""Every symbol of SGLang that the package imports, by what for: the compatibility check looks for each of them.

What we change in SGLang are hooks (:mod:`sglang_ssd.hooks`); these we only use. Where one is missing the package cannot
work, with one exception that its user handles: :mod:`~sglang_ssd.draft_server.ngram_sglang`.
"""

from __future__ import annotations

SURFACES: dict[str, tuple[str, ...]] = {
    "the command line": (
        "sglang.srt.server_args.ServerArgs",
        "sglang.srt.server_args.prepare_server_args",
        "sglang.srt.utils.server_args_config_parser.ConfigArgumentMerger",
    ),
    "starting and ending a server": (
        "sglang.srt.entrypoints.http_server.launch_server",
        "sglang.srt.utils.kill_process_tree",
    ),
    "our routes": (
        "sglang.srt.entrypoints.http_server.app",
        "sglang.srt.entrypoints.http_server.get_global_state",
    ),
    "hooks": (
        "sglang.srt.plugins.hook_registry.HookRegistry",
        "sglang.srt.plugins.hook_registry.HookType",
        "sglang.srt.plugins.load_plugins",
    ),
    "the algorithm": (
        "sglang.srt.managers.overlap_utils.FutureMap",
        "sglang.srt.runtime_context.get_device",
        "sglang.srt.runtime_context.get_observability",
        "sglang.srt.runtime_context.get_parallel",
        "sglang.srt.runtime_context.get_spec",
        "sglang.srt.speculative.base_spec_worker.BaseSpecWorker",
        "sglang.srt.speculative.spec_info.SpeculativeAlgorithm",
        "sglang.srt.speculative.spec_registry.CustomSpecAlgo",
        "sglang.srt.speculative.spec_registry.get_spec",
    ),
    "the decode reserve": (
        "sglang.srt.mem_cache.allocation_sizing.get_alloc_page_size",
        "sglang.srt.mem_cache.allocation_sizing.get_alloc_reserve_per_decode",
        "sglang.srt.runtime_context.get_schedule",
    ),
    "the verify window": (
        "sglang.srt.managers.utils.GenerationBatchResult",
        "sglang.srt.model_executor.forward_batch_info.CaptureHiddenMode",
        "sglang.srt.model_executor.forward_batch_info.ForwardMode",
        "sglang.srt.speculative.eagle_info.EagleVerifyInput",
        "sglang.srt.speculative.spec_info.SpecInput",
        "sglang.srt.speculative.spec_info.SpecInputType",
    ),
    "draws and logprobs in a window": (
        "sglang.srt.layers.logprob_processor.compute_spec_logprobs",
        "sglang.srt.layers.sampler.apply_custom_logit_processor",
        "sglang.srt.utils.async_probe.sanitize_nan_logits",
    ),
    "structured output in a window": (
        "sglang.srt.speculative.spec_utils.GrammarTree",
        "sglang.srt.speculative.spec_utils.generate_token_bitmask",
    ),
    "per-request figures": ("sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer",),
    "the draft's engine": (
        "sglang.srt.configs.model_config.ModelConfig",
        "sglang.srt.distributed.bootstrap",
        "sglang.srt.layers.moe.initialize_moe_config",
        "sglang.srt.layers.quantization.fp4_utils.initialize_fp4_gemm_config",
        "sglang.srt.layers.quantization.fp8_utils.initialize_fp8_gemm_config",
        "sglang.srt.layers.quantization.unquant.initialize_bf16_gemm_config",
        "sglang.srt.mem_cache.memory_pool.ReqToTokenPool",
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch",
        "sglang.srt.model_executor.model_runner.ModelRunner",
        "sglang.srt.runtime_context.SpawnRanks",
        "sglang.srt.runtime_context.publish",
        "sglang.srt.runtime_context.spawn_world_rank",
        "sglang.srt.utils.hf_transformers_utils.get_config",
        "sglang.srt.utils.hf_transformers_utils.get_context_length",
        "sglang.srt.utils.hf_transformers_utils.get_hf_text_config",
        "sglang.srt.utils.network.get_free_port_below_ephemeral",
    ),
    "a host without a GPU": (
        "sglang.srt.layers.attention.attention_registry.register_attention_backend",
        "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend",
        "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod",
        "sglang.srt.layers.radix_attention.AttentionType",
        "sglang.srt.mem_cache.memory_pool.KVWriteLoc",
    ),
}

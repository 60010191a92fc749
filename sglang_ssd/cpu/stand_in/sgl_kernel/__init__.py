"""Stand-in for ``sgl_kernel`` on a host without CUDA: the few functions that SGLang calls there, in plain torch.

The wheel of that name links against the CUDA driver and has no CPU operators. Everything absent here raises
AttributeError, which SGLang's model loader reports as a model that this host cannot serve.
"""

from .cache_locs import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    copy_all_layer_kv_cache_cpu,
)

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "copy_all_layer_kv_cache_cpu",
]
__version__ = "0.4.10"

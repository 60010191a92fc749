"""Names that must import but that only SGLang's built-in tree speculation calls, which does not run on a CPU."""

from collections.abc import Callable
from typing import NoReturn


def _absent(name: str) -> Callable[..., NoReturn]:
    def refuse(*_arguments: object, **_options: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} needs SGLang's own CPU build; this host has a stand-in without it."
        )

    return refuse


build_tree_kernel_efficient_cpu = _absent("build_tree_kernel_efficient_cpu")
fill_accept_out_cache_loc_cpu = _absent("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _absent("fill_bonus_tokens_cpu")
rotate_input_ids_cpu = _absent("rotate_input_ids_cpu")
verify_tree_greedy_cpu = _absent("verify_tree_greedy_cpu")

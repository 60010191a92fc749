"""The speculative algorithm ``SSD`` as SGLang's registry sees it."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_ssd.config import DEFAULT_NUM_STEPS, check_num_steps
from sglang_ssd.support import check_settings

NAME = "SSD"
_DEFAULT_MAX_RUNNING_REQUESTS = 48
"""SGLang's own default when it speculates."""


class SSDAlgorithm(CustomSpecAlgo):  # type: ignore[misc]
    """SGLang's registry entry, with what ``CustomSpecAlgo`` lacks and the scheduler calls anyway.

    Every ``is_*`` stays False: each True of a built-in drags its own buffers and code paths in.
    """

    def carries_draft_hidden_states(self) -> bool:
        """No draft model lives in this process."""
        return False

    def need_topk(self) -> bool:
        """Nothing but the bonus token is relayed between rounds."""
        return False

    def has_draft_kv(self) -> bool:
        """The target's KV pool holds no draft."""
        return False

    def get_platform_worker_cls(self) -> None:
        """One worker for every platform."""
        return

    def create_future_map(
        self,
        device: Any,  # noqa: ANN401
        req_to_token_pool: Any,  # noqa: ANN401
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> Any:  # noqa: ANN401
        """The relay of the overlap loop, see sglang's ``FutureMap``."""
        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

    def handle_server_args(self, server_args: Any) -> None:  # noqa: ANN401
        """Refuse what is not supported, and fill in what follows from K.

        ``server_args`` is SGLang's recording view: only its own fields are kept. Raises ConfigError.
        """
        check_settings(server_args)
        num_steps = server_args.speculative_num_steps or DEFAULT_NUM_STEPS
        check_num_steps(num_steps)
        server_args.speculative_num_steps = num_steps
        server_args.speculative_eagle_topk = 1
        server_args.speculative_num_draft_tokens = num_steps + 1
        server_args.enable_mixed_chunk = False
        if server_args.max_running_requests is None:
            server_args.max_running_requests = _DEFAULT_MAX_RUNNING_REQUESTS

"""SGLang's own server on this host: only the CPU host is ours (a no-op where a GPU works)."""

import sys

import sglang_ssd  # noqa: F401 - prepares the host


def main() -> None:
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))


if __name__ == "__main__":
    main()

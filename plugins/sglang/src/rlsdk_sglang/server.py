"""`python -m rlsdk_sglang.server`: SGLang's HTTP server, with the scheduler changes that `rollout.sglang.url` needs.

Takes the arguments of `python -m sglang.launch_server`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rlsdk_sglang import scheduler_process, weights


def main(arguments: Sequence[str]) -> None:
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args

    own = ["--skip-tokenizer-init", "--custom-weight-loader", weights.LOADER, "--sampling-defaults", "openai"]
    own += ["--weight-version", "0", "--disable-overlap-schedule", "--sampling-backend", "pytorch"]
    own += ["--incremental-streaming-output"]
    launch_server(prepare_server_args([*arguments, *own]), run_scheduler_process_func=scheduler_process.run_scheduler)


if __name__ == "__main__":
    main(sys.argv[1:])

"""`rlsdk watch RUN`: serves a live page of a run."""

from __future__ import annotations

import webbrowser
from contextlib import suppress
from pathlib import Path

from rlsdk.system.printable import printable


def run(run_dir: Path, port: int, *, opens: bool) -> None:
    """Serves the page until Ctrl-C.

    Raises:
        ConfigError: the folder does not exist, or the port is in use.
    """
    from rlsdk.views.report.live import LivePage, LiveServer

    with LiveServer(LivePage(run_dir), port) as server, suppress(KeyboardInterrupt):
        print(printable(f"{server.url}  shows {run_dir}, read-only, to browsers of this machine; Ctrl-C ends it"))
        print(f"from another machine: ssh -L {server.server_address[1]}:{server.url[7:-1]} THIS_MACHINE", flush=True)
        if opens:
            webbrowser.open(server.url)
        server.serve_forever(poll_interval=0.2)

"""`rlsdk watch RUN`: the page of a run while it goes on."""

from __future__ import annotations

import webbrowser
from contextlib import suppress
from pathlib import Path

from rlsdk.kit.printable import printable


def run(run_dir: Path, port: int, *, opens: bool) -> None:
    """Serves the page until Ctrl-C.

    Raises:
        ConfigError: no such folder, or the port is taken.
    """
    from rlsdk.views.report.live import LivePage, LiveServer

    with LiveServer(LivePage(run_dir), port) as server, suppress(KeyboardInterrupt):
        print(printable(f"{server.url}  shows {run_dir}, read-only, to browsers of this machine; Ctrl-C ends it"))
        print(f"from another machine: ssh -L {server.server_address[1]}:{server.url[7:-1]} THIS_MACHINE", flush=True)
        if opens:
            webbrowser.open(server.url)
        server.serve_forever(poll_interval=0.2)

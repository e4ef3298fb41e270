"""Views of a running run: in a terminal, in a file, in a notebook."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rlsdk.trainer.tracking.events import RunView


@contextmanager
def shown(view: RunView | None = None) -> Iterator[RunView]:
    """The view of a run: the given one, or the one that suits the environment."""
    if view is not None:
        yield view
    elif in_notebook():
        from rlsdk.views.notebook import NotebookView

        with NotebookView() as notebook:
            yield notebook
    else:
        from rlsdk.views.console import ConsoleView

        with ConsoleView() as console:
            yield console


def in_notebook() -> bool:
    """Whether this program is a notebook kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None

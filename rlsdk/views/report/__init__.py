"""Pages about runs: one run, several side by side, one that is going on."""

from rlsdk.views.report.compare import write_comparison
from rlsdk.views.report.page import write_report

__all__ = ["write_comparison", "write_report"]

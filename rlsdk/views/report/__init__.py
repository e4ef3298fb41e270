"""HTML pages about runs: one run, a comparison of several, and a live page."""

from rlsdk.views.report.compare import write_comparison
from rlsdk.views.report.page import write_report

__all__ = ["write_comparison", "write_report"]

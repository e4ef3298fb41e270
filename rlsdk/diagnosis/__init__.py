"""Diagnosis of this machine, its environment and its plugins, with the command that fixes each problem.

Imports neither torch nor Ray, nor any engine: these are imported in separate processes, so that a crash on import
affects only its own finding.
"""

from __future__ import annotations

from rlsdk.diagnosis.examine import examine, no_word
from rlsdk.diagnosis.finding import Finding, Health, verdict

__all__ = ["Finding", "Health", "examine", "no_word", "verdict"]

"""What is wrong with this machine, its environment and its plugins, and the command that fixes each.

Imports neither torch nor Ray, nor any engine: those are asked in their own processes, so that one which crashes on
import costs its finding and nothing else.
"""

from __future__ import annotations

from rlsdk.diagnosis.examine import examine
from rlsdk.diagnosis.finding import Finding, Health, verdict

__all__ = ["Finding", "Health", "examine", "verdict"]

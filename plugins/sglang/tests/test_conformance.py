"""The engine holds all that it claims."""

from __future__ import annotations

import cases


class TestSglang(cases.Sglang):
    pass

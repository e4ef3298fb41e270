"""Sharding managers that are wrong where one replica hands the weights on to the next."""

from __future__ import annotations

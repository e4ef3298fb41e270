"""The list of what the plugin uses of vLLM, which other versions' source is held against, is true of this version."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import vllm

CHECK = Path(__file__).parents[1] / "tools" / "check_source.py"


def test_everything_that_is_used_is_there(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("check_source", CHECK)
    assert spec is not None
    assert spec.loader is not None
    check = importlib.util.module_from_spec(spec)
    sys.modules["check_source"] = check
    spec.loader.exec_module(check)
    package = Path(vllm.__file__).parent
    assert check.faults(package) + check.unknown_imports(package) == []
    (tmp_path / "logprobs.py").write_text("class FlatLogprobs:\n    rank: int\n")
    (tmp_path / "v1" / "engine").mkdir(parents=True)
    (tmp_path / "v1" / "engine" / "core.py").write_text(
        "class EngineCore:\n    def shutdown(self, haste, *, how, grace=1): ...\n"
    )
    faults = check.faults(tmp_path)
    assert len(faults) == len(check.USED)
    assert "logprobs.py: FlatLogprobs: lacks ['logprobs', 'ranks']" in faults
    assert "v1/engine/core.py: EngineCore.shutdown: also asks for ['haste', 'how']" in faults
    assert "vllm.v1.engine.core: no 'EngineCoreProc'" in check.unknown_imports(tmp_path)
    assert len(check.unknown_imports(tmp_path)) == len(check.imports()) - 1

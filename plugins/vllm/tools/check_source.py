"""Holds what the plugin uses of vLLM against a version's source: `python tools/check_source.py FOLDER_OF_THE_PACKAGE`.

For versions that cannot run here (CUDA wheels, unpacked). Reads source and imports nothing: every name must be defined
where the plugin looks for it, every function must take the arguments it is given and ask for no others, every class
have the fields; and whatever the plugin's own source imports from vLLM must be there.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import NamedTuple


class Use(NamedTuple):
    """One thing that the plugin uses."""

    file: str
    name: str
    """Dotted: `Class.method`."""
    needs: tuple[str, ...] = ()
    """Parameters of a function; fields, attributes or methods of a class."""


USED = (
    Use("engine/arg_utils.py", "EngineArgs", (
        "model", "revision", "trust_remote_code", "dtype", "skip_tokenizer_init", "generation_config", "load_format",
        "model_loader_extra_config", "logprobs_mode", "max_model_len", "max_num_seqs", "tensor_parallel_size", "seed",
        "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel",
        "worker_extension_cls", "distributed_executor_backend", "block_size",
        "enable_prefix_caching", "enforce_eager", "gpu_memory_utilization", "kv_cache_memory_bytes",
        "enable_sleep_mode", "async_scheduling", "disable_log_stats", "max_num_batched_tokens",
    )),
    Use("sampling_params.py", "SamplingParams", (
        "n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "stop_token_ids", "ignore_eos", "logprobs",
        "flat_logprobs", "detokenize", "output_kind", "extra_args",
    )),
    Use("sampling_params.py", "RequestOutputKind", ("DELTA",)),
    Use("outputs.py", "CompletionOutput", ("token_ids", "logprobs", "finish_reason")),
    Use("outputs.py", "RequestOutput.__init__", ("request_id", "outputs")),
    Use("logprobs.py", "FlatLogprobs", ("logprobs", "ranks")),
    Use("v1/engine/llm_engine.py", "LLMEngine.from_engine_args", ("engine_args",)),
    Use("v1/engine/llm_engine.py", "LLMEngine.add_request", ("request_id", "prompt", "params")),
    Use("v1/engine/llm_engine.py", "LLMEngine", ("model_config", "engine_core")),
    Use("v1/engine/llm_engine.py", "LLMEngine.step"),
    Use("v1/engine/llm_engine.py", "LLMEngine.collective_rpc", ("method", "timeout", "args")),
    Use("v1/engine/llm_engine.py", "LLMEngine.abort_request", ("request_ids",)),
    Use("v1/engine/llm_engine.py", "LLMEngine.reset_prefix_cache", ("reset_running_requests",)),
    Use("v1/engine/llm_engine.py", "LLMEngine.sleep", ("level",)),
    Use("v1/engine/llm_engine.py", "LLMEngine.wake_up", ("tags",)),
    Use("engine/arg_utils.py", "AsyncEngineArgs"),
    Use("v1/engine/async_llm.py", "AsyncLLM", ("model_config",)),
    Use("v1/engine/async_llm.py", "AsyncLLM.from_engine_args", ("engine_args",)),
    Use("v1/engine/async_llm.py", "AsyncLLM.add_request", ("request_id", "prompt", "params")),
    Use("v1/engine/async_llm.py", "AsyncLLM.abort", ("request_id",)),
    Use("v1/engine/async_llm.py", "AsyncLLM.pause_generation", ("mode", "clear_cache")),
    Use("v1/engine/async_llm.py", "AsyncLLM.resume_generation"),
    Use("v1/engine/async_llm.py", "AsyncLLM.reset_prefix_cache", ("reset_running_requests",)),
    Use("v1/engine/async_llm.py", "AsyncLLM.collective_rpc", ("method", "args")),
    Use("v1/engine/async_llm.py", "AsyncLLM.sleep", ("level",)),
    Use("v1/engine/async_llm.py", "AsyncLLM.wake_up", ("tags",)),
    Use("v1/engine/async_llm.py", "AsyncLLM.shutdown"),
    Use("v1/engine/output_processor.py", "RequestOutputCollector.get"),
    Use("v1/executor/multiproc_executor.py", "MultiprocExecutor.collective_rpc", ("method", "timeout", "args")),
    Use("v1/engine/core_client.py", "InprocClient.shutdown"),
    Use("envs.py", "disable_envs_cache"),
    Use("v1/engine/core_client.py", "AsyncMPClient.call_utility_all_async", ("method",)),
    Use("v1/engine/core.py", "EngineCore.shutdown"),
    Use("v1/engine/core.py", "EngineCoreProc.run_engine_core"),
    Use("distributed/parallel_state.py", "GroupCoordinator.destroy"),
    Use("distributed/device_communicators/cpu_communicator.py", "_CPUSHMDistributed", ("group_name",)),
    Use("distributed/device_communicators/cpu_communicator.py", "_CPUSHMDistributed._init_cpu_shm"),
    Use("distributed/device_communicators/shm_broadcast.py", "MessageQueue.wait_until_ready"),
    Use("distributed/device_communicators/shm_broadcast.py", "MessageQueue", ("buffer",)),
    Use("distributed/device_communicators/shm_broadcast.py", "ShmRingBuffer", ("is_creator", "shared_memory")),
    Use("config/model.py", "ModelConfig.get_vocab_size"),
    Use("model_executor/model_loader/__init__.py", "register_model_loader", ("load_format",)),
    Use("model_executor/model_loader/base_loader.py", "BaseModelLoader.load_weights", ("model", "model_config")),
    Use("model_executor/model_loader/base_loader.py", "BaseModelLoader.download_model", ("model_config",)),
    Use("model_executor/model_loader/base_loader.py", "BaseModelLoader.load_model", ("vllm_config", "model_config")),
    Use("model_executor/model_loader/default_loader.py", "DefaultModelLoader.load_weights", ("model", "model_config")),
    Use("model_executor/layers/utils.py", "dispatch_cpu_unquantized_gemm", ("layer", "remove_weight")),
    Use("v1/worker/worker_base.py", "WorkerBase", ("model_runner",)),
    Use("v1/worker/gpu_model_runner.py", "GPUModelRunner", ("input_batch", "requests", "sampler", "kv_caches")),
    Use("v1/worker/gpu_model_runner.py", "GPUModelRunner.get_model"),
    Use("v1/worker/gpu_input_batch.py", "InputBatch", ("req_ids",)),
    Use("v1/worker/gpu_input_batch.py", "CachedRequestState", ("sampling_params", "output_token_ids")),
    Use("v1/sample/sampler.py", "Sampler.forward", ("logits", "sampling_metadata")),
    Use("v1/sample/sampler.py", "Sampler.compute_logprobs", ("logits",)),
    Use("v1/sample/sampler.py", "Sampler.gather_logprobs", ("logprobs", "num_logprobs", "token_ids")),
    Use("v1/sample/metadata.py", "SamplingMetadata", ("temperature", "all_greedy")),
    Use("v1/sample/ops/topk_topp_sampler.py", "apply_top_k_top_p", ("logits", "k", "p")),
    Use("v1/sample/ops/topk_topp_sampler.py", "TopKTopPSampler.forward_native", ("logits", "generators", "k", "p")),
    Use("v1/outputs.py", "LogprobsTensors", ("logprob_token_ids", "logprobs", "selected_token_ranks")),
    Use("v1/attention/backends/cpu_attn.py", "CPUAttentionBackend.get_supported_head_sizes"),
)  # fmt: skip


PLUGIN = Path(__file__).parents[1] / "src" / "rlsdk_vllm"


def main() -> None:
    package = Path(sys.argv[1])
    found = [*faults(package), *unknown_imports(package)]
    print("\n".join(found) or f"all {len(USED)} uses and {len(imports())} imported names fit")
    sys.exit(1 if found else 0)


def faults(package: Path) -> list[str]:
    """What the plugin uses and this source does not have, or has otherwise."""
    return [f"{use.file}: {use.name}: {fault}" for use in USED if (fault := _fault(package / use.file, use))]


def imports() -> list[tuple[str, str]]:
    """Module and name of everything that the plugin's source imports from vLLM."""
    nodes = [node for file in sorted(PLUGIN.glob("*.py")) for node in ast.walk(ast.parse(file.read_text()))]
    found = [node for node in nodes if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("vllm.")]
    return sorted({(str(node.module), name.name) for node in found for name in node.names})


def unknown_imports(package: Path) -> list[str]:
    """Imports of the plugin that would fail with this source."""
    return [f"{module}: no {name!r}" for module, name in imports() if not _importable(package, module, name)]


def _importable(package: Path, module: str, name: str) -> bool:
    place = package.joinpath(*module.split(".")[1:])
    if (place / name).is_dir() or (place / f"{name}.py").exists():
        return True
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if not file.exists():
        return False
    words = (
        getattr(node, key, None) for node in ast.walk(ast.parse(file.read_text())) for key in ("name", "asname", "id")
    )
    # vLLM's own `__init__` imports lazily, by a table of strings.
    return name in words or f'"{name}"' in file.read_text()


def _fault(file: Path, use: Use) -> str | None:
    if not file.exists():
        return "no such file"
    node: ast.AST = ast.parse(file.read_text(encoding="utf-8"))
    for part in use.name.split("."):
        inner = [n for n in ast.walk(node) if getattr(n, "name", None) == part and n is not node]
        if not inner:
            return f"no {part!r}"
        node = inner[-1]
    if lacking := sorted(set(use.needs) - _has(node)):
        return f"lacks {lacking}"
    # Nobody here calls an `__init__` that stands in the list: it tells the fields.
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name != "__init__":
        unmet = sorted(_required(node) - {"self", "cls", *use.needs})
        return f"also asks for {unmet}" if unmet else None
    return None


def _required(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Parameters without a default."""
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    named = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    free = [a.arg for a in positional[: len(positional) - len(given.defaults)]]
    return {*free, *(a.arg for a, default in named if default is None)}


def _has(node: ast.AST) -> set[str]:
    """Parameters of a function; fields, constants and methods of a class, and attributes that its methods set."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        given = node.args
        return {a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
    names: set[str] = set()
    for item in getattr(node, "body", []):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            names.add(item.target.id)
        elif isinstance(item, ast.Assign):
            names |= {target.id for target in item.targets if isinstance(target, ast.Name)}
        elif isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            names |= {item.name, *_set_on_self(item)}
    return names


def _set_on_self(method: ast.AST) -> set[str]:
    targets = [node for node in ast.walk(method) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return {node.attr for node in targets if isinstance(node.value, ast.Name) and node.value.id == "self"}


if __name__ == "__main__":
    main()

"""Commands for trained models (evaluate, generate, upload), and for rewards as services."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlsdk.cli.commands.apps import app, reward_app
from rlsdk.cli.commands.arguments import FIELDS, Checkpoint, ModelPath, TrustRun, with_trust
from rlsdk.cli.fields_command import FieldsCommand


@app.command("eval", cls=FieldsCommand, context_settings=FIELDS, help="Evaluate a checkpoint or model folder.")
def evaluate(
    context: typer.Context,
    path: ModelPath,
    evaluation_set: Annotated[
        list[str] | None, typer.Option("--set", help="Name in eval.sets, or sampled or greedy; may be repeated.")
    ] = None,
    checkpoint: Checkpoint = None,
    output: Annotated[Path | None, typer.Option(help="Also write the figures into this JSON file.")] = None,
    samples: Annotated[Path | None, typer.Option(help="Also write every sample into this folder.")] = None,
    trust_run: TrustRun = False,
) -> None:
    from rlsdk.cli.models.inference import evaluate as run

    arguments = with_trust(context.args, trust_run)
    run(path, arguments, sets=evaluation_set or [], checkpoint=checkpoint, output=output, samples=samples)


@app.command(cls=FieldsCommand, context_settings=FIELDS, help="Generate responses with a checkpoint or model folder.")
def generate(
    context: typer.Context,
    path: ModelPath,
    prompt: Annotated[list[str] | None, typer.Option(help="Text of a prompt; may be repeated.")] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(min=1, help="Without --prompt: number of prompts from the data. Default: 5; all with --keep."),
    ] = None,
    n: Annotated[int, typer.Option("-n", "--samples-per-prompt", min=1, help="Responses to each prompt.")] = 1,
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="best|above:X|pairs|all",
            help="Grade responses to training prompts by --reward, and print rows for `sft` or `dpo`: the best of each "
            "prompt, all with a score above X, pairs of the best and the worst, or all, which needs no --reward.",
        ),
    ] = None,
    log_probs: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            min=0,
            help="With --keep: also write the log-probs of the responses' tokens, and of the K most probable ones in "
            "each place, for `distill`, into a file beside --output.",
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="With --keep: write the rows into this JSONL file.")] = None,
    checkpoint: Checkpoint = None,
    trust_run: TrustRun = False,
) -> None:
    from rlsdk.cli.models import inference

    arguments = with_trust(context.args, trust_run)
    if keep is None:
        if output is not None:
            raise typer.BadParameter("writes rows to train on, which --keep chooses", param_hint="--output")
        if log_probs is not None:
            raise typer.BadParameter("is of rows that are kept: add --keep all", param_hint="--log-probs")
        inference.generate(path, prompt or [], num_prompts, n, checkpoint, arguments)
        return
    if prompt:
        raise typer.BadParameter("--keep samples the prompts of --data", param_hint="--prompt")
    if log_probs is not None and output is None:
        raise typer.BadParameter("writes a file beside the rows: name theirs, --output FILE", param_hint="--log-probs")
    inference.keep(path, keep, num_prompts, n, checkpoint, output, log_probs, arguments)


@app.command(help="Upload a model, with its card, to the Hugging Face hub.")
def push(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Run, checkpoint or model folder.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="org/name on the hub; created if it does not exist.")],
    checkpoint: Checkpoint = None,
    licence: Annotated[str | None, typer.Option("--license", help="The model's license: apache-2.0, mit, ...")] = None,
    private: Annotated[bool, typer.Option("--private/--public", help="Who can see a new repository.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be sent.")] = False,
) -> None:
    from rlsdk.cli.models.push import run

    run(path, repo, checkpoint=checkpoint, licence=licence, private=private, dry_run=dry_run)


@reward_app.command(
    "serve", cls=FieldsCommand, context_settings=FIELDS, help="Serve a reward over HTTP, for `--reward URL` of a run."
)
def serve_reward(
    context: typer.Context,
    reward: Annotated[str, typer.Argument(help="Name, file.py:fn, or label in --config; fields of `rewards` follow.")],
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but a loopback address requires a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8700,
    token_env: Annotated[str | None, typer.Option(help="Environment variable that holds the clients' token.")] = None,
    max_request_bytes: Annotated[int, typer.Option(min=1, help="Maximum size of a request.")] = 64 << 20,
    max_samples: Annotated[int, typer.Option(min=1, help="Maximum number of samples in a request.")] = 1024,
    max_requests: Annotated[int, typer.Option(min=1, help="Maximum number of concurrent requests.")] = 16,
) -> None:
    from rlsdk.cli.models.reward import serve
    from rlsdk.rewards.services.server import ServeOptions

    options = ServeOptions(
        host=host, port=port, max_request_bytes=max_request_bytes, max_samples=max_samples, max_requests=max_requests
    )
    serve(reward, context.args, options, token_env)

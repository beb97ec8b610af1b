"""The options that several commands have, each declared once.

It knows names and help texts; it does not know what a command does with the values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .params import Sampling

Url = Annotated[str, typer.Option(envvar="TOKENSTREAM_URL", help="HOST:PORT of the server's gRPC endpoint.")]
ModelName = Annotated[str, typer.Option(help="Name of the model on the server.")]
Seconds = Annotated[float | None, typer.Option("--timeout", help="Seconds for the whole answer.")]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens to generate.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy; unset: the model's own.")]
TopP = Annotated[float | None, typer.Option(help="Draw from the smallest set with this probability.")]
TopK = Annotated[int | None, typer.Option(help="Draw from so many most likely tokens.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same answer.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")]
RunDir = Annotated[
    Path | None, typer.Option(envvar="TOKENSTREAM_RUN_DIR", help="Run folder of the server; unset: all of this user's.")
]
Repository = Annotated[Path | None, typer.Option(help="Model repository; unset: the one that came along.")]
JsonLines = Annotated[bool, typer.Option("--json", help="One JSON object per line; an error is one too, on stderr.")]


def sampling_of(
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    stop: list[str] | None,
) -> Sampling:
    """The sampling that was typed."""
    return Sampling(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop or None
    )

"""What is asked of a server, whatever protocol it speaks: one prompt, how long the answer is, how the caller behaves.

It does not know when a request is sent, nor what came back.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat; `role`: system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Request:
    """One request. Either `prompt` (text as it is) or `messages` (through the model's chat template) is given.

    `kind`: the workload's name for such requests, under which they are told apart in reports. `ignore_eos`: exactly
    `max_tokens` are wanted. `priority`: 1 (highest) to 3, None for the server's default. `abandon_after`: the caller
    leaves after so many tokens (0: as soon as it has asked), None if it stays. `pause`: seconds that a slow reader
    lets pass before it reads on, behind each response.
    """

    kind: str
    max_tokens: int
    prompt: str | None = None
    messages: tuple[Message, ...] = ()
    ignore_eos: bool = False
    temperature: float = 0.0
    seed: int = 0
    priority: int | None = None
    abandon_after: int | None = None
    pause: float = 0.0

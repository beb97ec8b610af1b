"""What most people write first for Triton: transformers' `generate` in a thread, and its streamer's pieces sent on.

One thread for each request, no batching across them, no limit. The model must have no end-of-text id, so that every
answer has as many tokens as were asked for. It is here to be measured, not to be served.
"""

from __future__ import annotations

import json
import os
import threading
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer


class TritonPythonModel:
    """The model as Triton's Python backend wants it."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the folder that the parameter `folder` names."""
        parameters = json.loads(args["model_config"])["parameters"]
        folder = os.path.expandvars(parameters["folder"]["string_value"])
        torch.set_num_threads(int(os.path.expandvars(parameters["threads"]["string_value"])))
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def execute(self, requests: list[Any]) -> None:
        """Begin a thread for each request."""
        for request in requests:
            threading.Thread(target=self._answer, args=(request,), daemon=True).start()

    def _answer(self, request: Any) -> None:
        sender = request.get_response_sender()
        try:
            self._stream(request, sender)
        except Exception as error:  # noqa: BLE001 - whatever it was, the caller must hear of it
            message = pb.TritonError(f"{type(error).__name__}: {error}")
            sender.send(pb.InferenceResponse(error=message))
        sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _stream(self, request: Any, sender: Any) -> None:
        text = pb.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode()
        wanted = int(json.loads(request.parameters())["max_tokens"])
        tokens = self.tokenizer(text, return_tensors="pt")
        streamer = TextIteratorStreamer(self.tokenizer, skip_prompt=True)

        def generate() -> None:
            with torch.inference_mode():
                self.model.generate(**tokens, max_new_tokens=wanted, do_sample=False, streamer=streamer)

        threading.Thread(target=generate, daemon=True).start()
        rest = ""
        for number, piece in enumerate(streamer):
            if number < wanted:
                sender.send(_response(piece, 0, 0))
            else:  # what the streamer held back, when the tokens are over
                rest += piece
        sender.send(_response(rest, wanted, tokens["input_ids"].shape[1]))


def _response(text: str, completion_tokens: int, prompt_tokens: int) -> Any:
    """Text of one token, or with the counts the end."""
    return pb.InferenceResponse(
        [
            pb.Tensor("text_output", np.array([text.encode()], dtype=np.object_)),
            pb.Tensor("completion_tokens", np.array([completion_tokens], dtype=np.int32)),
            pb.Tensor("prompt_tokens", np.array([prompt_tokens], dtype=np.int32)),
        ]
    )

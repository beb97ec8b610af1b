"""Triton adapter: requests in, one response per token out. Everything else is `llm_engine`.

Five threads: Triton's (`execute`: parse, submit), the engine's, the sender (`replies`, the only one that sends), the
watcher (`watcher`, the only one that polls for cancellation and exports metrics) and the preparer (`preparer`), which
tokenizes and replays what is too long for `execute`, where later requests would wait for it. Every request gets exactly
one FINAL, on its last data response or on its error. It does not know how tokens are made.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from llm_kernels.cpu_level import CpuLevelError, cap_libraries
from preparer import LONG_BYTES, SWITCH_SECONDS, Preparer
from replies import Replies, Reply, Stream, int32, internal, request_log, string
from wire import MAX_ID_BYTES, Call, Operation, input_bytes, read_call, read_id

YIELD_SECONDS = 0.02  # a full instance holds back so long, for another one with room to take the next request
log = logging.getLogger("tokenstream")


class TritonPythonModel:
    """Called by Triton's Python backend; see its documentation for the contract of the methods."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model; a fault is one line in the server's log that says what and how to cure it."""
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(name)s: %(message)s")
        request_log.addHandler(logging.StreamHandler(sys.stderr))
        request_log.propagate = False
        if int(np.__version__.split(".")[0]) >= 2:
            raise pb_utils.TritonModelException(
                f"numpy {np.__version__} crashes this server's Python backend on the first string; "
                f"install numpy<2 in the Python that tritonserver uses"
            )
        try:
            cap_libraries()  # before torch is imported
        except CpuLevelError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        sys.setswitchinterval(SWITCH_SECONDS)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text is tokenized on the thread that asks
        config = json.loads(args["model_config"])
        given = _device(args, config)  # before torch is imported
        from llm_engine.config import ConfigError
        from llm_engine.engine import Engine
        from prompts import PromptEncoder
        from settings import model_keeps_queue, read_settings
        from watcher import Watcher

        try:
            settings, engine_config = read_settings(config, **given)
            logging.getLogger().setLevel(settings.log_level.upper())
            self._engine = engine = Engine(engine_config)
        except ConfigError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        self._prompts = PromptEncoder(engine.tokenizer, engine.config.max_context, engine.embedding_size)
        self._keeps_queue = model_keeps_queue(config)
        self._yields = _instances(config) > 1
        self._ids = itertools.count()
        self._preparer = Preparer()
        self._replies = Replies(
            settings.max_tokens_per_response,
            engine.cancel,
            engine.metrics.time_to_first_token_seconds.observe,
            log_prompts=settings.log_prompts,
        )
        instance = args["model_instance_name"]
        labels = {"model": args["model_name"], "version": args["model_version"], "instance": instance}
        exporter = None
        if settings.metrics:
            from exporter import Exporter

            exporter = Exporter(engine.metrics, pb_utils, labels, vllm_names=settings.vllm_metric_names)
        run_folder = os.environ.get("TOKENSTREAM_RUN_DIR")
        self._watcher = Watcher(engine, self._replies, instance, Path(run_folder) if run_folder else None, exporter)
        self._replies.start()
        self._preparer.start()
        self._watcher.start()
        log.info("ready: %s", json.dumps(engine.info()))

    def execute(self, requests: list[Any]) -> None:
        """Submit each request. Where Triton keeps the queue, return once another would find a seat."""
        for request in requests:
            try:
                self._accept(request)
            except Exception:  # it has no sender, and nobody can be told; the others have
                log.exception("a request could not be taken")
            if not self._keeps_queue:
                while not self._engine.wait_for_room(timeout=60.0):
                    pass
            elif self._yields:
                self._engine.wait_for_room(timeout=YIELD_SECONDS)

    def is_ready(self) -> bool:
        """Whether new requests are served: not by an engine that stalls, drains or has lost its device.

        Asked by servers newer than 2.51.
        """
        return not (self._engine.stalled or self._engine.device_lost or self._watcher.draining)

    def finalize(self) -> None:
        """End what is live and stop the threads. Triton calls it only when no response sender lives any more."""
        self._engine.close()
        self._preparer.stop()
        self._watcher.stop()
        self._replies.stop()

    def _accept(self, request: Any) -> None:
        name = f"auto-{secrets.token_hex(6)}"  # what the log and an error have in common where the client gave none
        stream = Stream(request.get_response_sender(), Call(request_id=name))  # first: whatever fails has an answer
        self._answering(stream, partial(self._read, stream, request))

    def _answering(self, stream: Stream, work: Callable[[], None]) -> None:
        """Do work for a request; whatever fails is its answer."""
        from llm_engine.request import RequestError

        try:
            work()
        except RequestError as error:
            self._engine.metrics.count_refused(error)
            self._replies.put(Reply(stream, [], error))
        except Exception as error:  # execute never raises: Triton would fail every request and show a traceback
            log.exception("a request could not be accepted")
            self._engine.metrics.count_ended("failed")
            self._replies.put(Reply(stream, [], internal(error, own_fault=True)))

    def _read(self, stream: Stream, request: Any) -> None:
        """Read a request and serve it: here if its work is short, else on the preparer's thread."""
        identity = read_id(request) or stream.call.request_id
        stream.call = Call(request_id=identity[:MAX_ID_BYTES])
        size = input_bytes(request)
        self._prompts.check_size(size)
        stream.call = call = read_call(request, identity, self._engine.defaults, self._engine.vocab_size)
        if size < LONG_BYTES:
            self._serve(stream)
            return
        self._preparer.check(size)
        if call.operation is not Operation.GENERATE:
            self._replies.streams[identity := str(next(self._ids))] = stream  # where the watcher asks for cancellation
            self._preparer.put(size, partial(self._answering, stream, partial(self._serve_late, stream, identity)))
        elif entered := self._submit(stream, self._engine.enter):  # in the queue from now on
            self._preparer.put(size, partial(self._engine.complete, entered, partial(self._fill, stream)))

    def _serve_late(self, stream: Stream, key: str) -> None:
        """Answer what needs no seat, unless nobody waits for it any more."""
        from llm_engine.request import Code, RequestError

        del self._replies.streams[key]
        if stream.cancelled:
            self._replies.put(Reply(stream, [], RequestError("the request was cancelled", Code.CANCELLED)))
        else:
            self._serve(stream)

    def _serve(self, stream: Stream) -> None:
        """Answer what needs no seat; submit the others."""
        call, prompts = stream.call, self._prompts
        if call.operation is Operation.GENERATE:
            self._submit(stream, self._engine.submit, self._encode(call))
        elif call.operation is Operation.INFO:
            self._replies.put(Reply(stream, [string("text_output", json.dumps(self._engine.info()))]))
        elif call.operation is Operation.DETOKENIZE:
            text = prompts.decode("input_ids", call.input_ids)
            self._replies.put(Reply(stream, [string("text_output", text)]))
        else:
            ids = self._encode(call)
            self._replies.put(Reply(stream, [int32("token_ids", ids), int32("num_input_tokens", [len(ids)])]))

    def _encode(self, call: Call) -> list[int]:
        """The prompt's token ids; and its text, where that opens the answer."""
        fits = call.operation is Operation.GENERATE
        if call.text is not None:
            ids = self._prompts.text("text_input", call.text, call.chat, fits=fits)
        elif call.messages is not None:
            ids = self._prompts.messages("messages", call.messages, call.template_time, call.chat, fits=fits)
        else:
            ids = call.input_ids
        if not call.exclude_input:
            call.echo = call.text if call.text is not None else self._prompts.decode("input_ids", ids)
        return ids

    def _fill(self, stream: Stream, request: Any) -> None:
        """Give a request that has entered its prompt."""
        request.prompt_ids = self._encode(stream.call)

    def _submit(self, stream: Stream, submit: Callable[..., None], ids: Sequence[int] = ()) -> Any:
        """Let the engine have a request, which is returned; None if it was refused, and answered."""
        from llm_engine.request import Request, RequestError

        call = stream.call
        longest = self._engine.config.max_queue_seconds if self._keeps_queue else math.inf
        request = Request(
            id=str(next(self._ids)),
            prompt_ids=ids,
            params=call.params,
            resume_token_ids=call.resume_token_ids,
            resume_fingerprint=call.resume_fingerprint,
            priority=call.priority,
            cache_salt=call.cache_salt,
            arrived_at=stream.arrived_at,
            queue_seconds=min(longest, call.timeout_seconds),
        )
        self._replies.streams[request.id] = stream
        try:
            submit(request, self._replies.put)
        except RequestError as error:  # counted by the engine
            del self._replies.streams[request.id]
            self._replies.put(Reply(stream, [], error))
            return None
        except BaseException:
            del self._replies.streams[request.id]
            raise
        return request


def _instances(config: dict[str, Any], *kinds: str) -> int:
    """Instances of the model, of all kinds or of these; a group has `count` on each of its GPUs."""
    groups = [group for group in config.get("instance_group", []) if not kinds or group.get("kind") in kinds]
    return sum(group.get("count", 1) * max(1, len(group.get("gpus", []))) for group in groups)


def _device(args: dict[str, str], config: dict[str, Any]) -> dict[str, Any]:
    """Choose the device from Triton's arguments; it must be visible to torch alone, so torch must not be loaded yet."""
    kind = args["model_instance_kind"]
    if kind == "GPU":
        os.environ["CUDA_VISIBLE_DEVICES"] = args["model_instance_device_id"]
        return {"device": "cuda"}
    if kind == "MODEL":
        import torch

        return {"device": "cuda" if torch.cuda.is_available() else "cpu"}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return {"device": "cpu", "cpu_share": max(1, _instances(config, "KIND_CPU"))}

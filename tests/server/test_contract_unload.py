"""A model that is unloaded: new requests are refused at once, live streams go on to their end, and then it is gone.

Triton keeps a model for as long as a stream is open that had a request for it, even if it is answered; so does 2.51.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from queue import SimpleQueue

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from server import tiny
from server.conftest import running
from server.raw import Wire, infer, tokens
from tokenstream import Client
from tokenstream.server import TritonServer
from waiting import WAIT, eventually


class Control:
    """Loads and unloads the model of one server."""

    def __init__(self, url: str) -> None:
        self.channel = grpc.insecure_channel(url)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    def close(self) -> None:
        self.channel.close()

    def unload(self) -> None:
        self.stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="llm"), timeout=WAIT)

    def load(self) -> None:
        self.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="llm"), timeout=WAIT)

    def state(self) -> str:
        (model,) = self.stub.RepositoryIndex(pb.RepositoryIndexRequest(), timeout=WAIT).models
        return str(model.state)


@pytest.fixture(scope="module")
def server() -> Iterator[TritonServer]:
    with running(tiny.repository(), ["llm"]) as server:
        yield server


@pytest.fixture
def control(server: TritonServer) -> Iterator[Control]:
    """The model is ready; it is loaded again for the next test."""
    with closing(Control(server.grpc_url)) as control:
        if control.state() != "READY":
            control.load()
        yield control
        eventually(lambda: control.state() == "UNAVAILABLE")


def test_a_connected_client_that_is_idle_does_not_keep_the_model(server: TritonServer, control: Control) -> None:
    with Client(server.grpc_url) as client:
        assert client.generate("Hi", max_tokens=2).usage.output_tokens <= 2
        control.unload()
        eventually(lambda: control.state() == "UNAVAILABLE")


def test_an_open_stream_without_a_request_does_not_keep_the_model(control: Control) -> None:
    stream = control.stub.ModelStreamInfer(iter(SimpleQueue().get, None))
    control.unload()
    eventually(lambda: control.state() == "UNAVAILABLE")
    stream.cancel()


def test_an_answered_stream_that_stays_open_keeps_the_model_until_it_is_closed(control: Control) -> None:
    requests: SimpleQueue[pb.ModelInferRequest | None] = SimpleQueue()
    stream = control.stub.ModelStreamInfer(iter(requests.get, None), timeout=WAIT)
    requests.put(infer(text_input="Hi", max_tokens=1))
    assert next(stream).infer_response.parameters["triton_final_response"].bool_param
    control.unload()
    requests.put(infer(text_input="Hi", max_tokens=1))
    assert "no available versions" in next(stream).error_message
    assert control.state() == "UNLOADING"
    requests.put(None)
    assert list(stream) == []
    eventually(lambda: control.state() == "UNAVAILABLE")


def test_a_live_stream_runs_to_its_end_and_the_model_goes_then(server: TritonServer, control: Control) -> None:
    with closing(Wire(server.grpc_url)) as wire:
        call = wire.call(infer(text_input="Hi", max_tokens=60, ignore_eos=True))
        with tiny.paced(server.log_path.parent, 0.2):
            first = call.next()
            assert first
            control.unload()
            assert "no available versions" in wire.refusal(infer(text_input="Hi", max_tokens=1))
            assert control.state() == "UNLOADING"
        answer = [first, *call.rest()]
        assert len(tokens(answer)) == 60
        assert [response.final for response in answer] == [False] * 59 + [True]
        eventually(lambda: control.state() == "UNAVAILABLE")


def test_a_model_that_is_loaded_again_gives_the_same_answer(server: TritonServer, control: Control) -> None:
    asked = {"text_input": "The capital of France is", "max_tokens": 8, "temperature": 0.0}
    with closing(Wire(server.grpc_url)) as wire:
        before = tokens(wire.ask(**asked))
        control.unload()
        eventually(lambda: control.state() == "UNAVAILABLE")
        control.load()
        assert tokens(wire.ask(**asked)) == before
    control.unload()

"""The wire, inwards: the bytes of a ModelStreamInferResponse to a `Reply`.

It knows tensors, names and encodings; it does not know connections, clocks or what a whole answer is.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass

from tritonclient.grpc import service_pb2 as pb

from .errors import InternalError, TokenstreamError, from_server
from .results import Timings, TokenLogprob

_INT32, _UINT64 = struct.Struct("<i"), struct.Struct("<Q")
_EMPTY = bytes(4)  # the BYTES tensor that holds ""
# Protobuf's marks of ModelStreamInferResponse.infer_response and ModelInferResponse.raw_output_contents
_BODY, _CONTENT = 0x12, 0x32
_FINAL = "triton_final_response"


@dataclass(slots=True)
class Reply:
    """One response taken apart. `final`: nothing follows. `data`: it holds output and not the final mark alone.

    None means that the server left the tensor out. `error` is what the response carries instead of an answer, or what
    is wrong with it. Not frozen, which would double what it costs, at every token.
    """

    final: bool
    data: bool
    text: str = ""
    token_ids: tuple[int, ...] = ()
    index: int | None = None
    finish_reason: str | None = None
    fingerprint: str | None = None
    seed: int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    num_input_tokens: int | None = None
    timings: Timings | None = None
    error: TokenstreamError | None = None


@dataclass(frozen=True, slots=True)
class _Head:
    """All of a response's body but its contents: as bytes, and what they say."""

    data: bytes
    names: tuple[str, ...]
    final: bool


class ReplyReader:
    """Reads the responses to one request.

    From token to token only the contents of tensors change, which come last: what stands before them is compared with
    that of the response before, and only if it differs the message is taken apart by protobuf, at four times the cost.
    """

    def __init__(self) -> None:
        self._head = _Head(b"", (), final=False)

    def read(self, data: bytes) -> Reply:
        """Take a response apart. DecodeError of protobuf if it is none."""
        head = self._head
        begin = _body_begins(data)
        if begin and data.startswith(head.data, begin):
            contents = _contents(data, begin + len(head.data))
            if contents and len(contents) == len(head.names):
                return _checked(head.names, contents, final=head.final)
        return self._read_anew(data, begin)

    def _read_anew(self, data: bytes, begin: int) -> Reply:
        response = pb.ModelStreamInferResponse.FromString(data)
        if response.error_message:
            return Reply(final=True, data=False, error=from_server(response.error_message))
        body = response.infer_response
        names = tuple(output.name for output in body.outputs)
        final = _FINAL in body.parameters and body.parameters[_FINAL].bool_param
        contents = list(body.raw_output_contents)
        head = data[begin : len(data) - sum(2 + len(content) for content in contents)]
        if begin and _contents(data, begin + len(head)) == contents:
            self._head = _Head(head, names, final)
        return _checked(names, contents, final=final)


def _body_begins(data: bytes) -> int:
    """Where the body begins in a response that is nothing but a body; 0 if it is anything else."""
    if len(data) < 3 or data[0] != _BODY:
        return 0
    length, begin = data[1], 2
    if length >= 128 > data[2]:  # a number of two digits to the base of 128, the lower one first
        length, begin = length - 128 + 128 * data[2], 3
    return begin if begin + length == len(data) else 0


def _contents(data: bytes, at: int) -> list[bytes]:
    """The contents of tensors if `data` has nothing else from `at` on and each is shorter than 128; else none."""
    found = []
    while at < len(data):
        begin = at + 2
        at = begin + data[at + 1] if begin <= len(data) and data[begin - 1] < 128 else -1
        if at < 0 or at > len(data) or data[begin - 2] != _CONTENT:
            return []
        found.append(data[begin:at])
    return found


def _checked(names: tuple[str, ...], contents: list[bytes], *, final: bool) -> Reply:
    try:
        return _reply(dict(zip(names, contents, strict=True)), final=final)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error) as error:
        fault = InternalError(f"the server sent a malformed response: {error}")
        return Reply(final=False, data=False, error=fault)


def _reply(tensors: dict[str, bytes], *, final: bool) -> Reply:
    """From raw tensors by name; names that this client does not know are passed over."""
    get = tensors.get
    text, ids, index, reason = get("text_output"), get("token_ids", b""), get("index"), get("finish_reason")
    prompt, fingerprint, seed = get("num_input_tokens"), get("fingerprint"), get("seed")
    logprobs, timings = get("logprobs"), get("timings")
    return Reply(
        final,
        bool(tensors),
        "" if text is None else _string(text),
        _INT32.unpack(ids) if len(ids) == 4 else struct.unpack(f"<{len(ids) // 4}i", ids),
        None if index is None else _INT32.unpack(index)[0],
        None if reason is None or reason == _EMPTY else _string(reason),
        None if fingerprint is None else _string(fingerprint),
        None if seed is None else _UINT64.unpack(seed)[0],
        () if logprobs is None else _logprobs(_string(logprobs)),
        None if prompt is None else _INT32.unpack(prompt)[0],
        None if timings is None else _timings(_string(timings)),
    )


def _string(raw: bytes) -> str:
    """The string of a BYTES tensor, which holds one."""
    if len(raw) != 4 + int.from_bytes(raw[:4], "little"):
        raise ValueError("a string is not as long as its tensor")
    return raw[4:].decode()


def _logprobs(text: str) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            token_id=entry["token_id"],
            logprob=entry["logprob"],
            rank=entry.get("rank", 0),
            top=tuple((token, logprob) for token, logprob in entry.get("top", ())),
        )
        for entry in json.loads(text)
    )


def _timings(text: str) -> Timings:
    # A newer server may send more than this client knows.
    kinds = {name: type(value) for name, value in asdict(Timings()).items()}
    return Timings(**{name: kinds[name](value) for name, value in json.loads(text).items() if name in kinds})

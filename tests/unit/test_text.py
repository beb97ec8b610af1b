"""Deltas joined are the answer's text, whole characters at a time, and no stop string leaks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain, pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from llm_engine.request import SamplingParams
from llm_engine.text import Detokenizer, TextStream, backend

BROKEN = "\N{REPLACEMENT CHARACTER}"
CORPUS = [
    "the cat sat on the mat",
    "über den Dächern, 中文字符 and 日本語",
    "smile 😀 family 👩‍👩‍👧 é è",
    "  two  spaces\n\n",
]
examples = settings(max_examples=150, deadline=None)


class Pieces:
    """A scripted tokenizer: id i is the bytes pieces[i], an id beyond has no text; it counts what it decodes."""

    def __init__(self, *pieces: str | bytes) -> None:
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        self.longest = 0

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        self.longest = max(self.longest, len(token_ids))
        known = (self.pieces[i] for i in token_ids if i < len(self.pieces))
        return b"".join(known).decode("utf-8", errors="replace")


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE as GPT-2, Llama 3 and Qwen have it: all 256 bytes, merges and two special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<s>", "<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|end|>")


WORDS = ["▁", "▁▁", "▁the", "▁a", "b", "cat", "é", "中", "\n", "▁,", "."]


@cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """BPE with byte fallback and Llama's decoder: the first space of a text is stripped."""
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    model = models.BPE({token: i for i, token in enumerate(vocab)}, [], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in vocab[:3]])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def metaspace() -> PreTrainedTokenizerFast:
    """Unigram with the Metaspace decoder, as T5 and older sentencepiece models have it."""
    vocab = ["<unk>", "<s>", "</s>", *WORDS]
    tokenizer = Tokenizer(models.Unigram([(token, -1.0) for token in vocab], 0, False))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in vocab[:3]])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def decode(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


@cache
def word_piece() -> PreTrainedTokenizerFast:
    """WordPiece as BERT has it: a space before every word, none before a piece, and clean-up of spaces."""
    vocab = ["[UNK]", "[CLS]", "[SEP]", "the", "cat", "##s", "##at", "don", "'", "t", ".", ",", "中", "é"]
    tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(vocab)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in vocab[:3]])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def deltas(tokenizer: object, prompt: Sequence[int], answer: Sequence[int]) -> list[str]:
    """The delta of each token and, last, the flush: the same with and without tokenizers' own streaming decoder."""
    plain, *others = (
        [*(detokenizer.push(token) for token in answer), detokenizer.flush()]
        for detokenizer in (Detokenizer(tokenizer, prompt, backend=behind) for behind in {None, backend(tokenizer)})
    )
    assert others in ([], [plain])
    return plain


def stream(pieces: Sequence[str], **params: object) -> tuple[TextStream, list[str]]:
    """Push one token for each piece; the deltas up to a stop, without a flush."""
    text = TextStream(Pieces(*pieces), [], SamplingParams(**params))
    sent = []
    for token in range(len(pieces)):
        sent.append(text.push(token))
        if text.stopped:
            break
    return text, sent


# ---- detokenizer


@examples
@given(st.text(max_size=20), st.lists(st.integers(0, 329), max_size=60))
def test_byte_level_deltas_joined_are_the_decoded_answer_for_any_ids(prompt: str, answer: list[int]) -> None:
    tokenizer = byte_level()
    answer = [i % len(tokenizer) for i in answer]
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert "".join(deltas(tokenizer, prompt_ids, answer)) == decode(tokenizer, answer)


@examples
@given(st.lists(st.integers(130, 260), max_size=12), st.lists(st.integers(0, 329), max_size=40))
def test_a_character_that_the_prompt_left_unfinished_belongs_to_the_answer(
    prompt: list[int], answer: list[int]
) -> None:
    tokenizer = byte_level()
    answer = [i % len(tokenizer) for i in answer]
    before, after = decode(tokenizer, prompt), decode(tokenizer, [*prompt, *answer])
    shared = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
    assert "".join(deltas(tokenizer, prompt, answer)) == after[shared:]


@examples
@example("DÀ")
@given(st.text(min_size=1, max_size=30))
def test_a_character_appears_with_the_token_that_completes_it(text: str) -> None:
    tokenizer = byte_level()
    answer = tokenizer.encode(text, add_special_tokens=False)
    sent = ""
    for i, delta in enumerate(deltas(tokenizer, [], answer)[:-1]):
        sent += delta
        if BROKEN not in text:
            assert sent == decode(tokenizer, answer[: i + 1]).rstrip(BROKEN)


def fallback_ids(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


fallback_units = st.one_of(
    st.sampled_from([[i] for i in [1, 2, *range(259, 259 + len(WORDS))]]), st.sampled_from("aé€中😀").map(fallback_ids)
)


@examples
@given(st.lists(fallback_units, max_size=12), st.lists(fallback_units, max_size=30))
def test_byte_fallback_deltas_joined_are_what_the_answer_adds_to_the_prompt(
    prompt_units: list[list[int]], answer_units: list[list[int]]
) -> None:
    tokenizer = byte_fallback()
    prompt, answer = list(chain(*prompt_units)), list(chain(*answer_units))
    expected = decode(tokenizer, prompt + answer).removeprefix(decode(tokenizer, prompt))
    assert "".join(deltas(tokenizer, prompt, answer)) == expected


@examples
@given(st.lists(st.integers(0, 258 + len(WORDS)), max_size=40))
def test_byte_fallback_never_sends_a_broken_character_that_the_answer_does_not_have(answer: list[int]) -> None:
    tokenizer = byte_fallback()
    sent = "".join(deltas(tokenizer, [], answer))
    assert BROKEN not in sent or BROKEN in decode(tokenizer, answer)


@examples
@given(st.lists(st.integers(0, 2 + len(WORDS)), max_size=8), st.lists(st.integers(0, 2 + len(WORDS)), max_size=30))
def test_metaspace_deltas_joined_are_what_the_answer_adds_to_the_prompt(prompt: list[int], answer: list[int]) -> None:
    tokenizer = metaspace()
    expected = decode(tokenizer, prompt + answer).removeprefix(decode(tokenizer, prompt))
    assert "".join(deltas(tokenizer, prompt, answer)) == expected


@examples
@given(st.lists(st.integers(0, 13), max_size=8), st.lists(st.integers(0, 13), max_size=30))
def test_word_piece_deltas_joined_are_what_the_answer_adds_to_the_prompt(prompt: list[int], answer: list[int]) -> None:
    tokenizer = word_piece()
    expected = decode(tokenizer, prompt + answer).removeprefix(decode(tokenizer, prompt))
    assert "".join(deltas(tokenizer, prompt, answer)) == expected


@examples
@given(st.lists(st.integers(0, 329), max_size=30), st.lists(st.integers(0, 329), max_size=60))
def test_the_streaming_decoder_changes_no_delta_whatever_the_ids(prompt: list[int], answer: list[int]) -> None:
    for tokenizer in (byte_level(), byte_fallback(), metaspace(), word_piece()):
        ids = [[i % len(tokenizer) for i in part] for part in (prompt, answer)]
        deltas(tokenizer, *ids)


class Strips(PreTrainedTokenizerFast):  # type: ignore[misc,unused-ignore]
    """Replaces what its backend decodes, as CPM's does."""

    def decode(self, *args: object, **kwargs: object) -> str:
        return str(super().decode(*args, **kwargs)).replace(" ", "")


def test_the_streaming_decoder_is_used_only_where_it_is_the_whole_of_the_tokenizers_decode() -> None:
    plain = byte_level()
    assert backend(plain) is plain.backend_tokenizer
    assert backend(Strips(tokenizer_object=plain.backend_tokenizer)) is None
    assert backend(Pieces("a")) is None


class Counted(Detokenizer):
    """Counts the decodes that the streaming decoder did not make."""

    decodes = 0

    def _decode(self, ids: list[int]) -> str:
        self.decodes += 1
        return super()._decode(ids)


def test_whole_characters_are_left_to_the_streaming_decoder_also_behind_unfinished_ones_and_special_tokens() -> None:
    tokenizer = byte_level()
    words = tokenizer.encode("the cat sat on the mat, " * 10, add_special_tokens=False)
    detokenizer = Counted(tokenizer, words, backend=backend(tokenizer))
    begun = detokenizer.decodes
    for unusual in ([], [tokenizer.eos_token_id], [0x100, 0x101]):
        for token in unusual:
            detokenizer.push(token)
        detokenizer.push(words[0])
        begun, before = detokenizer.decodes, begun
        assert unusual or begun == before
        for token in words:
            detokenizer.push(token)
        assert detokenizer.decodes == begun


@pytest.mark.parametrize("specials", [1, 7, 8, 9, 40])
def test_a_leading_space_survives_special_tokens_at_the_prompts_end(specials: int) -> None:
    the = 259 + WORDS.index("▁the")
    assert "".join(deltas(byte_fallback(), [the, *[1] * specials], [2, the])) == " the"


def test_a_cut_character_is_flushed_once() -> None:
    detokenizer = Detokenizer(Pieces("a", "😀".encode()[:3]), [])
    assert [detokenizer.push(0), detokenizer.push(1)] == ["a", ""]
    assert [detokenizer.flush(), detokenizer.flush()] == [BROKEN, ""]


def test_a_broken_character_of_the_prompt_is_not_sent_again() -> None:
    assert deltas(Pieces(f"what is {BROKEN}", "?"), [0], [1]) == ["?", ""]


@pytest.mark.parametrize("answer", [[0] * 400, [1] * 400, [2] * 400, [1, *[9] * 400, 1], [9] * 400, [0, 1, 2, 9] * 100])
def test_the_cost_of_a_token_does_not_grow_with_the_answer(answer: list[int]) -> None:
    tokenizer = Pieces("a", b"\xe2", b"\x82", "c")
    expected = tokenizer.decode(answer, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    tokenizer.longest = 0
    assert "".join(deltas(tokenizer, [3] * 400, answer)) == expected
    assert tokenizer.longest <= 12


# ---- stop strings

letters = st.text("abc", min_size=1, max_size=4)


def first_stop(pieces: list[str], stops: Sequence[str], min_tokens: int) -> tuple[int, int] | None:
    """(start, end) of the first match, by trying every end."""
    text = "".join(pieces)
    for end in range(len("".join(pieces[: max(min_tokens - 1, 0)])) + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end - max(map(len, ending)), end
    return None


@examples
@given(
    st.lists(st.text("abc", max_size=3), max_size=12),
    st.lists(letters, min_size=1, max_size=3),
    st.integers(0, 4),
    st.booleans(),
)
def test_text_ends_at_the_first_stop_and_nothing_else_is_held_back(
    pieces: list[str], stops: list[str], min_tokens: int, include: bool
) -> None:
    text, sent = stream(pieces, stop=tuple(stops), min_tokens=min_tokens, include_stop_str_in_output=include)
    whole, match = "".join(pieces), first_stop(pieces, stops, min_tokens)
    assert text.stopped == (match is not None)
    if match is not None:
        assert "".join(sent) == whole[: match[1] if include else match[0]]
        assert text.flush() == ""
        return
    held = 0
    for at, delta in zip(range(len(pieces)), sent, strict=True):
        known = "".join(pieces[: at + 1])
        suffixes = [known[i:] for i in range(len(known))]
        may_stop = [s for s in suffixes if any(stop.startswith(s) and stop != s for stop in stops)]
        held = len(max(may_stop, key=len, default=""))
        assert "".join(sent[: at + 1]) == known[: len(known) - held], delta
    assert text.flush() == whole[len(whole) - held :]


@pytest.mark.parametrize(
    ("stops", "pieces", "sent"),
    [
        (("ab", "abc"), ["x", "abc"], "x"),
        (("abc", "b"), ["x", "a", "bc"], "xa"),
        (("b", "ab"), ["xa", "b"], "x"),
        (("</s>",), ["hi <", "/", "s", "> more"], "hi "),
        (("字",), [b"\xe4\xb8\xad\xe5", b"\xad\x97"], "中"),
    ],
)
def test_the_match_that_ends_first_wins_and_the_longest_of_those(
    stops: tuple[str, ...], pieces: list[str], sent: str
) -> None:
    text, parts = stream(pieces, stop=stops)
    assert text.stopped
    assert "".join(parts) == sent


def test_a_tail_that_cannot_become_a_stop_is_sent_at_once() -> None:
    assert stream(["a<", "b", "<", "/"], stop=("</s>",))[1] == ["a", "<b", "", ""]


def test_nothing_follows_a_stop() -> None:
    text, _ = stream(["a.", "b"], stop=(".",))
    assert [text.push(1), text.flush()] == ["", ""]


def test_stop_strings_wait_for_min_tokens() -> None:
    text, sent = stream(["a.", "b", "."], stop=(".",), min_tokens=3)
    assert text.stopped
    assert sent == ["a.", "b", ""]


def test_the_terminating_token_has_no_text_unless_it_is_to_be_included() -> None:
    for include, expected in ((False, ""), (True, "!")):
        text = TextStream(Pieces("a", "!"), [], SamplingParams(include_stop_str_in_output=include))
        assert text.push(0) == "a"
        assert text.push(1, is_end=True) + text.flush() == expected


def test_a_terminating_token_leaves_the_held_tail_to_the_flush() -> None:
    text = TextStream(Pieces("a<", ">"), [], SamplingParams(stop=("</s>",)))
    assert [text.push(0), text.push(1, is_end=True), text.flush()] == ["a", "", "<"]


def test_special_tokens_are_kept_when_asked() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a<|end|>b", add_special_tokens=False)
    for skip, expected in ((True, "ab"), (False, "a<|end|>b")):
        text = TextStream(tokenizer, [], SamplingParams(skip_special_tokens=skip))
        assert "".join(text.push(i) for i in ids) + text.flush() == expected


@examples
@given(st.lists(st.integers(0, 329), min_size=1, max_size=30), st.data(), st.lists(letters, max_size=2))
def test_a_resumed_answer_goes_on_where_it_was_cut(answer: list[int], data: st.DataObject, stops: list[str]) -> None:
    tokenizer = byte_level()
    answer = [i % len(tokenizer) for i in answer]
    cut = data.draw(st.integers(0, len(answer)))
    params = SamplingParams(stop=tuple(stops), min_tokens=2)
    whole, resumed = TextStream(tokenizer, [], params), TextStream(tokenizer, [], params)
    expected = [whole.push(i) for i in answer] + [whole.flush()]
    for token in answer[:cut]:
        resumed.push(token)
    assert [resumed.push(i) for i in answer[cut:]] + [resumed.flush()] == expected[cut:]
    assert resumed.stopped == whole.stopped


def test_the_tokenizers_of_these_tests_cut_characters_and_merge() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("😀🤖 the cat", add_special_tokens=False)
    assert len(ids) < len("😀🤖 the cat".encode())
    assert any(BROKEN in decode(tokenizer, pair) for pair in pairwise(ids))

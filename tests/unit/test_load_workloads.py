"""Workloads: what a file says is drawn, the same for a seed everywhere, and what is wrong is said in one line."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import islice, pairwise
from pathlib import Path
from statistics import mean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenstream_loadtest.amounts import Amount
from tokenstream_loadtest.data_files import shipped_names
from tokenstream_loadtest.dice import Dice
from tokenstream_loadtest.requests import Message, Request
from tokenstream_loadtest.workloads import list_workloads, read_workload

SHIPPED = shipped_names("workloads")
DOCUMENT = (Path(__file__).parents[2] / "docs/loadtest.md").read_text(encoding="utf-8")
HEAD = 'title = "T"\nabout = "A"\n'
PROMPTS = '[[kinds]]\nname = "a"\nsource = "prompts"\nfile = "p.txt"\nmax_tokens = 8\n'
TEXT = '[[kinds]]\nname = "t"\nsource = "text"\ncorpus = "c.txt"\ninput_tokens = 30\nmax_tokens = 8\n'
PASSAGES = (
    '[[kinds]]\nname = "p"\nsource = "passages"\ncorpus = "c.txt"\nwords = 40\nquestions = ["Why?"]\nmax_tokens = 8\n'
)
TALKS = '[[kinds]]\nname = "turn"\nsource = "conversations"\nfile = "s.jsonl"\nmax_tokens = 8\n'
SCRIPT = '{"turns": ["q1", "a1", "q2", "a2", "q3"]}\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "p.txt").write_text("one\ntwo\nthree\n")
    (tmp_path / "c.txt").write_text("# Title\n" + "\n\n".join(f"par{i} " + "word " * 17 + f"end{i}" for i in range(8)))
    (tmp_path / "s.jsonl").write_text(SCRIPT * 3)
    return tmp_path


def written(folder: Path, text: str) -> str:
    path = folder / "own.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def drawn(folder: Path, text: str, count: int, seed: int = 1) -> list[Request]:
    return list(islice(read_workload(written(folder, HEAD + text)).draw(seed), count))


def refusal(name: str) -> str:
    with pytest.raises(ValueError) as refused:
        read_workload(name)
    message = str(refused.value)
    assert "\n" not in message
    return message


def said(request: Request) -> str:
    return request.prompt if request.prompt is not None else request.messages[-1].content


def words(request: Request) -> int:
    texts = [request.prompt or "", *(message.content for message in request.messages)]
    return sum(len(text.split()) for text in texts)


def digest(requests: Iterable[Request]) -> str:
    return hashlib.sha256("".join(map(repr, requests)).encode()).hexdigest()


@pytest.mark.parametrize("name", SHIPPED)
def test_equal_seeds_draw_equal_requests_and_other_seeds_others(name: str) -> None:
    workload = read_workload(name)
    first, again, other = (digest(islice(workload.draw(seed), 60)) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_another_process_draws_the_same() -> None:
    program = (
        "import hashlib; from itertools import islice; from tokenstream_loadtest.workloads import list_workloads\n"
        "drawn = [r for w in list_workloads() for r in islice(w.draw(7), 20)]\n"
        "print(hashlib.sha256(''.join(map(repr, drawn)).encode()).hexdigest())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    there = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    here = digest(request for workload in list_workloads() for request in islice(workload.draw(7), 20))
    assert there.stdout.strip() == here


def test_choices_are_those_that_every_version_of_python_makes() -> None:
    dice = Dice("seed 1")
    assert [dice.below(1000) for _ in range(4)] == [247, 771, 943, 555]
    assert "".join(islice(dice.deal("abcdef"), 8)) == "faedbcbc"


@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_shipped_fits_a_context_of_2048_tokens(name: str) -> None:
    for request in islice(read_workload(name).draw(5), 400):
        tokens = words(request) * (1.15 if len(said(request)) > 1000 else 1.6)
        assert tokens + request.max_tokens < 2048
        assert (request.prompt is None) == bool(request.messages)


def test_chat_has_many_prompts_and_characters_of_several_bytes() -> None:
    prompts = {said(request) for request in islice(read_workload("chat").draw(1), 500)}
    assert len(prompts) >= 60
    assert len({len(character.encode()) for prompt in prompts for character in prompt}) == 4
    assert len({said(request) for request in islice(read_workload("code").draw(1), 200)}) >= 30


def test_fixed_prompts_have_no_common_prefix_beyond_a_digit_or_two() -> None:
    prompts = [said(request) for request in islice(read_workload("fixed").draw(2), 300)]
    openings = {prompt.split()[0] for prompt in prompts}
    assert len(openings) == len(prompts)
    assert all(opening.endswith(".") and opening[:-1].isdigit() for opening in openings)


def test_fixed_lengths_come_in_equal_shares_in_every_round() -> None:
    requests = list(islice(read_workload("fixed").draw(2), 30))
    for begin in range(0, 30, 3):
        assert Counter(request.kind for request in requests[begin : begin + 3]) == {"short": 1, "medium": 1, "long": 1}
    for kind, tokens in (("short", 32), ("medium", 128), ("long", 512)):
        assert abs(mean(words(r) for r in requests if r.kind == kind) * 1.15 - tokens) < 8


def test_kinds_come_in_their_shares(folder: Path) -> None:
    kinds = PROMPTS + "share = 7\n" + TEXT + "share = 3\n"
    assert Counter(request.kind for request in drawn(folder, kinds, 100)) == {"a": 70, "t": 30}


def test_a_kind_says_how_its_callers_behave(folder: Path) -> None:
    more = "priority = 3\npause = 0.5\nabandon_after = [2, 4]\ntemperature = 0.7\nsystem = 'Be brief.'\n"
    requests = drawn(folder, PROMPTS + more, 60)
    assert {request.abandon_after for request in requests} == {2, 3, 4}
    assert {(r.priority, r.pause, r.temperature, r.max_tokens, r.kind) for r in requests} == {(3, 0.5, 0.7, 8, "a")}
    assert all(request.messages[0] == Message("system", "Be brief.") for request in requests)
    assert len({request.seed for request in requests}) == 60


def test_a_caller_may_leave_before_the_first_token(folder: Path) -> None:
    assert {request.abandon_after for request in drawn(folder, PROMPTS + "abandon_after = 0\n", 5)} == {0}


def test_every_prompt_comes_once_before_any_comes_twice(folder: Path) -> None:
    prompts = [said(request) for request in drawn(folder, PROMPTS, 30)]
    for begin in range(0, 30, 3):
        assert sorted(prompts[begin : begin + 3]) == ["one", "three", "two"]


def test_prompts_may_be_objects_hold_line_breaks_and_go_without_a_template(folder: Path) -> None:
    (folder / "p.jsonl").write_text('{"prompt": "a\\n\u2028b"}\n\n', encoding="utf-8")
    kind = PROMPTS.replace("p.txt", "p.jsonl") + "chat = false\nnumbered = true\n"
    first, second = drawn(folder, kind, 2)
    assert first.prompt is not None
    assert first.prompt.endswith(". a\n\u2028b")
    assert first.prompt != second.prompt
    assert first.messages == ()


def test_turns_of_a_conversation_come_in_order_and_extend_each_other(folder: Path) -> None:
    requests = drawn(folder, TALKS + "at_once = 3\nsystem = 'S'\n", 90)
    seen: dict[str, tuple[Message, ...]] = {}
    for request in requests:
        system, opening, *_ = request.messages
        assert system == Message("system", "S")
        before = seen.get(opening.content, (system,))
        assert request.messages[: len(before)] == before
        assert len(request.messages) - len(before) == (1 if len(before) == 1 else 2)
        assert request.kind == f"turn-{len(request.messages) // 2}"
        assert request.messages[-1].role == "user"
        seen[opening.content] = request.messages
    assert len(seen) > 20
    assert len({opening.split(".")[0] for opening in seen}) == len(seen)
    live = [request.messages[1].content for request in requests]
    assert any(before != after for before, after in pairwise(live))


def test_passages_hold_whole_pieces_up_to_their_words_and_close_with_the_question(folder: Path) -> None:
    for request in drawn(folder, PASSAGES, 20):
        number, *rest = said(request).split("\n\n")
        assert rest[-1] == "Why?"
        assert len(rest) == 2
        assert words(request) == 1 + 2 * 19 + 1
        assert number.split(". ")[0].isdigit()


def test_a_piece_that_is_too_long_is_cut(folder: Path) -> None:
    assert {words(request) for request in drawn(folder, PASSAGES.replace("words = 40", "words = 5"), 9)} == {1 + 5 + 1}


def test_prompts_leave_room_for_the_answer_in_the_context(folder: Path) -> None:
    large = TEXT.replace("input_tokens = 30", "input_tokens = 5000").replace("max_tokens = 8", "max_tokens = 100")
    for request in drawn(folder, "max_context = 512\ntokens_per_word = 2.0\n" + large, 5):
        assert words(request) * 2 + 100 <= 512
        assert words(request) * 2 + 100 > 400


@pytest.mark.parametrize("kind", [TEXT, PASSAGES])
def test_an_answer_may_have_half_of_the_context_at_most(folder: Path, kind: str) -> None:
    kind = kind.replace("max_tokens = 8", "max_tokens = 5000").replace("words = 40", "words = 4000")
    for request in drawn(folder, "max_context = 128\n" + kind, 5):
        assert request.max_tokens == 64
        assert words(request) >= 2


def test_answers_can_be_given_another_length() -> None:
    workload = read_workload("fixed").with_answers(max_tokens=5, fixed_length=True)
    plain = read_workload("fixed").draw(1)
    for request, before in islice(zip(workload.draw(1), plain, strict=False), 9):
        assert (request.max_tokens, request.ignore_eos) == (5, True)
        assert (before.max_tokens, before.ignore_eos) == (64, False)
        assert said(request) == said(before)


def test_a_log_normal_has_the_median_and_mean_that_it_names() -> None:
    dice = Dice("any")
    values = [Amount.model_validate({"median": 1000, "mean": 1300}).draw(dice) for _ in range(6000)]
    assert abs(median(values) - 1000) < 50
    assert abs(mean(values) - 1300) < 60
    values = [Amount.model_validate({"mean": 300, "sigma": 1.0}).draw(dice) for _ in range(6000)]
    assert abs(mean(values) - 300) < 25


def test_quantiles_are_met() -> None:
    dice = Dice("any")
    amount = Amount.model_validate({"quantiles": [[0, 10], [0.5, 20], [1, 1000]]})
    values = sorted(amount.draw(dice) for _ in range(4000))
    assert values[0] >= 10
    assert values[-1] <= 1000
    assert abs(values[2000] - 20) <= 2
    assert abs(values[3000] - 510) < 60


@given(
    least=st.integers(0, 50),
    width=st.integers(0, 50),
    seed=st.text(max_size=5),
    shape=st.sampled_from([{}, {"median": 30, "sigma": 2.0}, {"quantiles": [[0, 1], [1, 500]]}]),
)
def test_no_amount_leaves_its_limits(least: int, width: int, seed: str, shape: dict[str, object]) -> None:
    amount = Amount.model_validate({"least": least, "most": least + width, **shape})
    dice = Dice(seed)
    assert all(least <= amount.draw(dice) <= least + width for _ in range(20))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("title = ", "is no TOML: "),
        ('about = "A"\n' + PROMPTS, "title is missing"),
        (HEAD, "kinds is missing"),
        (HEAD + PROMPTS + "prioritty = 1", "kinds[0].prioritty: there is no such field"),
        (HEAD + PROMPTS + "priority = 4", "kinds[0].priority = 4: input should be less than or equal to 3"),
        (HEAD + PROMPTS + "share = 0.5", "kinds[0].share = 0.5: "),
        (HEAD + PROMPTS + PROMPTS, "two kinds have the name 'a'"),
        (HEAD + PROMPTS.replace('"prompts"', '"hub"'), "kinds[0].source = 'hub': should be one of 'prompts', "),
        (HEAD + PROMPTS.replace('source = "prompts"\n', ""), "kinds[0].source is missing"),
        (HEAD + PROMPTS.replace("= 8", "= 0"), "kinds[0]: max_tokens must be 1 or more"),
        (HEAD + PROMPTS.replace("= 8", "= [9, 8]"), "kinds[0].max_tokens = [9, 8]: least (9) is more than most (8)"),
        (HEAD + PROMPTS.replace("= 8", "= 'x'"), "kinds[0].max_tokens = 'x': should be a whole number, [least, most]"),
        (HEAD + PROMPTS.replace("= 8", "= {median = 3}"), "kinds[0].max_tokens: a log-normal needs two of"),
        (
            HEAD + PROMPTS.replace("= 8", "= {quantiles = [[0, 9], [1, 8]]}"),
            "kinds[0].max_tokens: quantiles stand alone",
        ),
        (HEAD + PROMPTS.replace("p.txt", "none.txt"), "none.txt cannot be read: No such file"),
        (HEAD + PROMPTS.replace("p.txt", "empty.txt"), "empty.txt holds no prompts"),
        (HEAD + PROMPTS.replace("p.txt", "bad.jsonl"), 'bad.jsonl, line 2: should be a JSON object with "prompt"'),
        (HEAD + PROMPTS.replace("p.txt", "wrong.jsonl"), 'wrong.jsonl: prompt 1: "prompt" should be text, not 5'),
        (HEAD + PROMPTS.replace("p.txt", "latin.txt"), "latin.txt is no UTF-8: "),
        (HEAD + TALKS.replace("s.jsonl", "even.jsonl"), 'even.jsonl, line 1: "turns" should be an odd number of texts'),
        (HEAD + TALKS + "chat = false", "kinds[0].chat = False: "),
        (HEAD + PROMPTS + "chat = false\nsystem = 'S'", "kinds[0]: system needs chat = true"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(folder: Path, text: str, message: str) -> None:
    (folder / "empty.txt").write_text("\n \n")
    (folder / "bad.jsonl").write_text('{"prompt": "x"}\n{"text": "x"}\n')
    (folder / "wrong.jsonl").write_text('{"prompt": 5}\n')
    (folder / "latin.txt").write_bytes("é".encode("latin-1"))
    (folder / "even.jsonl").write_text('{"turns": ["q", "a"]}\n')
    line = refusal(written(folder, text))
    assert message in line
    assert line.startswith(str(folder))


def test_an_unknown_name_is_told_what_there_is() -> None:
    line = refusal("chatt")
    assert line.startswith("no workload 'chatt': ")
    assert all(name in line for name in SHIPPED)


def test_a_shipped_file_can_be_used_from_an_own_workload(tmp_path: Path) -> None:
    request = drawn(tmp_path, PROMPTS.replace("p.txt", "chat.txt"), 1)[0]
    assert said(request) in {said(other) for other in islice(read_workload("chat").draw(1), 500)}


def test_the_documented_workload_is_one(folder: Path) -> None:
    (folder / "questions.txt").write_text("why?\n")
    (folder / "logs.txt").write_text("# Monday\nall is well\n\n" + "line " * 4000)
    example = DOCUMENT.split("### Write one")[2].split("```toml\n")[1].split("```")[0]
    workload = read_workload(written(folder, example))
    requests = list(islice(workload.draw(1), 20))
    assert Counter(request.kind for request in requests) == {"question": 18, "log": 2}
    assert {request.abandon_after for request in requests} == {None, 20}


@pytest.mark.parametrize("name", SHIPPED)
def test_every_workload_is_documented(name: str) -> None:
    assert f"| `{name}` |" in DOCUMENT.split("## Workloads")[1]

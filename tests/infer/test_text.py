"""The promise: streamed text is the decoded text, character for character, however it is split."""

from __future__ import annotations

import random
from itertools import permutations
from pathlib import Path

import pytest
import torch
from tiny_chat import END, byte_tokenizer, spaced_tokenizer
from tiny_targets import random_model
from transformers import AutoTokenizer

from draftheads.heads.target.model import Target
from draftheads.infer.engine import Speculator
from draftheads.infer.text import REPLACEMENT, AnswerText, StopStrings, TextStream

DATA = Path(__file__).parents[3] / "shared" / "data"
TEXT = "Grüße, 世界! 👩‍👩‍👧 \U0001f1ea\U0001f1fa naïve\n\n  two  spaces and 𝔘𝔫𝔦𝔠𝔬𝔡𝔢."


def tokenizers():
    yield "bytes"
    yield from ("qwen2.5", "minimind-6400")


@pytest.fixture(params=tokenizers())
def tokenizer(request):
    if request.param == "bytes":
        return byte_tokenizer()
    folder = DATA / "tokenizers" / request.param
    if not folder.is_dir():
        pytest.skip(f"real tokenizer not found at {folder}")
    return AutoTokenizer.from_pretrained(folder)


def pieces_of(tokens: list[int], seed: int) -> list[list[int]]:
    """The tokens in runs of 0 to 4, as speculative steps bring them."""
    chance, pieces = random.Random(seed), []
    while tokens:
        size = chance.randint(0, 4)
        pieces.append(tokens[:size])
        tokens = tokens[size:]
    return pieces


@pytest.mark.parametrize("seed", range(4))
def test_streamed_text_is_the_decoded_text(tokenizer, seed):
    tokens = tokenizer(TEXT)["input_ids"]
    stream = TextStream(tokenizer)
    pieces = [stream.feed(piece) for piece in pieces_of(tokens, seed)]
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert "".join(pieces) + stream.flush() == tokenizer.decode(tokens) == TEXT


def test_nothing_is_lost_to_a_tokenizer_that_cleans_up_spaces():
    """It would take back the space in front of a full stop, and with it what comes next."""
    tokenizer = byte_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    tokens = tokenizer("He said , no . It does n't .")["input_ids"]
    stream = TextStream(tokenizer)
    shown = "".join(stream.feed([token]) for token in tokens) + stream.flush()
    assert shown == "He said , no . It does n't ."


def test_text_comes_token_by_token_once_its_characters_are_whole(tokenizer):
    stream, shown = TextStream(tokenizer), []
    for token in tokenizer("ab 👩 c")["input_ids"]:
        shown.append(stream.feed([token]))
    assert sum(map(bool, shown)) >= 3, "nothing is held back that is complete"
    assert "".join(shown) == "ab 👩 c"


def test_a_first_piece_of_spaces_keeps_its_spaces(stories):
    """SentencePiece decoders drop the first space: a stream that knows the prompt does not."""
    tokenizer = AutoTokenizer.from_pretrained(stories)
    tokens = tokenizer("Once upon a time there was")["input_ids"]
    stream = TextStream(tokenizer)
    start = stream.feed(tokens[:-3])
    rest = "".join(stream.feed([token]) for token in tokens[-3:]) + stream.flush()
    assert start + rest == "Once upon a time there was"


def test_an_unfinished_character_is_shown_at_the_end():
    tokenizer = byte_tokenizer()
    stream = TextStream(tokenizer)
    tokens = tokenizer("a👩")["input_ids"][:-1]
    assert stream.feed(tokens[:1]) == "a"
    assert [stream.feed([token]) for token in tokens[1:]] == ["", "", ""]
    assert REPLACEMENT in stream.flush()
    assert stream.flush() == ""


def test_special_tokens_are_not_shown_unless_asked_for():
    tokenizer = byte_tokenizer()
    tokens = [*tokenizer("a")["input_ids"], END, *tokenizer("b")["input_ids"]]
    assert TextStream(tokenizer).feed(tokens) == "ab"
    assert TextStream(tokenizer, skip_special_tokens=False).feed(tokens) == "a<|im_end|>b"


@pytest.mark.parametrize("seed", range(4))
def test_an_answers_characters_are_marked_by_the_draft_tokens_that_complete_them(seed):
    tokenizer = byte_tokenizer()
    answer = AnswerText(TextStream(tokenizer))
    marks: list[bool] = []  # of bytes
    for piece in pieces_of(tokenizer(TEXT)["input_ids"], seed):
        accepted = len(piece) - 1 if piece else -1
        answer.add(piece, accepted)
        marks += [place < accepted for place in range(len(piece))]
    answer.end()
    assert answer.text == TEXT
    ends = [len(TEXT[:size].encode()) for size in range(1, len(TEXT) + 1)]
    assert answer.accepted == [marks[end - 1] for end in ends]
    assert {True, False} == set(answer.accepted)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_text_that_may_begin_a_stop_string_waits(size):
    tokenizer = byte_tokenizer()
    stops = StopStrings(tokenizer, ["END", "\n\n"], ())
    tokens = tokenizer("An EN, a\nline. ENDless")["input_ids"]
    hit = next(place for place, token in enumerate(tokens) if stops.completed_by(token))
    answer = AnswerText(TextStream(tokenizer), ["END", "\n\n"])
    shown = ""
    for place in range(0, hit + 1, size):
        part = tokens[place : min(place + size, hit + 1)]
        answer.add(part, is_last=place + size > hit)
        shown += answer.text[len(shown) : answer.settled]
        assert "An EN, a\nline. ".startswith(shown)
    assert shown == answer.text == "An EN, a\nline. "
    assert len(answer.accepted) == len(answer.text)


def test_the_beginning_of_a_stop_string_is_shown_where_none_comes():
    tokenizer = byte_tokenizer()
    answer = AnswerText(TextStream(tokenizer), ["END"])
    answer.add(tokenizer("The EN")["input_ids"])
    assert answer.text[: answer.settled] == "The "
    answer.end()
    assert answer.text[: answer.settled] == "The EN"


def completed_at(tokenizer, stop: list[str], text: str) -> int | None:
    stops = StopStrings(tokenizer, stop, ())
    tokens = tokenizer(text)["input_ids"]
    hits = [place for place, token in enumerate(tokens) if stops.completed_by(token)]
    return hits[0] if hits else None


def test_a_stop_string_is_found_across_tokens(tokenizer):
    text = "one two\nUser: three"
    place = completed_at(tokenizer, ["never", "\nUser:"], text)
    tokens = tokenizer(text)["input_ids"]
    assert "\nUser:" in tokenizer.decode(tokens[: place + 1])
    assert "\nUser:" not in tokenizer.decode(tokens[:place])


def test_stop_strings_of_different_lengths_and_of_many_bytes():
    tokenizer = byte_tokenizer()
    assert completed_at(tokenizer, ["a long stop string", "x"], "abcx") == 3
    assert completed_at(tokenizer, ["x", "a long stop string"], "abc") is None
    assert completed_at(tokenizer, ["👩"], "a👩b") == 4, "the last of its four bytes"
    assert completed_at(tokenizer, ["<|im_end|>"], "a<|im_end|>") == 1, "special tokens count"


@pytest.mark.parametrize("real", [False, True])
def test_a_stop_string_that_begins_with_the_first_token_keeps_its_space(real, request):
    """SentencePiece decoders drop the space before the first token of what they are given."""
    tokenizer = spaced_tokenizer()
    if real:
        tokenizer = AutoTokenizer.from_pretrained(request.getfixturevalue("stories"))
    prompt, new = (tokenizer(text)["input_ids"] for text in ("once upon a", "time the end"))
    new = [token for token in new if token != tokenizer.bos_token_id]
    assert tokenizer.decode(new).startswith("time") and " time" in tokenizer.decode(prompt + new)
    stops = StopStrings(tokenizer, [" time"], prompt)
    hit = next(place for place, token in enumerate(new) if stops.completed_by(token))
    assert " time" in tokenizer.decode(prompt + new[: hit + 1])
    assert not StopStrings(tokenizer, ["a time"], prompt).completed_by(new[0]), "not the prompt's"


def test_the_engine_stops_where_generate_stops_at_the_very_first_token():
    tokenizer, model = spaced_tokenizer(), random_model("llama")
    for words in permutations(("once", "upon", "a", "time")):  # one after which a word comes
        ids = tokenizer(" ".join(words), return_tensors="pt")["input_ids"]
        asked = {"max_new_tokens": 9, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        written = model.generate(ids, **asked)[0].tolist()
        stop = tokenizer.decode(written)[len(tokenizer.decode(ids[0])) :][:3]
        if stop.startswith(" "):
            break
    assert stop.startswith(" ")
    expected = model.generate(ids, **asked, stop_strings=[stop], tokenizer=tokenizer)[0].tolist()
    steps = Speculator(Target(model, tokenizer)).generate(ids[0], max_new_tokens=9, stop=[stop])
    assert [token for step in steps for token in step.tokens] == expected[4:] == written[4:5]

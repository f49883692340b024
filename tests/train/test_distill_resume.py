"""The promise: nothing that interrupts or divides the work changes a single byte of the answers."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_chat import (
    EOS,
    TEMPLATE,
    files,
    llama,
    on_call,
    options,
    prompts,
    records,
)
from tokenizers import processors

from draftheads.heads.target.model import Target
from draftheads.train.data import distill as distill_module
from draftheads.train.data.answers import count, read_answers, read_manifest
from draftheads.train.data.distill import distill


@pytest.fixture(scope="module")
def whole(shared_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of 14 prompts in batches of 4."""
    out = tmp_path_factory.mktemp("whole") / "o"
    distill(shared_target, prompts(14, turns=2), options(out))
    return out


def unmerged(target: Target, out: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All answers in a folder as a process leaves them that is killed before it ends; returns its
    file.
    """
    with monkeypatch.context() as patch:
        patch.setattr(distill_module, "finish", count)
        distill(target, prompts(14, turns=2), options(out))
    [journal] = out.glob("answers-*.jsonl")
    return journal


@pytest.mark.parametrize("calls", [0, 1, 3, 5])
def test_interrupted_and_resumed_equals_uninterrupted(
    target: Target, whole: Path, tmp_path: Path, calls: int, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupt(call: int, rows: int) -> None:
        if call == calls:
            raise KeyboardInterrupt

    on_call(target, interrupt)
    out = tmp_path / "o"
    with pytest.raises(KeyboardInterrupt), caplog.at_level(logging.WARNING):
        distill(target, prompts(14, turns=2), options(out))
    assert "run the same command again to resume" in caplog.text
    caplog.clear()
    kept = len(list(read_answers(out)))
    assert kept <= calls * 4 and f"{kept} of 14 prompts" in caplog.text
    done = sum(record["turns"] for record in records(out))
    again = on_call(target, lambda call, rows: None)
    distill(target, prompts(14, turns=2), options(out))
    assert files(out) == files(whole)
    assert sum(again) == sum(record["turns"] for record in records(whole)) - done


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.999, 1.0])
def test_killed_while_writing_and_resumed_equals_uninterrupted(
    target: Target,
    whole: Path,
    tmp_path: Path,
    share: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    journal = unmerged(target, tmp_path / "o", monkeypatch)
    content = journal.read_bytes()
    journal.write_bytes(content[: int(share * len(content))])
    calls = on_call(target, lambda call, rows: None)
    distill(target, prompts(14, turns=2), options(tmp_path / "o"))
    assert files(tmp_path / "o") == files(whole)
    assert (len(calls) == 0) is (share == 1.0)  # nothing is done twice


def test_two_processes_answer_the_same_as_one(
    target: Target, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "o"
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, complete in ((1, False), (0, True)):
        monkeypatch.setenv("RANK", str(rank))
        report = distill(target, prompts(14, turns=2), options(out))
        assert report.complete is complete is read_manifest(out).complete
        assert report.counts.done > 0 and complete is (report.counts.done == 14)
    assert files(out) == files(whole)


def test_other_number_of_processes_finishes_the_work(
    target: Target, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "o"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    distill(target, prompts(14, turns=2), options(out))
    journal = out / "answers-00001-of-00002.jsonl"
    journal.write_bytes(journal.read_bytes()[:-30])  # killed in its last batch
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert distill(target, prompts(14, turns=2), options(out)).counts.done == 14
    assert files(out) == files(whole)


# ---------------------------------------------------------------- what is refused


def test_other_options_are_refused_naming_each_difference(target: Target, whole: Path) -> None:
    asked = prompts(14, turns=2)
    for changes, complaint in (
        ({"seed": 1, "top_k": 2}, "seed: expected 0, got 1; top_k: expected 0, got 2"),
        ({"temperature": 0.5}, "temperature: expected 1.0, got 0.5"),
        ({"template_args": {"a": 1}}, r"template_args: expected \{\}, got \{'a': 1\}"),
    ):
        with pytest.raises(ValueError, match=rf"{complaint}.*Use another --out, or the same opt"):
            distill(target, asked, options(whole, **changes))
    other = llama()
    other.model.get_input_embeddings().weight.data.add_(1.0)
    with pytest.raises(ValueError, match="target fingerprint: expected '"):
        distill(other, asked, options(whole))


def changed_text(change: str) -> Target:
    """The same weights, with something else around them."""
    other = llama(eos=(*EOS, 5)) if change == "end tokens" else llama()
    if change == "chat template":
        other.tokenizer.chat_template = TEMPLATE.replace("user", "User").replace("\n", " ")
    elif change == "special tokens":
        other.tokenizer.add_special_tokens({"bos_token": "<s>"})
    elif change == "tokenizer":
        other.tokenizer.add_tokens(["question"])
    elif change == "post-processor":
        begin = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
        other.tokenizer.backend_tokenizer.post_processor = begin
    return other


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("chat template", "chat template"),
        ("special tokens", "chat template"),
        ("tokenizer", "tokenizer"),
        ("post-processor", "tokenizer"),
        ("end tokens", "end tokens"),
    ],
)
def test_another_template_or_tokenizer_is_refused(
    target: Target, whole: Path, tmp_path: Path, change: str, named: str
) -> None:
    """One folder used to get the texts of two templates."""
    before = files(whole)
    with pytest.raises(ValueError, match=f"{named}: expected '.*', got '.*Use another --out, or"):
        distill(changed_text(change), prompts(14, turns=2), options(whole))
    with pytest.raises(ValueError, match=f"{named}: expected"):
        distill(changed_text(change), prompts(15, turns=2), options(whole))
    assert files(whole) == before
    distill(target, prompts(14, turns=2), options(whole))


@pytest.mark.parametrize("temperature", [1e-40, 1e-6, float("inf"), float("nan"), -0.1])
def test_temperatures_that_no_logits_can_be_divided_by_are_refused(
    tmp_path: Path, temperature: float
) -> None:
    with pytest.raises(ValueError, match="temperature"):
        options(tmp_path / "o", temperature=temperature)


def test_folder_that_cannot_be_written_is_refused_before_generation(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = on_call(target, lambda call, rows: None)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory.*file/o"):
        distill(target, prompts(1), options(tmp_path / "file" / "o"))

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(distill_module, "write_manifest", full)
    with pytest.raises(OSError, match="No space left on device"):
        distill(target, prompts(1), options(tmp_path / "o"))
    assert not calls


def test_target_needs_a_tokenizer_and_prompts(target: Target, tmp_path: Path) -> None:
    bare = Target(target.model, None, name="bare")
    with pytest.raises(ValueError, match="bare: expected a tokenizer next to the model, found"):
        distill(bare, prompts(1), options(tmp_path / "o"))
    with pytest.raises(ValueError, match="prompts: expected at least one, got none"):
        distill(target, [], options(tmp_path / "o"))
    with pytest.raises(ValueError, match="temperature"):
        options(tmp_path / "o", temperature=-1)
    assert not (tmp_path / "o").exists()


def test_reading_needs_a_manifest(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a distillation folder with manifest\.json"):
        list(read_answers(tmp_path))


@pytest.mark.parametrize("version", [1, 2, 99, "3", None])
def test_another_format_is_refused(
    target: Target, whole: Path, tmp_path: Path, version: Any
) -> None:
    """By reading and by resuming."""
    (tmp_path / "manifest.json").write_text(
        json.dumps(read_manifest(whole).as_written() | {"format": version})
    )
    for read in (read_manifest, lambda out: distill(target, prompts(1), options(out))):
        with pytest.raises(ValueError) as error:
            read(tmp_path)
        said = f"expected format 3, got {version!r}; distil again"
        assert str(error.value) == f"{tmp_path / 'manifest.json'}: {said}"


@pytest.mark.parametrize("text", ["", "{", "[" * 200_000, "[]", '{"format": 3}', "\ufeff{}", "7"])
def test_damaged_manifest_is_one_line(target: Target, tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    for read in (read_manifest, lambda out: distill(target, prompts(1), options(out))):
        with pytest.raises(
            ValueError, match=r"manifest\.json: .*, got a damaged file \(.*\); copy"
        ):
            read(tmp_path)


def test_damaged_answers_are_refused(
    target: Target, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "o"
    journal = unmerged(target, out, monkeypatch)
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:2], b"\0\0\n", *lines[3:]]))
    with pytest.raises(ValueError, match=r"line 3: expected an answer as JSON, got .*delete this"):
        list(read_answers(out))
    journal.write_bytes(b"".join([lines[0], *lines[2:]]))
    distill(target, prompts(14, turns=2), options(out))  # fills the gap
    assert records(out) == records(whole)
    assert list(read_answers(out)) == list(read_answers(whole))


def test_missing_answer_file_is_noticed(whole: Path, tmp_path: Path) -> None:
    shutil.copy(whole / "manifest.json", tmp_path)
    with pytest.raises(ValueError, match=r"arrow: expected \d+ bytes, got no file; copy it again"):
        list(read_answers(tmp_path))

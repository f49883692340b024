"""The promise: a page about a run shows its own numbers, reads nothing else, runs nothing, and can
be read on any screen.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from itertools import compress
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_chat import llama, saved
from tiny_heads import overfitted, written_by
from tiny_training import run as train

from draftheads.heads.formats.hub import open_head, record_tuned, save_head
from draftheads.heads.terminal import printable
from draftheads.heads.tree import DynamicTree, StaticTree
from draftheads.infer.engine import Speculator
from draftheads.infer.prompt import encode_prompt
from draftheads.infer.text import AnswerText, TextStream
from draftheads.train.advice.report import render_report, ticks
from draftheads.train.metrics import read_metrics

DECODING = ["eval.every=2", "eval.prompts=2", "eval.new_tokens=8", "run.save_every=2"]
TUNED = {
    "machine": "a <fast> machine, 2 cores",
    "tokens_per_step": 2.345,
    "break_even_tokens_per_step": 1.234,
    "measured_tokens_per_second": 300.0,
    "plain_tokens_per_second": 200.0,
}
HOSTILE = "</title><script>alert('τ')</script>\" onload=\"alert(2)"
QUESTIONS = ["<b>one</b> &", "two <i>2</i>"]
VOID = {"meta", "br"}
LOW, HIGH = 176, 12
"""Where the axis of a curve begins and ends, in pixels."""


class Page(HTMLParser):
    """What a browser reads of a page: its elements, and the text below each."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[int] = []
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(html)
        self.close()
        assert self.open == [], "all that is opened is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))
        if tag not in VOID:
            self.open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self.open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        for number in self.open:
            self.elements[number][2].append(data)

    def texts(self, tag: str, style: str | None = None) -> list[str]:
        """The texts of all such elements, without blanks around them."""
        return [
            "".join(text).strip()
            for name, has, text in self.elements
            if name == tag and style in (None, has.get("class"))
        ]

    def all(self, tag: str, style: str) -> list[dict[str, str | None]]:
        return [has for name, has, _ in self.elements if (name, has.get("class")) == (tag, style)]


@pytest.fixture(scope="module")
def output(made, tmp_path_factory) -> Path:
    """A run of six steps with three evaluations, tuned."""
    folder = tmp_path_factory.mktemp("report") / "run"
    assert train(made, folder, *DECODING) == 0
    record_tuned(open_head(folder).path, open_head(folder).facts.tree, TUNED)
    return folder


def page_of(run: Path) -> Page:
    return Page(render_report(open_head(run), read_metrics(run)))


def test_the_numbers_are_those_of_the_run(output):
    html = render_report(open_head(output), read_metrics(output))
    page, facts = Page(html), open_head(output).facts
    titles = page.texts("title")
    evaluations = [line for line in read_metrics(output) if "measured" in line]
    assert [line["step"] for line in evaluations] == [2, 4, 6]
    for line in evaluations:
        numbers = {
            "simulated": line["heldout_tokens_per_step"],
            "decoded": line["measured"]["tokens_per_step"],
        }
        this = ", this checkpoint" if line["step"] == facts.training["steps"] else ""
        for name, tau in numbers.items():
            assert f"step {line['step']}: {tau:.2f} {name}{this}" in titles
    for depth, share in enumerate(facts.training["heldout_top1"], start=1):
        assert f"depth {depth}: {100 * share:.1f} % of top-1 drafts are right" in titles
    text = " ".join(" ".join(page.texts("main")).split())
    tau = facts.training["decoding"]["tokens_per_step"]
    for said in (
        f"The best checkpoint wrote {tau:.2f} tokens per step on 2 held-out prompts",
        "1.50 times as fast as plain decoding (300 against 200 tokens/s) on a <fast> machine;",
        "drafts pay there above τ 1.23, and it reached 2.35",
        f"Next: draftheads chat --head {output}",
        f"{facts.training['data']['documents']} documents",
    ):
        assert said in text
    assert f"target: {facts.target.name}" in page.texts("pre")[0]


def test_a_curve_is_where_its_numbers_are(output):
    """They can be read from the picture again, by its axis."""
    html = render_report(open_head(output), read_metrics(output))
    losses = [line["loss"] for line in read_metrics(output) if "loss" in line]
    figure = html[html.index("Training loss") :]
    labels = [float(x) for x in re.findall(r'text-anchor="end">([\d.]+)<', figure)]
    [points] = re.findall(r'points="([^"]+)"', figure)
    pixels = [float(point.split(",")[1]) for point in points.split()]
    top = max(labels[: len(ticks(max(losses)))])
    found = [(LOW - y) / (LOW - HIGH) * top for y in pixels]
    assert found == pytest.approx(losses, abs=0.1 / (LOW - HIGH) * top)


@pytest.mark.parametrize("seed", range(3))
def test_an_axis_has_few_round_numbers_around_all_values(seed):
    generator = torch.Generator().manual_seed(seed)
    for exponent in torch.empty(300).uniform_(-5, 14, generator=generator).tolist():
        high = 10.0**exponent
        axis = ticks(high)
        space = axis[1]
        assert 2 <= len(axis) <= 7 and axis[0] == 0 and axis[-2] <= high < axis[-1]
        assert axis == pytest.approx([space * number for number in range(len(axis))])
        assert f"{space:.0e}"[0] in "125"
    for damaged in (math.inf, math.nan, -1e300, 0.0):
        assert len(ticks(damaged)) >= 2


def changed(output: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a run with other facts in its best checkpoint."""
    shutil.copytree(output, folder, symlinks=True)
    path = open_head(folder).path / "config.json"
    config = json.loads(path.read_text())
    change(config["draftheads"])
    path.write_text(json.dumps(config))
    return folder


def test_a_tree_is_drawn_node_by_node(output, tmp_path):
    """Each node one column after its parent, and no two in one place."""
    tree = StaticTree.best_first([[0.6 * 0.5**rank for rank in range(9)]] * 3, 30)

    def grow(facts: dict[str, Any]) -> None:
        facts |= {"tree": tree.to_json(), "tree_order": []}

    page = page_of(changed(output, tmp_path / "run", grow))
    nodes = {(float(has["cx"] or 0), float(has["cy"] or 0)) for has in page.all("circle", "node")}
    assert len(nodes) == 30
    places = {}
    for path, edge in zip(tree.paths, page.all("path", "edge"), strict=True):
        x, y, end_x, end_y = (
            float(number)
            for number in re.fullmatch(r"M(\S+) (\S+)C.* (\S+) (\S+)", edge["d"] or "").groups()
        )
        places[path] = (end_x, end_y)
        assert (x, y) == places.get(path[:-1], (12.0, 12.0))
        assert (end_x, end_y) in nodes and end_x > x and end_y >= y
    assert "30 draft nodes, 3 deep" in " ".join(page.texts("figcaption"))


def test_a_dynamic_tree_is_described(output, tmp_path):
    tree = DynamicTree(draft_nodes=9, depth=4, top_k=3)
    page = page_of(
        changed(output, tmp_path / "run", lambda facts: facts.update(tree=tree.to_json()))
    )
    assert page.all("circle", "node") == []
    said = "9 draft nodes, 4 deep, rebuilt in each step from the 3 best tokens"
    assert said in " ".join(page.texts("figcaption"))


def test_names_and_texts_are_no_markup(output, tmp_path):
    def rename(facts: dict[str, Any]) -> None:
        facts["target"]["name"] = HOSTILE + "\u202e\x1b[31m\ud800"
        facts["training"]["recipe"]["target"] = HOSTILE
        facts["training"]["data"]["prompts"]["source"] = HOSTILE

    html = render_report(open_head(changed(output, tmp_path / "run", rename)), [])
    page = Page(html)
    assert page.texts("h1") == [HOSTILE + "[31m"]
    assert HOSTILE in page.texts("pre")[0] and page.texts("script") == []
    assert page.texts("title")[0].endswith(HOSTILE + "[31m")
    for _, attributes, _ in page.elements:
        assert not {"src", "href", "onload", "srcset", "action"} & attributes.keys()
    assert not re.search(r"url\(|@import|<link|<img", html)
    assert printable(html) == html
    [policy] = [has["content"] for _, has, _ in page.elements if "http-equiv" in has]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_what_was_not_recorded_is_left_out(output, tmp_path, capsys):
    lines = (output / "metrics.jsonl").read_text().splitlines()
    damaged = tmp_path / "damaged"
    shutil.copytree(output, damaged, symlinks=True)
    (damaged / "metrics.jsonl").write_text(
        "\n".join([*lines[:3], '{"step": 3, "lo', *lines[3:], ""])
    )
    assert len(page_of(damaged).all("circle", "strong")) == 2  # and the one of this checkpoint
    assert "skipped 1 damaged lines" in capsys.readouterr().err

    unmeasured = tmp_path / "unmeasured"
    shutil.copytree(output, unmeasured, symlinks=True)
    losses = [line for line in lines if "loss" in line]
    (unmeasured / "metrics.jsonl").write_text("\n".join([*losses, ""]))
    page = page_of(unmeasured)
    assert "Training loss" in page.texts("h3") and "τ on held-out documents" not in page.texts("h3")

    page = page_of(open_head(output).path)  # a head folder alone
    assert "Training" not in page.texts("h2") and "Top-1 accuracy by depth" in page.texts("h3")

    def forget(facts: dict[str, Any]) -> None:
        facts.clear()

    page = page_of(changed(output, tmp_path / "bare", forget))
    assert "Nothing is recorded about this head's training." in " ".join(page.texts("p"))


def test_a_run_that_decodes_nothing_has_a_simulated_tau(made, tmp_path):
    assert train(made, tmp_path / "run") == 0
    text = " ".join(" ".join(page_of(tmp_path / "run").texts("main")).split())
    tau = open_head(tmp_path / "run").facts.training["predicted_tokens_per_step"]
    assert f"On held-out text, τ is {tau:.2f} by simulation; nothing was decoded." in text
    assert f"Next: draftheads tune --head {tmp_path / 'run'} --prompts PROMPTS" in text


def test_the_command_writes_the_page_into_the_run(run, output, tmp_path, monkeypatch):
    folder = tmp_path / "a run"
    shutil.copytree(output, folder, symlinks=True)
    before = {path.name for path in folder.iterdir()}
    code, out, _ = run("report", folder)
    assert code == 0 and f"written to {folder / 'report.html'}" in out
    assert {path.name for path in folder.iterdir()} - before == {"report.html"}
    assert f"draftheads chat --head '{folder}'" in (folder / "report.html").read_text().replace(
        "&#39;", "'"
    )
    assert run("report", folder, "--out", tmp_path / "new" / "other.html")[0] == 0
    assert (tmp_path / "new" / "other.html").read_text() == (folder / "report.html").read_text()
    monkeypatch.chdir(tmp_path)
    assert run("report", "smollm2")[0] == 0
    assert (tmp_path / "report.html").is_file(), "a head that is no folder here"


@pytest.fixture(scope="module")
def answered(tmp_path_factory) -> tuple[Any, Path]:
    """A target, and a head that knows its answers by heart."""
    folder = tmp_path_factory.mktemp("answered")
    target = llama(eos=())
    prompts = [encode_prompt(target, [{"role": "user", "content": each}]) for each in QUESTIONS]
    texts = written_by(target, prompts, 50)
    head = overfitted("medusa", target, texts, updates=60, depth=4, nodes=8)
    save_head(head, folder / "head", target=target)
    saved(target, folder / "target")
    lines = [json.dumps({"prompt": each}) for each in QUESTIONS]
    (folder / "prompts.jsonl").write_text("\n".join([*lines, ""]))
    return target, folder


@pytest.mark.slow
def test_answers_are_the_targets_own_and_drafts_are_marked(run, answered):
    target, folder = answered
    words = ["report", folder / "head", "--target", folder / "target", "--max-new-tokens", 40]
    code, out, errors = run(*words, "--prompts", folder / "prompts.jsonl")
    assert (code, errors) == (0, [])
    page = Page((folder / "head" / "report.html").read_text())
    assert page.texts("div", "asked") == QUESTIONS
    marked = ""
    head = open_head(folder / "head").load(target)
    for question, shown in zip(QUESTIONS, page.texts("div", "text"), strict=True):
        text = AnswerText(TextStream(target.tokenizer), clean=printable)  # as chat and server do
        prompt = encode_prompt(target, [{"role": "user", "content": question}])
        for step in Speculator(target, head).generate(prompt, max_new_tokens=40):
            text.add(step.tokens, step.accepted)
        text.end()
        assert shown == text.text.strip()
        marked += "".join(compress(text.text, text.accepted))
    assert marked and "".join(page.texts("mark")[1:]) == marked
    assert "Diagnosis" in page.texts("h2") and "τ of these answers" in page.texts("td")
    opacities = [float(has["opacity"] or 0) for name, has, _ in page.elements if name == "g"]
    assert len({*opacities}) > 1 and max(opacities) <= 1, "as often as a node is right"
    assert run(*words, "--sample", "three")[0] == 0
    page = Page((folder / "head" / "report.html").read_text())
    assert page.texts("div", "asked") == ["three"]


# ---------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("no Chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1100])
def test_a_browser_shows_it_at_any_width_by_day_and_by_night(
    browser, output, tmp_path, scheme, width
):
    def rename(facts: dict[str, Any]) -> None:
        facts["target"]["name"] = "a-name-without-any-space-" * 6

    folder = changed(output, tmp_path / "run", rename)
    path = tmp_path / "page.html"
    path.write_text(render_report(open_head(folder), read_metrics(folder)))
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    called: list[str] = []
    page.on("request", lambda request: called.append(request.url))
    page.on("console", lambda said: called.append(said.text))
    page.goto(path.as_uri())
    page.locator("summary").click()  # the recipe has long lines
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert called == [path.as_uri()]
    colours = page.evaluate(
        "['background-color', 'color'].map(name => getComputedStyle(document.body)[name])"
    )
    ground, ink = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
    assert (ground > 600 > 300 > ink) if scheme == "light" else (ground < 150 < 500 < ink)
    context.close()

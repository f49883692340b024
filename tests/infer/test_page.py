"""The promise: the page chats, marks drafts, races and is for everyone, in a real browser."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from served import Pieces, Says, running

from draftheads.infer.background import Point

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
]
DRAFTING = {"id": "tiny", "drafts": "8 draft nodes"}
"""What the server says of a model with draft heads; that of these tests has none, and acts."""
STREAM = "text/event-stream"


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Says, str]]:
    engine = Says()
    with running(engine) as (url, service):
        service.scheduler._plain.engine = engine
        yield engine, f"{url}/"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, served) -> Callable[..., Any]:
    """Opens a fresh page; it must not complain, nor call anyone but its server."""
    engine, url = served
    engine.text, engine.pause = "Hello.", 0.0
    engine.asked.clear()

    @contextmanager
    def fresh(script: str = "", model: dict[str, str] = DRAFTING) -> Iterator[Any]:
        context = browser.new_context(viewport={"width": 1000, "height": 700})
        page = context.new_page()
        page.set_default_timeout(60_000)  # of a busy machine
        complaints: list[str] = []

        def noted(said: Any) -> None:
            if said.type == "error" and not re.search("429|401|ERR_FAILED", said.text):
                complaints.append(said.text)  # those statuses are of `refusing`

        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", noted)
        page.on("request", lambda r: None if r.url.startswith(url) else complaints.append(r.url))
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": [model]}))
        if script:
            page.add_init_script(script)
        page.goto(url)
        page.locator("#model:not(:empty)").wait_for()
        yield page
        assert complaints == []
        context.close()

    return fresh


@pytest.fixture
def page(opened) -> Iterator[Any]:
    with opened() as page:
        yield page


def ask(page: Any, text: str = "Hi", mode: str = "chat") -> None:
    page.locator(f"[name=mode][value={mode}]").check(force=True)
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def ended(page: Any) -> None:
    """Wait until nothing is answered any more; a log that is empty is not visible."""
    page.locator("#log[aria-busy=false]").wait_for(state="attached")


def answered(page: Any, text: str = "Hi", mode: str = "chat") -> Any:
    """Ask, wait, and return the newest answer."""
    before = page.locator("article").count()
    ask(page, text, mode)
    page.locator("article").nth(before).wait_for()
    ended(page)
    return page.locator("article").last


def press(page: Any, name: str) -> None:
    page.get_by_role("button", name=name).click()


def stored(page: Any) -> str:
    return page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}])")


@contextmanager
def fulfilling(page: Any, **answer: Any) -> Iterator[None]:
    """Answers in the server's place."""
    page.route("**/chat/completions", lambda route: route.fulfill(**answer))
    yield
    page.unroute("**/chat/completions")


def refusing(page: Any, status: int, message: str) -> Any:
    body = json.dumps({"error": {"message": message}})
    return fulfilling(page, status=status, body=body, content_type="application/json")


FULL = "64 requests are waiting already; retry later"


def chunk(text: str, accepted: int = 0) -> str:
    step = {"tokens": 2, "accepted": 1, "seconds": 0.1, "accepted_chars": accepted}
    choice = {"delta": {"content": text}, "step": step}
    return f"data: {json.dumps({'choices': [choice]}, ensure_ascii=False)}\r\n\r\n"


# ---------------------------------------------------------------- a chat


def test_a_chat_streams_marks_its_drafts_and_is_remembered_until_a_new_one(page, served):
    served[0].text = "Hello there, my friend."
    article = answered(page, "First question")
    assert article.locator(".text").inner_text() == "Hello there, my friend."
    marked = "".join(article.locator(".d").all_inner_texts())
    expected = [c for n, c in enumerate(served[0].text) if n % 4 and n < 21]
    assert marked == "".join(expected) + "d"
    assert "tokens/s" in article.locator(".about").inner_text()
    assert page.locator("#chart rect.drafted").count() == 7
    assert "Tokens of the last 7 steps" in page.locator("#chart").get_attribute("aria-label")
    article = answered(page, "Second question")
    assert "First question" in served[0].asked[-1] and "Hello there" in served[0].asked[-1]
    press(page, "Regenerate")
    ended(page)
    assert page.locator("article").count() == 2
    assert served[0].asked[-1] == served[0].asked[-2]
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    article.get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "Hello there, my friend."
    page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error()) }")
    article.get_by_role("button", name="Copied").click()
    page.get_by_role("button", name="Not allowed here").wait_for()
    press(page, "New chat")
    answered(page, "Third question")
    assert "First" not in served[0].asked[-1]


def test_an_answer_can_be_stopped_and_what_was_said_stays(page, served):
    def stop(how: str) -> None:
        served[0].text, served[0].pause = "word " * 60, 0.05
        ask(page, "Old question")
        page.locator("article").last.locator(".d").first.wait_for()
        page.keyboard.press("Escape") if how == "Escape" else press(page, how)
        ended(page)
        served[0].text, served[0].pause = "Fine.", 0.0

    for how in ("Escape", "Stop"):
        stop(how)
        said = page.locator("article .text").last.inner_text()
        assert "word" in said and len(said) < 200
        answered(page, "Go on")
        assert said.strip() in served[0].asked[-1]
        press(page, "New chat")
    stop("New chat")
    assert page.locator("#welcome").is_visible() and not page.locator("#steps").is_visible()
    assert page.locator("article").count() == 0
    answered(page, "New question")
    assert "Old question" not in served[0].asked[-1] and "New question" in served[0].asked[-1]
    press(page, "New chat")
    page.route("**/chat/completions", lambda route: None)  # never answers
    ask(page)
    page.keyboard.press("Escape")
    ended(page)
    assert page.get_by_role("status").inner_text() == "Stopped."
    assert "stopped by you" in page.locator("article").inner_text()
    page.unroute("**/chat/completions")
    press(page, "Try again")
    page.get_by_text("Fine.").wait_for()
    assert page.locator("article").count() == 1


@pytest.mark.mend("NaN times as fast")
def test_a_race_shows_both_and_who_won(page, served):
    served[0].text = "The same text for both."
    verdict = answered(page, mode="race").locator(".verdict")
    assert page.locator(".lane .text").all_inner_texts() == ["The same text for both."] * 2
    assert page.locator(".lane h3").first.inner_text().startswith("Draft heads")
    assert "1.00 times as fast, the same text" in verdict.inner_text()
    served[0].text = "H"  # it was NaN times as fast
    for mode in ("race", "chat"):
        shown = answered(page, mode=mode).inner_text()
        for word in ("NaN", "Infinity"):
            assert word not in shown and word not in page.get_by_role("status").inner_text()
    only = chunk("Hi").replace('"tokens": 2', '"prefill": true, "tokens": 1')
    with fulfilling(page, body=f"{only}data: [DONE]\n\n", content_type=STREAM):
        verdict = answered(page, mode="race").locator(".verdict")
    expected = "Too short to compare: an answer of one token has no speed; the same text"
    assert verdict.inner_text() == expected


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("mode", ["chat", "race"])
def test_only_the_last_refused_question_can_be_tried_again_and_that_is_in_view(page, served, mode):
    again = page.get_by_role("button", name="Try again")
    with refusing(page, 429, FULL):
        ask(page, "First", mode)
        page.get_by_text(FULL).first.wait_for()
        again.wait_for()
    served[0].pause = 0.2
    ask(page, "Second", mode)
    page.locator("article").nth(1).wait_for()
    assert again.count() == 0
    ended(page)
    asked = " ".join(served[0].asked)
    assert "First" not in asked and "Second" in asked
    press(page, "New chat")
    served[0].text, served[0].pause = "line\n\n" * 60, 0.0
    answered(page)
    with refusing(page, 429, FULL):
        answered(page, "Third", mode)
    box, main = again.bounding_box(), page.locator("main").bounding_box()
    assert box["y"] >= main["y"] and box["y"] + box["height"] <= main["y"] + main["height"]
    press(page, "New chat")
    with refusing(page, 429, FULL):
        answered(page, "Fourth", mode)
    served[0].text = "Fine."
    again.click()
    page.get_by_text("Fine.").first.wait_for()
    ended(page)
    assert page.locator("article").count() == 1 and "Fourth" in served[0].asked[-1]


BYTES = """(body) => {
  const whole = new TextEncoder().encode(body);
  const original = window.fetch;
  window.fetch = (url, ...rest) => {
    if (!String(url).includes("completions")) return original(url, ...rest);
    let at = 0;
    return Promise.resolve(new Response(new ReadableStream({
      pull(to) { at < whole.length ? to.enqueue(whole.slice(at, ++at)) : to.close(); },
    })));
  };
}"""


def test_a_stream_may_be_split_anywhere_and_one_that_breaks_is_said(page):
    whole = chunk("é🙂漢", 2) + chunk("字") + "data: [DONE]"
    original = "() => { window.whole ??= window.fetch; window.fetch = window.whole }"
    page.evaluate(original)
    page.evaluate(f"({BYTES})({json.dumps(whole)})")
    article = answered(page)
    assert article.locator(".text").inner_text() == "é🙂漢字"
    assert article.locator(".d").all_inner_texts() == ["é🙂"]
    assert article.locator(".fault").count() == 0
    page.evaluate(original)
    broken = BYTES.replace("to.close()", "to.error(new TypeError())")
    page.evaluate(f"({broken})({chunk('Half')!r})")
    article = answered(page)
    assert article.locator(".text").inner_text() == "Half"
    assert "cut off" in article.locator(".fault").inner_text()
    page.evaluate(original)
    page.route("**/chat/completions", lambda route: route.abort())
    assert "The server cannot be reached." in answered(page).locator(".fault").inner_text()
    page.unroute("**/chat/completions")
    with fulfilling(page, body=chunk("Half"), content_type=STREAM):
        article = answered(page)
    assert "The answer was cut off." in article.locator(".fault").inner_text()
    assert article.locator(".text").inner_text() == "Half"
    with fulfilling(page, body="data: {oops\n\ndata: [DONE]\n\n", content_type=STREAM):
        said = answered(page).locator(".fault").inner_text()
    assert said == "The server sent something that this page does not understand."


# ---------------------------------------------------------------- what is kept


@pytest.mark.mend("the page's API key")
def test_a_key_is_asked_for_and_in_no_storage_and_one_that_was_is_removed(page):
    page.evaluate("""localStorage.setItem("draftheads", '{"key": "old", "theme": "dark"}')""")
    page.reload()
    assert "old" not in stored(page) and "dark" in stored(page)
    with refusing(page, 401, "key"):
        ask(page)
        assert page.get_by_label("API key").input_value() == ""
        page.get_by_label("API key").fill("s3cret")
    press(page, "Done")
    with page.expect_request("**/chat/completions") as request:
        press(page, "Try again")
    assert request.value.headers["authorization"] == "Bearer s3cret"
    ended(page)
    assert "s3cret" not in stored(page)
    press(page, "Settings")
    said = "The key is kept until this page is closed or reloaded"
    assert said in page.locator("#settings").inner_text()


def test_settings_are_sent_and_survive_a_reload(page):
    press(page, "Settings")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_label("Seed").fill("3")
    page.get_by_label("Mark accepted drafts").uncheck()
    page.get_by_label("Colours").select_option("dark")
    page.keyboard.press("Escape")
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert not page.evaluate("document.body.classList.contains('tinted')")
    with page.expect_request("**/chat/completions") as request:
        answered(page)
    sent = request.value.post_data_json
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (sent["temperature"], sent["seed"]) == (0.7, 3)
    assert "top_p" not in sent


SITE_DATA = {
    "blocked": """for (const area of ["localStorage", "sessionStorage"]) {
  Object.defineProperty(window, area, { get() { throw new DOMException("no", "SecurityError") } });
}""",
    "full": "Storage.prototype.setItem = () => {"
    " throw new DOMException('', 'QuotaExceededError') }",
    "no JSON": "localStorage.setItem('draftheads', '{oops')",
    "numbers": "localStorage.setItem('draftheads', '7'); sessionStorage.setItem('draftheads', '7')",
    "no turns": "sessionStorage.setItem('draftheads', '{\"turns\": [{\"question\": 1}, null]}')",
}


@pytest.mark.mend("the page without site data")
@pytest.mark.parametrize("name", SITE_DATA)
def test_blocked_full_or_damaged_site_data_do_not_break_the_page(opened, name):
    with opened(SITE_DATA[name]) as page:
        assert answered(page).locator(".text").inner_text() == "Hello."
        press(page, "Settings")
        page.get_by_label("Colours").select_option("dark")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"


@pytest.mark.mend("the page after a reload")
def test_a_reload_and_the_way_back_keep_the_conversation(page, served):
    served[0].text = "- **one**\n- two"
    answered(page)
    answered(page, "Second question")
    marked = page.locator(".d").all_inner_texts()
    page.get_by_label("Message", exact=True).fill("not sent yet")
    page.reload()
    assert page.locator(".asked").all_inner_texts() == ["Hi", "Second question"]
    assert page.locator("article li strong").first.inner_text() == "one"
    assert page.locator(".d").all_inner_texts() == marked
    assert "tokens/s" in page.locator(".about").first.inner_text()
    assert page.get_by_label("Message", exact=True).input_value() == "not sent yet"
    page.goto("about:blank")
    page.go_back()
    page.locator("#model:not(:empty)").wait_for()
    answered(page, "Third question")
    assert all(each in served[0].asked[-1] for each in ("Hi", "Second", "two"))
    press(page, "New chat")
    page.reload()
    assert page.locator("article").count() == 0 and page.locator("#welcome").is_visible()
    served[0].text, served[0].pause = "word " * 60, 0.05
    ask(page)
    page.locator(".d").first.wait_for()
    page.reload()  # inside an answer
    assert "word" in page.locator("article .text").inner_text()
    served[0].text, served[0].pause = "Fine.", 0.0
    press(page, "Regenerate")
    page.get_by_text("Fine.").wait_for()
    assert page.locator("article").count() == 1


# ---------------------------------------------------------------- for everyone


def test_keyboards_reach_and_screen_readers_hear_everything(page):
    """Tab order: modes, actions, message, send; focus is visible; Shift-Enter begins a line."""
    said = page.get_by_role("status")
    answered(page)
    assert "Answered:" in said.inner_text()
    assert page.get_by_role("log").get_attribute("aria-live") == "off"
    page.locator("body").evaluate("node => document.activeElement.blur()")
    focused = "(() => { const a = document.activeElement;"
    focused += " return a.id || a.value || a.textContent.trim() })()"
    reached = []
    for _ in range(9):
        page.keyboard.press("Tab")
        reached.append(page.evaluate(focused))
    for name in ("chat", "new", "open-settings", "Copy", "Regenerate", "text", "send"):
        assert name in reached, reached
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.get_by_label("Message", exact=True).input_value() == "one\ntwo"
    outline = page.locator("#text").evaluate("node => getComputedStyle(node).outlineStyle")
    assert outline == "solid"
    press(page, "Settings")
    nameless = page.evaluate(
        """[...document.querySelectorAll("button, input, textarea, select")].filter(
            (node) => !(node.textContent.trim() || node.labels?.length || node.ariaLabel)).length"""
    )
    assert nameless == 0
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.locator("main, header, footer").count() == 3


MARKDOWN = """# Title

Some **bold** text, *italics*, `code` and [a link](https://example.com/x).

- one
- two

1. first
2. second

```python
def f(x):
    return x < 3
```

> quoted
"""
CONTRAST = """(() => {
  const parse = (colour) => (colour.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    const [r, g, b, a = 1] = parse(getComputedStyle(node).backgroundColor);
    return a === 0 && node.parentElement ? ground(node.parentElement) : [r, g, b];
  };
  const bad = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((c) => c.nodeType === 3 && c.data.trim());
    if (!own || !node.checkVisibility()) continue;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(ground(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) bad.push(`${node.tagName}.${node.className} ${ratio.toFixed(2)}`);
  }
  return bad;
})()"""


def test_text_can_be_read_in_light_and_dark_on_any_width(page, served):
    def assert_readable() -> None:
        for width in (320, 1000):
            page.set_viewport_size({"width": width, "height": 640})
            for theme in ("light", "dark"):
                page.emulate_media(color_scheme=theme)
                assert page.evaluate(CONTRAST) == [], (width, theme)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate("document.querySelector('main').scrollWidth") <= width

    assert_readable()
    served[0].text = MARKDOWN + "x" * 300
    answered(page)
    answered(page, mode="race")
    assert_readable()
    press(page, "Settings")
    assert_readable()


def test_text_stands_where_its_reader_is(page, served):
    """At the right where it is read from there; and one who scrolled up stays there."""
    hebrew = "שלום עולם"
    served[0].text = f"{hebrew}\n\n- {hebrew}\n\n```\nx = 1\n```\n\nEnglish"
    text = answered(page, hebrew).locator(".text")
    direction = "node => getComputedStyle(node).direction"
    for place in ("p", "ul"):
        assert text.locator(place).first.evaluate(direction) == "rtl", place
    assert text.locator("code").evaluate(direction) == "ltr"
    assert text.locator("p").last.evaluate(direction) == "ltr"
    assert page.locator(".asked").evaluate(direction) == "rtl"
    page.get_by_label("Message", exact=True).fill(hebrew)
    assert page.get_by_label("Message", exact=True).evaluate(direction) == "rtl"
    press(page, "New chat")
    served[0].text, served[0].pause = "line\n\n" * 60, 0.005
    ask(page)
    page.locator(".text p").nth(30).wait_for()
    page.locator("main").evaluate("node => { node.scrollTop = 0 }")
    ended(page)
    assert page.locator("main").evaluate("node => node.scrollTop") == 0


# ---------------------------------------------------------------- markdown


DRAWN = {
    "rule": ("a\n\n---\n\nb\n\n* * *", "<p>a</p><hr><p>b</p><hr>"),
    "arithmetic": ("2*3*4 and x**2 + y**2", "<p>2*3*4 and x**2 + y**2</p>"),
    "names": ("snake_case_name a_b", "<p>snake_case_name a_b</p>"),
    "stars in Chinese": ("这是**重点**内容", "<p>这是<strong>重点</strong>内容</p>"),
    "bold italics": ("***a* b**", "<p><strong><em>a</em> b</strong></p>"),
    "struck": ("~~a~~ b", "<p><del>a</del> b</p>"),
    "escapes": (r"\*a\* \_b\_ \(x\)", r"<p>*a* _b_ \(x\)</p>"),
    "nested list": (
        "- a\n  - b\n    - c\n- d",
        "<ul><li>a<ul><li>b<ul><li>c</li></ul></li></ul></li><li>d</li></ul>",
    ),
    "list in numbers": (
        "1. a\n  - b\n2. c\n\n   d",
        "<ol><li>a<ul><li>b</li></ul></li><li>c<p>d</p></li></ol>",
    ),
    "code in a list": (
        "1. a\n   ```sh\n   ls\n     -l\n   ```\n2. b",
        "<ol><li>a<pre><code>ls\n  -l\n</code></pre></li><li>b</li></ol>",
    ),
    "loose list": ("3. a\n\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    "quote of a list": (
        "> a\n>\n> - b",
        "<blockquote><p>a</p><ul><li>b</li></ul></blockquote>",
    ),
    "table": (
        "| a | b |\n|:--|--:|\n| `x|y` | **2** |\n| 3 |",
        "<div><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody>"
        "<tr><td><code>x|y</code></td><td><strong>2</strong></td></tr>"
        "<tr><td>3</td><td></td></tr></tbody></table></div>",
    ),
    "a bar": ("a | b\nc", "<p>a | b\nc</p>"),
    "lines": ("roses\nviolets", "<p>roses\nviolets</p>"),
    "heading": ("Title\n===\ntext\n## Two ##", "<h2>Title</h2><p>text</p><h3>Two</h3>"),
    "brackets in a link": (
        "[a](https://e.com/b_(c)_d) https://e.com/x_y_z.",
        '<p><a href="https://e.com/b_(c)_d">a</a> '
        '<a href="https://e.com/x_y_z">https://e.com/x_y_z</a>.</p>',
    ),
    "picture": ("![a](https://e.com/b.png)", '<p><a href="https://e.com/b.png">a</a></p>'),
    "fences": ("~~~~\n~~~\n~~~~\na", "<pre><code>~~~\n</code></pre><p>a</p>"),
}


DRAW = """async (sources) => {
  const { render } = await import("./markdown.js");
  return sources.map((source) => {
    const node = document.createElement("div");
    let blocks = [];
    for (let end = 3; end < source.length + 3; end += 3)  // as it comes
      blocks = render(node, source.slice(0, end), [], blocks, (each) => each);
    return node.innerHTML;
  });
}"""


@pytest.mark.mend("tables, rules, lists on the page")
def test_markdown_is_drawn_as_it_is_meant(page, served):
    sources = [source for source, _ in DRAWN.values()]
    attributes = r'( (dir|class|tabindex|rel|target)="[^"]*")'
    drawn = [re.sub(attributes, "", html) for html in page.evaluate(DRAW, sources)]
    expected = {name: html for name, (_, html) in DRAWN.items()}
    assert dict(zip(DRAWN, drawn, strict=True)) == expected
    served[0].text = MARKDOWN
    text = answered(page).locator(".text")
    assert text.locator("h2").inner_text() == "Title"
    assert text.locator("strong").inner_text() == "bold"
    assert text.locator("em").inner_text() == "italics"
    assert text.locator("p code").inner_text() == "code"
    assert text.locator("a").get_attribute("href") == "https://example.com/x"
    assert text.locator("ul li").all_inner_texts() == ["one", "two"]
    assert text.locator("ol li").all_inner_texts() == ["first", "second"]
    assert text.locator("pre code").inner_text() == "def f(x):\n    return x < 3\n"
    assert text.locator("blockquote").inner_text() == "quoted"
    assert "`" not in text.inner_text() and "*" not in text.inner_text()
    served[0].text = "- one\n  - two\n\n> three\n\n|a|b|\n|-|-|\n|four|five|"
    text = answered(page).locator(".text")
    for place in ("li li", "blockquote p", "td"):
        assert text.locator(f"{place} .d").count(), place
    shown = text.inner_text()
    assert all(word in shown for word in ("one", "two", "three", "four", "five"))


ATTACK = """<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>
[x](javascript:window.hacked=1) <b>not bold</b> `<i>` [y](https://e.com/"onmouseover="window.hacked=1)"""
NASTY = {
    "quotes in quotes": "> " * 3000 + "deep",
    "lists in lists": "\n".join("  " * n + "- x" for n in range(300)),
    "open stars": "**a *b _c `d ~~e [f](g " * 800,
    "bars": "|" * 5000 + "\n" + "|-" * 2500,
}


def test_an_answer_can_neither_inject_anything_nor_end_the_page(page, served):
    served[0].text = ATTACK
    text = answered(page).locator(".text")
    assert text.locator("img, script, b, i").count() == 0
    links = [each.get_attribute("href") for each in text.locator("a").all()]
    assert links and all(link.startswith("https://") for link in links)
    assert "<b>not bold</b>" in text.inner_text()
    assert page.evaluate("window.hacked") is None
    for name, source in NASTY.items():
        with fulfilling(page, body=chunk(source) + "data: [DONE]\n\n", content_type=STREAM):
            assert answered(page).locator(".text").inner_text().strip(), name
        press(page, "New chat")  # the context is small
    served[0].text = "Fine."
    assert answered(page, "Go on").locator(".text").inner_text() == "Fine."


# ---------------------------------------------------------------- what the server says of itself


@pytest.mark.mend("a race without heads")
def test_a_server_without_drafts_offers_no_race_and_others_do(page, opened):
    page.unroute("**/v1/models")
    page.reload()
    page.get_by_text("This server runs the plain model").wait_for()
    assert not page.get_by_text("Race").first.is_visible()
    assert not page.get_by_text("The draft heads propose").is_visible()
    assert answered(page).locator(".text").inner_text() == "Hello."
    for model in ({"id": "a"}, {"id": "a", "drafts": "8 draft nodes"}):
        with opened(model=model) as other:
            assert other.get_by_text("Race").first.is_visible()


def test_what_is_learned_from_use_is_shown(page, browser):
    assert page.locator("#learning").is_hidden(), "this server does not learn"
    background = Pieces()
    rates = (2.31, 2.2, 2.58)
    background.curve = [Point(1e9 + n, n, rate, 6150 * n, True) for n, rate in enumerate(rates)]
    with running(Says(), background=background) as (url, _):
        other = browser.new_page()
        other.goto(f"{url}/")
        line = other.locator("#learning")
        line.wait_for()
        assert line.inner_text().split() == (
            ["Learning", "from", "use:", "τ", "2.31", "→", "2.58,", "12,300", "tokens"]
        )
        curve = other.get_by_role("img", name="Tokens per step, from 2.31 to 2.58")
        points = curve.locator("polyline").get_attribute("points").split()
        places = [tuple(map(float, point.split(","))) for point in points]
        assert [x for x, _ in places] == [0, 50, 100]
        assert (places[1][1], places[2][1]) == (20, 0) and 0 < places[0][1] < 20
        other.close()

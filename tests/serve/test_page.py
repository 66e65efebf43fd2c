"""The chat page in a real browser, on a real model."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from browser import PROGRAM, Page
from serving import Server

ATTACK = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>'


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if PROGRAM is None:
        pytest.skip("no Chromium is installed")
    page = Page(tmp_path_factory.mktemp("browser"))
    yield page
    page.close()


@pytest.fixture
def page(browser: Page, server: Server) -> Page:
    browser.requests.clear()
    browser.messages.clear()
    browser.open(server.url + "/")
    browser.evaluate("sessionStorage.clear()")
    browser.open(server.url + "/")
    browser.wait("document.getElementById('model').textContent == 'demo'")
    return browser


def more_fields(page: Page, fields: str) -> None:
    """Adds fields to what the page sends."""
    page.evaluate(
        "window.sent = window.fetch; window.fetch = (url, options) => window.sent(url, options?.body ? "
        f"{{...options, body: JSON.stringify({{...JSON.parse(options.body), ...{fields}}})}} : options); 0"
    )


def ask(page: Page, text: str) -> None:
    page.evaluate(f"ask.value = {json.dumps(text)}; document.getElementById('form').requestSubmit()")


def answer(page: Page) -> str:
    """The last answer, once it has ended."""
    page.wait("send.textContent == 'Send'")
    return str(page.evaluate("[...document.querySelectorAll('.assistant > .text')].at(-1).textContent"))


def note(page: Page) -> str:
    return str(page.evaluate("[...document.querySelectorAll('.turn .note')].at(-1).textContent"))


def test_ask(page: Page, server: Server) -> None:
    more_fields(page, "{temperature: 0, structured_outputs: {choice: ['Paris, I think.']}}")
    ask(page, "What is the capital of France?")
    assert answer(page) == "Paris, I think."
    assert "tokens" in note(page)
    assert page.evaluate("messages.map(each => each.role)") == ["user", "assistant"]
    assert page.messages == []
    assert any("/v1/chat/completions" in url for url in page.requests)
    assert all(url.startswith((server.url, "data:")) for url in page.requests), page.requests


def test_stop(page: Page, server: Server) -> None:
    more_fields(page, "{ignore_eos: true, max_tokens: 1500}")
    ask(page, "Once upon a time")
    page.wait("document.querySelector('.assistant .text').textContent || document.querySelector('details')")
    assert page.evaluate("send.textContent") == "Stop"
    page.evaluate("send.click()")
    answer(page)
    assert "stopped" in note(page)


def test_what_a_model_writes_stays_text(page: Page) -> None:
    more_fields(page, f"{{structured_outputs: {{choice: [{json.dumps(ATTACK)}]}}}}")
    ask(page, ATTACK)
    assert answer(page) == ATTACK
    assert page.evaluate("document.querySelector('.user .text').textContent") == ATTACK
    assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0
    assert page.evaluate("window.hit === undefined")


def test_reasoning_is_folded(page: Page) -> None:
    event = {"choices": [{"delta": {"reasoning_content": "Hm <b>"}}]}
    page.evaluate(f"const made = new Answer(); made.take({json.dumps(event)}); made.draw()")
    assert page.evaluate("document.querySelector('details').open") is False
    assert page.evaluate("document.querySelector('details .text').textContent") == "Hm <b>"


def test_settings(page: Page) -> None:
    page.evaluate("document.getElementById('open').click(); document.getElementById('system').value = 'Be brief.'")
    page.evaluate("document.querySelector('dialog button').click()")
    assert page.evaluate("!document.getElementById('settings').open")
    assert page.evaluate("JSON.parse(body()).messages[0]") == {"role": "system", "content": "Be brief."}
    page.evaluate("document.getElementById('system').value = ''; sessionStorage.clear()")


def test_phone(page: Page, server: Server) -> None:
    page.open(server.url + "/", width=360, height=640, mobile=True)
    more_fields(page, f"{{structured_outputs: {{choice: ['{'long' * 40}']}}}}")
    ask(page, "word" * 100)
    answer(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    box = page.evaluate("(({top, bottom, left, right}) => [top, bottom, left, right])(send.getBoundingClientRect())")
    assert 0 <= box[0] < box[1] <= 640 and 0 <= box[2] < box[3] <= 360
    for is_shown in (True, False):  # the panel does not cover the button that closes it
        page.evaluate(
            "(({left, top}) => document.elementFromPoint(left + 8, top + 8).click())"
            "(document.getElementById('state').getBoundingClientRect())"
        )
        assert page.evaluate("!live.hidden") is is_shown


def test_error_is_shown(page: Page) -> None:
    more_fields(page, "{temperature: -1}")
    ask(page, "Hello")
    answer(page)
    assert "temperature" in note(page)
    assert page.evaluate("ask.value") == "Hello" and page.evaluate("messages.length") == 0, "the question is put back"
    assert page.evaluate("document.querySelectorAll('.foot button').length") == 0, "nothing to copy"


MARKDOWN = r"""# Title <b>
Some **bold**, *slanted*, ***both*** and `code`, 2*3*4.

- one
  goes on
  - inner
- two
1. first
   ```python
   if x:
       y

   # no heading
   ```
---
| a | b |
|--:|---|
| 1 \| 3 | <i>2</i> |

See [the *docs*](https://example.org/a?b=1#c), [not](javascript:hit=1).

> quoted
## Second"""


def test_markdown_becomes_elements_and_never_html(page: Page) -> None:
    page.evaluate(f"globalThis.place = element('div'); place.append(...markdown({json.dumps(MARKDOWN)}))")
    tags = page.evaluate("[...place.children].map((each) => each.tagName.toLowerCase())")
    assert tags == ["h3", "p", "ul", "div", "hr", "table", "p", "blockquote", "h4"]
    for tag, text in {
        "h3": "Title <b>", "strong": "bold", "em": "slanted", "p code": "code", "strong em": "both",
        "ul ul li": "inner", "pre": "if x:\n    y\n\n# no heading",
    }.items():  # fmt: skip
        assert page.evaluate(f"place.querySelector('{tag}').textContent") == text
    assert page.evaluate("place.querySelector('p').textContent").endswith(", both and code, 2*3*4.")
    assert page.evaluate("place.querySelector('li').firstChild.textContent") == "one goes on"
    for cells, texts in (("td", ["1 | 3", "<i>2</i>"]), (".number", ["a", "1 | 3"])):
        assert page.evaluate(f"[...place.querySelectorAll('{cells}')].map((each) => each.textContent)") == texts
    links = page.evaluate("[...place.querySelectorAll('a')].map((each) => [each.textContent, each.href, each.rel])")
    assert links == [["the *docs*", "https://example.org/a?b=1#c", "noopener noreferrer"]]
    assert page.evaluate("[...place.querySelectorAll('p')].at(-1).textContent").endswith("[not](javascript:hit=1).")
    assert page.evaluate("place.querySelector('.code div').firstChild.textContent") == "python"
    assert page.evaluate("place.querySelectorAll('b, i').length") == 0


def test_no_text_becomes_another_element_or_attribute(page: Page) -> None:
    """Random texts of what Markdown and HTML are made of."""
    found = page.evaluate("""(() => {
      const bits = ["<img src=x onerror=hit=1>", "<script>hit=1</" + "script>", "[a](javascript:hit=1)", "![a](x)",
        "[a](https://x.y/", "https://",
        "&lt;", ..."`|```|~~~|**|*|- |  - |1) |# |> |a |---|\\u0000|\\ud800|\\\\|\\"|\\n".split("|"), "|", "|---|"];
      const tags = "H3 H4 H5 H6 P UL OL LI STRONG EM CODE PRE TABLE TR TD TH DIV BUTTON BLOCKQUOTE HR A".split(" ");
      const wrong = [];
      let seed = 1;
      const random = (n) => (seed = (seed * 1103515245 + 12345) & 0x7fffffff) % n;
      for (let k = 0; k < 3000; k++) {
        const text = Array.from({ length: 1 + random(25) }, () => bits[random(bits.length)]).join("");
        const place = element("div");
        place.append(...markdown(text));
        for (const each of place.querySelectorAll("*")) {
          const names = [...each.attributes].map(({ name }) => name);
          const areKnown = names.every((name) => /^(class|type|start|href|target|rel)$/.test(name));
          const isKnown = tags.includes(each.tagName) && areKnown;
          const isSafe = each.tagName !== "A" || /^https?:/.test(each.protocol);
          if (!isKnown || !isSafe) wrong.push(text);
        }
      }
      return wrong;
    })()""")
    assert found == [] and page.evaluate("typeof hit") == "undefined"


def copied_by(page: Page, button: str) -> str:
    """Text that a button copies where the browser lends no clipboard, as at http://192.168.0.2:8000."""
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined, configurable: true}); 0")
    page.evaluate("document.addEventListener('copy', () => { globalThis.copied = String(getSelection()); })")
    page.send("Runtime.evaluate", expression=f"document.querySelector('{button}').click()", userGesture=True)
    return str(page.evaluate("globalThis.copied"))


def test_code_is_copied(page: Page) -> None:
    page.evaluate("log.append(...markdown('```\\nx = 1\\n```'))")
    assert copied_by(page, ".code button") == "x = 1"


def test_keys(page: Page) -> None:
    """Named by their place: Option and N write another letter on a Mac."""
    is_hidden = page.evaluate("live.hidden")
    page.evaluate("messages.push({role: 'user', content: 'x'})")
    for code in ("KeyN", "KeyL"):
        page.evaluate(f"dispatchEvent(new KeyboardEvent('keydown', {{altKey: true, code: '{code}', key: 'Dead'}}))")
    assert page.evaluate("messages.length") == 0 and page.evaluate("live.hidden") is not is_hidden


def test_a_chat_survives_a_reload(page: Page, server: Server) -> None:
    more_fields(page, "{structured_outputs: {choice: ['It is **Rome**.']}}")
    ask(page, "Italy?")
    assert answer(page) == "It is Rome."
    page.open(server.url + "/")
    page.wait("document.querySelector('.assistant strong') !== null")
    assert page.evaluate("messages.map((each) => each.content)") == ["Italy?", "It is **Rome**."]
    page.evaluate("document.getElementById('new').click()")
    page.open(server.url + "/")
    assert page.evaluate("messages.length") == 0


def test_an_answer_is_copied_and_asked_for_again(page: Page) -> None:
    more_fields(page, "{structured_outputs: {choice: ['One.']}}")
    for text in ("First?", "Second?"):
        ask(page, text)
        answer(page)
    shown = "[...document.querySelectorAll('.foot .retry')].map((each) => each.offsetParent !== null)"
    assert page.evaluate(shown) == [False, True], "only the last answer can be asked for again"
    assert copied_by(page, ".turn:last-child .foot button") == "One."
    page.evaluate("document.querySelector('.turn:last-child .retry').click()")
    assert answer(page) == "One."
    assert page.evaluate("messages.map((each) => each.content)") == ["First?", "One.", "Second?", "One."]
    assert sum("/v1/chat/completions" in url for url in page.requests) == 3


def test_an_example_is_a_question_and_a_new_chat_shows_them_again(page: Page) -> None:
    more_fields(page, "{structured_outputs: {choice: ['Yes.']}}")
    example = page.evaluate("empty.querySelector('button').textContent")
    page.evaluate("empty.querySelector('button').click()")
    assert answer(page) == "Yes." and page.evaluate("messages[0].content") == example
    assert page.evaluate("empty.isConnected") is False
    page.evaluate("document.getElementById('new').click()")
    assert page.evaluate("empty.isConnected && log.children.length == 1")


def test_live_state(page: Page) -> None:
    if page.evaluate("live.hidden"):
        page.evaluate("document.getElementById('state').click()")
    more_fields(page, "{ignore_eos: true, max_tokens: 40}")
    ask(page, "Count")
    answer(page)
    page.wait("shown.first.children.length > 0 && parseInt(shown.finished.textContent) >= 1")
    page.wait("shown.output.textContent !== '–' && shown.path.getAttribute('d')")
    page.wait("shown.running.textContent === '0' && shown.kv.textContent.endsWith('%')")
    page.evaluate("document.getElementById('state').click()")
    assert page.evaluate("live.hidden && getComputedStyle(live).display === 'none'")


def test_headers_and_file(client: httpx.Client) -> None:
    response = client.get("/")
    policy = response.headers["content-security-policy"]
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "http://" not in response.text and "https://" not in response.text
    assert ".innerHTML" not in response.text and "document.write" not in response.text


def test_no_ui(tmp_path: Path) -> None:
    with Server(tmp_path, "--no-ui") as server:
        assert httpx.get(server.url + "/").status_code == 404

# SPDX-License-Identifier: Apache-2.0
"""Uses the page at /ui in a browser: chat, completion, tools, token tooltip, a killed worker.

usage: ui_browser.py BROWSER URL RUNTIME-DIR TOOLS PICTURES-FOLDER
"""
import json
import os
import pathlib
import signal
import sys

from playwright.sync_api import TimeoutError, expect, sync_playwright

browser_path, url, runtime_dir, tools, folder = sys.argv[1:]
# As in tests/ui.rs.
STREAMS = 4
# On a machine with too much work, the page may miss the second until a worker is back.
KILLS_MAX = 8
problems = []


def watch(page):
    """Collects what a page must not do."""
    page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", check_request)


def check_request(request):
    if not request.url.startswith((url + "/", "data:")):
        problems.append(f"a request to {request.url}")


def picture(page, name):
    page.screenshot(path=f"{folder}/{name}.png", full_page=True)


def go_on(route):
    """The demo model may end its answer at once."""
    body = route.request.post_data_json | {"seed": 4, "ignore_eos": True}
    route.continue_(post_data=json.dumps(body))


def open_page(browser, path="", **options):
    page = browser.new_context(**options).new_page()
    watch(page)
    page.route("**/v1/completions", go_on)
    page.goto(f"{url}/ui{path}")
    return page


def send(page, text):
    page.fill("#input", text)
    page.press("#input", "Enter")
    answer = page.locator(".message.assistant").last
    expect(answer.locator(".end")).to_contain_text("tokens", timeout=60_000)
    return answer


def chat(page):
    expect(page.locator("#model option")).to_have_count(1)
    page.fill("#max-tokens", "60")
    answer = send(page, "def fibonacci(n):")
    expect(answer.locator(".end")).to_contain_text("prompt tokens")
    page.select_option("#mode", "completion")
    answer = send(page, "def fibonacci(n):\n    if n < 2:\n")
    tokens = answer.locator(".token")
    assert tokens.count() > 10, tokens.count()
    tokens.nth(3).hover()
    rows = page.locator("#tooltip tr")
    assert rows.count() >= 5, rows.count()
    expect(page.locator("#tooltip tr.chosen")).to_have_count(1)


def stop(page):
    page.fill("#max-tokens", "4000")
    page.fill("#input", "import os\n")
    page.press("#input", "Shift+Enter")
    assert page.input_value("#input") == "import os\n\n"
    page.press("#input", "Enter")
    expect(page.locator(".message.assistant").last.locator(".token").nth(20)).to_be_attached()
    page.keyboard.press("Escape")
    last = page.locator(".message.assistant").last
    expect(last.locator(".end")).to_contain_text("stopped")
    assert len(last.locator(".tokens").inner_text()) > 20


def call_tool(page):
    """The demo model chooses no tool of its own will, and thinks for ever."""
    def require(route):
        body = route.request.post_data_json | {"seed": 4, "reasoning_effort": "none"}
        route.continue_(post_data=json.dumps(body))

    page.click("#clear")
    page.route("**/v1/chat/completions", require)
    page.select_option("#mode", "chat")
    page.fill("#max-tokens", "300")
    page.click("#chat-settings summary")
    page.fill("#tools", tools)
    page.select_option("#tool-choice", "required")
    answer = send(page, "Where is main?")
    block = answer.locator(".tool-call").first
    assert block.locator(".name").inner_text() in ("find_symbol", "read_line")
    json.loads(block.locator("pre").inner_text())
    block.locator("textarea").fill("line 3")
    page.select_option("#tool-choice", "auto")
    answer.locator("button").click()
    expect(page.locator(".message.assistant")).to_have_count(2)
    last = page.locator(".message.assistant").last
    expect(last.locator(".end")).to_contain_text("tokens", timeout=60_000)
    page.fill("#tools", "[1")
    page.fill("#input", "x")
    page.press("#input", "Enter")
    expect(page.locator("#chat-problem")).to_contain_text("not JSON")
    assert page.input_value("#input") == "x"


def watch_fleet(page):
    """Other clients of the fleet, which the test runs, have STREAMS streams while this file exists."""
    # Every request of a page with routes goes through this script's driver, which is slow then.
    page.unroute_all()
    wanted = pathlib.Path(folder, "streams-wanted")
    wanted.touch()
    try:
        kill_worker(page)
    finally:
        wanted.unlink()


def kill_worker(page):
    page.click("#tab-fleet")
    expect(page.locator(".worker .dot")).to_have_count(STREAMS, timeout=60_000)
    expect(page.locator("#ledger .bar .weights")).to_have_count(1, timeout=60_000)
    page.wait_for_timeout(4000)
    picture(page, "fleet-light")
    for kill in range(KILLS_MAX):
        record = pathlib.Path(runtime_dir, f"worker-{kill % 2}.pid")
        os.kill(int(record.read_text().split()[0]), signal.SIGKILL)
        try:
            page.wait_for_selector(".dot.moved", state="attached", timeout=10_000)
            break
        except TimeoutError:
            continue
    else:
        raise AssertionError("no stream moved in the picture")
    picture(page, "fleet-killed")
    resumed = page.locator("#figures div", has_text="Streams resumed").locator("dd")
    expect(resumed).not_to_have_text("0")
    expect(page.locator("#processes")).to_contain_text("SIGKILL", timeout=20_000)


def fits(page):
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 400, f"{width} px in a window of 400 px"


with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
    page = open_page(browser, viewport={"width": 1200, "height": 800})
    chat(page)
    picture(page, "chat-light")
    stop(page)
    call_tool(page)
    picture(page, "chat-tools")
    watch_fleet(page)
    dark = open_page(browser, viewport={"width": 1200, "height": 800}, color_scheme="dark")
    chat(dark)
    picture(dark, "chat-dark")
    dark.click("#tab-fleet")
    expect(dark.locator(".copy")).to_have_count(1)
    dark.wait_for_timeout(3000)
    picture(dark, "fleet-dark")
    narrow = open_page(browser, viewport={"width": 400, "height": 800})
    chat(narrow)
    fits(narrow)
    picture(narrow, "chat-narrow")
    narrow.click("#tab-fleet")
    expect(narrow.locator(".copy")).to_have_count(1)
    narrow.wait_for_timeout(3000)
    fits(narrow)
    picture(narrow, "fleet-narrow")
    browser.close()

assert not problems, problems

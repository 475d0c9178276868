"""The live view of a job, used as a person uses it."""

import re

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.nightly

WORK = """
import kale_dist as kd, os, time

def work(lines, pause, fail=False):
    rank = kd.context().rank
    for number in range(lines):
        kd.report(loss=1 / (number + 1) + rank / 10, accuracy=1 - 1 / (number + 2))
        print("step", number, "of rank", rank, flush=True)
        time.sleep(pause)
    if fail and rank == 1:
        raise ValueError("on purpose")

HOSTILE = [
    "<script>window.taken = 1</script><img src=x onerror='window.taken = 1'>",
    "\\x1b[31mred\\x1b[0m \\x1b]0;title\\x07 end of escapes",
    "\\u202eturned\\u2066 \\x00 \\x08",
    "&lt;b&gt; &amp; </div></pre><style>*{display:none}</style>",
    "x" * (1 << 20),
]

def hostile():
    for text in HOSTILE:
        print(text, flush=True)
    kd.report(**{"<img src=x onerror='window.taken = 1'>": 1.0, "loss": float("nan")})
    kd.report(**{"<img src=x onerror='window.taken = 1'>": 2.0, "loss": float("inf")})
    raise ValueError(HOSTILE[0])
"""


CLUSTER = """
import dataclasses
from kale_dist.wire import RankStateName
from fake_backend import FakeBackend

def on_gpus(run):
    pods = [dataclasses.replace(one, pod=f"pod-{one.rank}", node=f"gpu-node-{one.rank}") for one in run.status.replicas]
    run._status = dataclasses.replace(run.status, replicas=tuple(pods))
    for rank in range(4):
        run.event("rank", rank=rank, state=RankStateName.RUNNING)
    percent = 0
    while not run.cancelled.wait(0.1):
        percent = (percent + 1) % 100
        for rank in range(4):
            run.event("progress", rank=rank, epoch=1, epochs=9, step=1, steps=10, samples_per_s=8000.0, loss=0.25)
            run.event("usage", rank=rank, memory_bytes=3 << 30, memory_limit_bytes=8 << 30, gpu_percent=percent,
                      gpu_memory_bytes=61 << 30, gpu_memory_limit_bytes=80 << 30)

def hoard():
    held = bytearray()
    for step in range(300):
        held += bytes(16 << 20) if step < 30 else b""
        time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def notebook(open_notebook):
    made = open_notebook("live.ipynb")
    made.run(WORK)
    made.run(CLUSTER)
    yield made
    assert not made.errors


@pytest.fixture(scope="module")
def ended(notebook):
    """The view of a job that has ended, with 40 lines."""
    view = notebook.show("ended = kd.launch(work, 20, 0.02, number_of_processes=2, name='ended')\nended.wait()\nended")
    expect(view.get_by_text("40 lines", exact=True)).to_be_visible()
    return view


def lines(view):
    return view.locator(".kd-line")


def assert_in_time(box, condition):
    """The page scrolls in its next frame."""
    box.page.wait_for_function(condition, arg=box.element_handle())


@pytest.mark.newest
def test_it_shows_state_curves_ranks_and_log(ended):
    expect(ended).to_have_attribute("aria-label", "Job ended, succeeded")
    expect(ended.get_by_role("img", name=re.compile("^loss: "))).to_be_visible()
    expect(ended.get_by_role("img", name=re.compile("^accuracy: "))).to_be_visible()
    expect(ended.get_by_role("row", name=re.compile("1 .*succeeded"))).to_be_visible()
    assert lines(ended).count() == 40


def test_the_log_is_filtered_by_rank_and_searched(ended):
    ended.get_by_label("Lines of").select_option("Rank 1")
    expect(lines(ended)).to_have_count(20)
    ended.get_by_label("Search the log").fill("STEP 1")
    expect(lines(ended)).to_have_count(11)
    expect(lines(ended).last).to_have_text("[1] step 19 of rank 1")
    expect(ended.get_by_text("11 of 40 lines")).to_be_visible()
    ended.get_by_label("Search the log").fill("no such thing")
    expect(ended.get_by_text("No line matches")).to_be_visible()
    ended.get_by_label("Search the log").fill("")
    ended.get_by_label("Lines of").select_option("All ranks")
    expect(lines(ended)).to_have_count(40)


def test_what_is_shown_is_copied_and_all_is_downloaded(notebook, ended):
    ended.get_by_label("Search the log").fill("step 7 of rank 0")
    ended.get_by_role("button", name="Copy", exact=True).click()
    expect(ended.get_by_role("status")).to_have_text("The lines shown were copied")
    assert notebook.page.evaluate("navigator.clipboard.readText()") == "[0] step 7 of rank 0"
    ended.get_by_role("button", name="Copy plan").click()
    expect(ended.get_by_role("status")).to_have_text("Copied")
    assert "ended" in notebook.page.evaluate("navigator.clipboard.readText()")
    with notebook.page.expect_download() as begun:
        ended.get_by_role("button", name="Download").click()
    assert begun.value.suggested_filename == "ended.log"
    assert len(begun.value.path().read_text().splitlines()) == 40
    ended.get_by_label("Search the log").fill("")


def test_it_follows_the_log_until_the_reader_scrolls_back(notebook, ended):
    box, follow = ended.get_by_role("log"), ended.get_by_role("button", name="Follow")
    at_end = "box => box.scrollTop + box.clientHeight >= box.scrollHeight - 2"
    assert_in_time(box, at_end)
    box.hover()
    notebook.page.mouse.wheel(0, -200)
    expect(follow).to_have_attribute("aria-pressed", "false")
    assert not box.evaluate(at_end)
    follow.click()
    expect(follow).to_have_attribute("aria-pressed", "true")
    assert_in_time(box, at_end)
    box.focus()
    notebook.page.keyboard.press("Home")
    expect(ended.get_by_text("[0] step 0 of rank 0")).to_be_in_viewport()
    expect(follow).to_have_attribute("aria-pressed", "false")
    follow.press("Enter")
    assert_in_time(box, at_end)
    # Pressing into it, as to select text or to draw the scrollbar, holds it too.
    box.click()
    expect(follow).to_have_attribute("aria-pressed", "false")
    follow.click()


def test_a_failure_is_shown_and_retried(notebook):
    view = notebook.show("bad = kd.launch(work, 3, 0, True, number_of_processes=2, name='bad')\nbad.wait()\nbad")
    expect(view.get_by_text("ValueError: on purpose").first).to_be_visible()
    notebook.photograph("failed", view)
    view.get_by_role("button", name="Retry").click()
    expect(view.get_by_role("status")).to_contain_text("This is a new job: kd.attach('local://work-")
    expect(view).to_have_attribute("aria-label", re.compile("Job work-.*, failed"))
    expect(view.locator(".kd-count")).to_have_text(re.compile("^[1-9]"))


def test_the_log_is_as_high_while_a_job_runs_as_after_its_end(notebook):
    view = notebook.show("short = kd.launch(work, 1, 4, number_of_processes=1, name='short')\nshort")
    expect(view.get_by_text("1 line", exact=True)).to_be_visible()
    expect(view).to_have_attribute("data-state", "running")
    box = view.locator(".kd-lines")
    before = box.bounding_box()["height"]
    expect(view).to_have_attribute("data-state", "succeeded")
    assert box.bounding_box()["height"] == before


DEFAULT = """
import torch
model = torch.nn.Linear(3, 2)
loader = torch.utils.data.DataLoader([(torch.randn(3), number % 2) for number in range(64)], 4)
job = kd.distribute(model, loader, torch.nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), number_of_processes=2)
job.wait()
job"""


def test_the_default_call_has_a_pale_line_of_all_batches_and_a_dot_whose_number_is_the_dots(notebook):
    view = notebook.show(DEFAULT)
    chart = view.locator(".kd-chart").filter(has_text="loss")
    expect(view.locator(".kd-curves > .kd-bar .kd-legend").first).to_have_text("train, single batchestrain")
    expect(chart.locator(".kd-values")).to_have_text(notebook.value("print(f'{job.metrics[-1][\"loss\"]:#.4g}')"))
    (line,) = chart.locator('path[stroke-opacity="0.5"]').all()
    assert len(line.get_attribute("d").split("L")) == 8
    (dot,) = chart.locator('path[stroke-width="5.5"]').all()
    assert dot.get_attribute("d").startswith("M1000.0 ")
    expect(chart.locator(".kd-x")).to_have_text(["epoch 0", "1"])


def test_by_keyboard_alone_in_two_views_of_one_job(notebook):
    first = notebook.show("job = kd.launch(work, 600, 0.1, number_of_processes=2, name='twice')\njob")
    second = notebook.show("job")
    expect(second.get_by_text("[1] step 3 of rank 1")).to_be_visible()
    second.get_by_role("button", name="Cancel").focus()
    press = notebook.page.keyboard.press
    press("Enter")
    expect(second.get_by_role("button", name="No", exact=True)).to_be_focused()
    press("Escape")
    expect(second.get_by_role("button", name="Cancel")).to_be_focused()
    # Past the charts, whose smoothing appears when there is something to smooth.
    second.get_by_role("group", name="Ranks").focus()
    press("Tab")
    ranks = second.get_by_label("Lines of")
    expect(ranks).to_be_focused()
    for key, value in (("ArrowDown", "0"), ("ArrowDown", "1"), ("ArrowUp", "0"), ("ArrowUp", "")):
        press(key)
        expect(ranks).to_have_value(value)
    press("Tab")
    notebook.page.keyboard.type("step 2 of rank 1")
    expect(lines(second)).to_have_count(1)
    second.get_by_role("button", name="Cancel").focus()
    for key in ("Enter", "Shift+Tab"):
        press(key)
    expect(second.get_by_role("button", name="Yes, cancel the job")).to_be_focused()
    notebook.photograph("sure", second)
    press("Enter")
    for view in (first, second):
        expect(view).to_have_attribute("data-state", "cancelled", timeout=15_000)
    assert lines(second).count() == 1, "each view has its own search"
    assert lines(first).count() > 4


def test_the_memory_of_a_rank_is_measured_and_kept_up_to_date(notebook):
    view = notebook.show("job = kd.launch(hoard, number_of_processes=1, name='hoard')\njob")
    row = view.get_by_role("row").nth(1)
    expect(row).to_contain_text(re.compile(r"\d MiB"))
    first = int(re.search(r"(\d+) MiB", row.inner_text())[1])
    # It takes 480 MiB more, of which some may be there at the first look.
    expect(row).to_contain_text(re.compile(r"(5[5-9]|[6-9]\d)\d MiB"))
    assert first < 550
    notebook.value("job.delete()")


def test_gpus_memory_and_nodes_are_columns_that_a_narrow_page_can_reach(notebook):
    view = notebook.show(
        "job = kd.launch(time.sleep, 0, number_of_processes=4, on=FakeBackend(on_gpus), name='gpus')\njob"
    )
    row = view.get_by_role("row").nth(4)
    expect(row).to_contain_text(re.compile(r"3\.0 of 8\.0 GiB\s*\d+ %, 61\.0 of 80\.0 GiB\s*gpu-node-3"))
    assert view.get_by_role("columnheader").all_text_contents() == [
        "rank", "state", "epoch", "step", "samples/s", "loss", "memory", "GPU", "node",
    ]  # fmt: skip
    before = row.inner_text()
    expect(row).not_to_have_text(before)
    notebook.photograph("gpus", view)
    notebook.dress("JupyterLab Light", 480)
    assert notebook.fits(view)
    assert notebook.accessibility_problems(".kd-job") == ""
    table = view.get_by_role("group", name="Ranks")
    table.focus()
    for _ in range(40):
        notebook.page.keyboard.press("ArrowRight")
    expect(view.get_by_text("gpu-node-0")).to_be_in_viewport(ratio=0.9)
    notebook.photograph("gpus-narrow", view)
    notebook.dress("JupyterLab Light", 1000)
    notebook.value("job.cancel()")
    expect(view).to_have_attribute("data-state", "cancelled")


def test_nothing_that_was_printed_or_reported_becomes_markup(notebook):
    view = notebook.show("job = kd.launch(hostile, number_of_processes=1, name='hostile')\njob.wait()\njob")
    expect(lines(view).filter(has_text="[0] <script>")).to_have_count(1)
    shown = "\n".join(lines(view).all_text_contents())
    assert "red end of escapes" in shown.replace("  ", " ")
    assert "&lt;b&gt; &amp; </div></pre><style>" in shown
    assert not {"\u202e", "\u2066", "\x1b", "\x08"} & set(view.inner_text())
    assert view.evaluate("view => view.querySelectorAll('script, img, style').length") == 0
    assert notebook.page.evaluate("window.taken ?? null") is None
    assert max(map(len, lines(view).all_text_contents())) < 1000
    assert notebook.fits(view)
    notebook.photograph("hostile", view)


LOOKS = [(theme, width) for theme in ("JupyterLab Light", "JupyterLab Dark") for width in (1000, 480)]


@pytest.mark.parametrize(("theme", "width"), LOOKS)
def test_it_is_accessible_and_fits_in_every_theme_and_width(notebook, ended, theme, width):
    notebook.dress(theme, width)
    ended.scroll_into_view_if_needed()
    assert notebook.fits(ended)
    notebook.photograph(f"{theme.split()[1].lower()}-{width}", ended)
    assert notebook.accessibility_problems(".kd-job") == ""


def test_a_page_that_nobody_sees_is_sent_nothing(notebook):
    page, sent = notebook.page, []
    view = notebook.show("job = kd.launch(work, 3000, 0.3, number_of_processes=2, name='unseen')\njob")
    expect(lines(view).first).to_be_visible()
    client = page.context.new_cdp_session(page)
    client.send("Network.enable")
    # Until three seconds after it has loaded the widget the page reports that it has, and the kernel answers.
    page.wait_for_timeout(3500)
    client.on("Network.webSocketFrameReceived", lambda event: sent.append(event["response"]["payloadData"]))
    page.evaluate(
        """() => {
            Object.defineProperty(document, 'visibilityState', {value: 'hidden', configurable: true});
            document.dispatchEvent(new Event('visibilitychange'));
        }"""
    )
    # The kernel hears of it, on a busy machine, a little later.
    for _ in range(10):
        sent.clear()
        page.wait_for_timeout(700)
        if not sent:
            break
    page.wait_for_timeout(1500)
    assert sent == []
    before = lines(view).count()
    page.evaluate("() => { delete document.visibilityState; document.dispatchEvent(new Event('visibilitychange')); }")
    expect(lines(view).nth(before + 20)).to_be_attached()
    shown = [text for text in lines(view).all_text_contents() if text.startswith("[0]")]
    assert shown == [f"[0] step {number} of rank 0" for number in range(len(shown))]
    notebook.value("job.delete()")

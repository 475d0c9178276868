"""The live view of a job, used as a person uses it, in one go. What else it can do is tested in the nightly tests."""

import re

import jupyter_lab
from playwright.sync_api import expect

WORK = """
import kale_dist as kd, time

def work(lines, fail=False):
    rank = kd.context().rank
    for number in range(lines):
        kd.report(loss=1 / (number + 1) + rank / 10, steps_left=lines - number)
        print("step", number, "of rank", rank, flush=True)
        time.sleep(0.05)
    if fail and rank == 1:
        raise ValueError("<img src=x onerror='window.taken = 1'>")
"""

CONTRAST = """line => {
    const channels = (colour) => {
        const context = new OffscreenCanvas(1, 1).getContext('2d');
        for (const one of [].concat(colour)) { context.fillStyle = one; context.fillRect(0, 0, 1, 1); }
        return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const light = (rgb) => rgb.map((one) => one / 255)
        .map((one) => one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
        .reduce((sum, one, index) => sum + one * [0.2126, 0.7152, 0.0722][index], 0);
    const behind = [];
    for (let one = line; one; one = one.parentElement) behind.unshift(getComputedStyle(one).backgroundColor);
    const [back, text] = [light(channels(behind)), light(channels([...behind, getComputedStyle(line).color]))];
    return (Math.max(back, text) + 0.05) / (Math.min(back, text) + 0.05);
}"""


def test_a_job_is_followed_searched_cancelled_retried_and_outlived(open_notebook):
    notebook = open_notebook("widget.ipynb", cells=[WORK, "job = kd.launch(work, 6000, number_of_processes=2)\njob"])
    page = notebook.page
    notebook.run_cell(0)
    view = notebook.run_cell(1).locator(".kd-job")
    view.wait_for(timeout=90_000)
    view.scroll_into_view_if_needed()
    # A cell that waits does not keep the view from hearing of clicks.
    waiting = notebook.start("job.wait()")
    cancel, yes = (view.get_by_role("button", name=name) for name in ("Cancel", "Yes, cancel the job"))
    lines, said = view.locator(".kd-line"), view.get_by_role("status")
    # The first job of a machine that is busy waits for torch to be imported.
    expect(view.get_by_text("[1] step 12 of rank 1")).to_be_attached(timeout=90_000)

    # The curves have numbers at their axes, one legend, and one pointer, at which they show their values.
    curves = view.locator(":scope > .kd-curves")
    charts = curves.locator(".kd-chart")
    expect(charts).to_have_count(2)
    expect(charts.first.locator(".kd-y").first).to_have_text(re.compile(r"^\d\.\d$"))
    expect(curves.locator(".kd-legend")).to_have_text("rank 0rank 1")
    charts.first.locator(".kd-frame").hover(position={"x": 60, "y": 40})
    for chart in charts.all():
        expect(chart.locator(".kd-here")).to_have_text(re.compile(r"^report \d+$"))
        expect(chart.locator(".kd-values")).to_have_text(re.compile(r"^[\d.,]+$"))
    notebook.photograph("widget-running")
    expect(view.get_by_text("You may close this page: the job goes on")).to_be_visible()
    view.get_by_label("Search the log").hover()
    expect(view.locator(".kd-here")).to_have_count(0)
    # A logarithmic axis has 1, 2, 5 and so on; a smooth line has its own behind it.
    curves.get_by_role("button", name="Log scale").click()
    expect(charts.first.locator(".kd-y").last).to_have_text(re.compile(r"^(0\.0*)?[125]0*$"))
    curves.get_by_label("Smoothing").fill("0.8")
    expect(charts.first.locator('path[stroke-opacity="0.25"]')).to_have_count(2)
    curves.get_by_label("Smoothing").fill("0")
    curves.get_by_role("button", name="Log scale").click()
    # A chart can be as wide as the card.
    before = charts.first.bounding_box()
    curves.get_by_role("button", name="Enlarge: loss").click()
    after = charts.first.bounding_box()
    assert after["width"] > 1.8 * before["width"]
    assert after["height"] > 2 * before["height"]
    notebook.photograph("widget-enlarged", view)
    curves.get_by_role("button", name="Make smaller: loss").click()
    # What reports came when.
    view.get_by_label("Search the log").hover()
    axis = curves.locator(":scope > .kd-bar").get_by_label("Horizontal axis")
    expect(axis).to_have_value("report")
    axis.select_option("by minute")
    expect(charts.first.locator(".kd-x").first).to_have_text(re.compile(r"^minute 0:\d\d(\.\d)?$"))
    axis.select_option("by report")
    expect(charts.first.locator(".kd-x").first).to_have_text(re.compile(r"^report 1$"))

    # What ranks use is folded, and stays open.
    use = view.locator(".kd-history")
    expect(use.locator(".kd-grid-of-charts")).to_be_hidden()
    use.get_by_text("Memory, GPUs and waiting").click()
    expect(use.locator(".kd-chart-name").first).to_have_text("memory, GiB")
    expect(use.locator(".kd-chart").first.locator(".kd-x").first).to_have_text("minute 0:00")
    before = use.locator(".kd-x.kd-last").first.text_content()
    expect(use.locator(".kd-x.kd-last").first).not_to_have_text(before)
    expect(use.locator(".kd-grid-of-charts")).to_be_visible()
    notebook.photograph("widget-use", use)

    # What is searched for is marked.
    view.get_by_label("Lines of").select_option("Rank 1")
    view.get_by_label("Search the log").fill("STEP 1")
    expect(lines.first).to_have_text(re.compile(r"^\[1\] step 1\d* of rank 1"))
    expect(lines.locator("mark").first).to_have_text("step 1")
    view.get_by_label("Search the log").fill("")
    view.get_by_label("Lines of").select_option("All ranks")

    # A double click asks, and no more.
    cancel.dblclick()
    expect(yes).to_be_visible()
    notebook.photograph("widget-sure", view)
    view.get_by_role("button", name="No", exact=True).click()
    expect(yes).to_be_hidden()
    expect(view).to_have_attribute("data-state", "running")
    cancel.click()
    yes.click()
    expect(view).to_have_attribute("data-state", "cancelled")
    expect(waiting).to_contain_text("cancelled")
    expect(said).to_have_text("")
    expect(cancel).to_be_hidden()
    view.get_by_role("button", name="Retry").click()
    expect(said).to_contain_text("This is a new job: kd.attach('local://work-")
    expect(view).to_have_attribute("data-state", "running")
    expect(view.get_by_text("[0] step 0 of rank 0")).to_be_attached()
    notebook.wait_idle()

    # What a job says never becomes markup; the error is that of its own rank; every theme and width is readable.
    bad = notebook.show("bad = kd.launch(work, 12, True, number_of_processes=2, name='bad')\nbad.wait()\nbad")
    expect(bad.locator(".kd-error")).to_have_text(
        re.compile(r"^Rank 1 in Cell In\[\d+\]:10 in work\s+raise ValueError.*ValueError: <img src=x", re.DOTALL)
    )
    assert page.evaluate("window.taken ?? null") is None
    for theme, width in (("JupyterLab Light", 1000), ("JupyterLab Dark", 480)):
        notebook.dress(theme, width)
        bad.scroll_into_view_if_needed()
        assert notebook.fits(bad)
        assert notebook.accessibility_problems(".kd-job") == ""
        assert min(one.evaluate(CONTRAST) for one in bad.locator(".kd-who").all()) >= 4.5
        notebook.photograph(f"widget-{theme.split()[1].lower()}-{width}", bad)
    # A table that is cut goes on into the edge that fades, until it is scrolled to its end.
    ranks = bad.locator('[aria-label="Ranks"]')
    beside = "table => table.getBoundingClientRect().right - table.firstChild.getBoundingClientRect().right"
    bad.evaluate("card => { card.style.width = '200px'; }")
    assert ranks.evaluate(beside) < 0
    notebook.photograph("widget-cut", bad)
    ranks.evaluate("table => { table.scrollLeft = table.scrollWidth; }")
    assert ranks.evaluate(beside) >= 15
    bad.evaluate("card => { card.style.width = ''; }")
    notebook.dress("JupyterLab Light", 1000)
    view.scroll_into_view_if_needed()
    page.wait_for_timeout(2500)

    # Without its kernel the view is a picture, which does not look as if the job ran.
    page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    picture = notebook.cell(1).get_by_role("group", name=re.compile("^Job work-"))
    expect(picture.get_by_text("was running")).to_be_visible()
    expect(picture).to_contain_text("As it was when it was last drawn. kd.attach(")
    expect(notebook.cell(1).get_by_role("button")).to_have_count(0)
    picture.scroll_into_view_if_needed()
    notebook.photograph("widget-restarted", picture)
    assert not notebook.errors


def test_a_page_without_anywidget_shows_a_picture_that_goes_on(server, browser):
    context = browser.new_context(viewport={"width": 1000, "height": 900})
    context.route("**/extensions/anywidget/**", lambda route: route.abort())
    cells = [WORK, "job = kd.launch(work, 6000, number_of_processes=2)\njob", "job.wait()"]
    notebook = jupyter_lab.Notebook(server, context, "no-anywidget.ipynb", jupyter_lab.new_notebook(cells))
    for index in range(3):
        notebook.run_cell(index)
    picture = notebook.cell(1).get_by_role("group", name=re.compile("^Job work-"))
    expect(picture).to_contain_text("anywidget", timeout=90_000)
    expect(picture).to_contain_text("running", timeout=90_000)
    # Not of the picture alone: it may be replaced at this moment.
    notebook.photograph("widget-no-anywidget")
    expect(picture).to_contain_text(re.compile("step [1-9][0-9]+ of rank 1"), timeout=90_000)
    notebook.command("notebook:interrupt-kernel")
    notebook.wait_idle()
    notebook.value("job.cancel()")
    expect(picture).to_contain_text("cancelled")
    # What the page lacks is still said: the curves of a short job are looked at when it has ended.
    expect(picture).to_contain_text("anywidget")
    notebook.close()
    context.close()

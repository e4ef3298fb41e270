"""Pages in a browser, at the widths of a desk and of a phone: drawn, usable, and nothing in them runs but their own."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, browser, find_browser
from made_run import write_run

from rlsdk.views.report import write_comparison, write_report
from rlsdk.views.report.live import LivePage, LiveServer

WIDTHS = pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)], ids=["desk", "phone"])
pytestmark = pytest.mark.skipif(find_browser() is None, reason="no Chromium on PATH")


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = write_run(tmp_path_factory.mktemp("runs") / "grpo <b>1</b>")
    return write_report(run)[0].as_uri()


def shown(tab: Browser, url: str, width: int = 1280, height: int = 900) -> Browser:
    tab.size(width, height, mobile=width < 600)
    tab.open(url)
    tab.wait("Number(document.documentElement.dataset.charts) > 0")
    return tab


def set_value(name: str, value: str, event: str) -> str:
    return (
        f"(() => {{ const e = document.getElementById('{name}'); e.value = '{value}';"
        f"e.dispatchEvent(new Event('{event}')) }})()"
    )


@WIDTHS
def test_a_page_fits_its_window_and_draws_every_chart(tab: Browser, page: str, width: int, height: int) -> None:
    shown(tab, page, width, height)
    assert tab.run("document.documentElement.scrollWidth") == width
    for at in range(12):  # what is not near the window is not drawn yet
        tab.run(f"document.querySelector('[data-chart=\"{at}\"]').scrollIntoView()")
        tab.wait(f"document.querySelector('[data-chart=\"{at}\"] canvas') !== null")
    drawn = tab.run(
        "[...document.querySelectorAll('[data-chart] canvas')].map((c) => new Set(new Uint32Array("
        "c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size > 4)"
    )
    assert len(drawn) >= 12
    assert all(drawn)
    assert tab.run("document.documentElement.scrollWidth") == width


def test_labels_of_a_comparison_are_not_cut_within_words_on_a_phone(tab: Browser, tmp_path: Path) -> None:
    """`accurac/y`: a column of values left no room for the labels."""
    runs = [write_run(tmp_path / f"a_run_with_a_long_name_{at}", seed=at) for at in range(2)]
    shown(tab, write_comparison(runs, tmp_path / "page.html").as_uri(), 390, 844)
    labels = "[...document.querySelectorAll('.scroll tbody th')].map((label) => label.clientWidth)"
    assert min(tab.run(labels)) >= 95
    assert tab.run("document.documentElement.scrollWidth") == 390


@WIDTHS
def test_labels_of_controls_are_whole_words(tab: Browser, page: str, width: int, height: int) -> None:
    """`colo/urs`: a list of long choices beside it took the room."""
    shown(tab, page, width, height)
    lines = (
        "[...document.querySelectorAll('.bar label')].map((label) => { const text = document.createRange();"
        "text.selectNodeContents(label.firstChild); return [label.innerText, text.getClientRects().length] })"
    )
    found = tab.run(lines)
    assert found
    assert [text for text, count in found if count > 1] == []


@WIDTHS
def test_nothing_that_a_model_wrote_is_run_and_nothing_is_asked_for(
    tab: Browser, page: str, width: int, height: int
) -> None:
    shown(tab, page, width, height)
    assert tab.run("typeof window.ran") == "undefined"
    assert (
        tab.run("document.querySelectorAll('#main script, #main img, #main a, #main style, #main [onload]').length")
        == 0
    )
    assert tab.run("document.querySelectorAll('#main svg').length") == 1  # the pools over time
    assert tab.run("document.documentElement.dataset.problems ?? ''") == ""
    assert tab.complaints == []
    assert [url for url in tab.requests if not url.startswith(page)] == []
    assert "<script>window.ran = 1</script>" in tab.run("document.querySelector('.prompt').textContent")


def test_what_is_put_into_a_page_by_any_way_is_stopped_by_its_policy(tab: Browser, page: str) -> None:
    """Were the escaping ever wrong, the policy of the page still stands."""
    shown(tab, page)
    tab.run(
        "(() => { const e = document.createElement('div'); document.body.append(e);"
        """e.innerHTML = '<img src=x onerror="window.ran = 5"><iframe srcdoc="<script>top.ran=6</script>"></iframe>';"""
        "const s = document.createElement('script'); s.textContent = 'window.ran = 7'; document.body.append(s); })()"
    )
    tab.wait("(document.documentElement.dataset.problems ?? '').includes('script-src')")
    assert tab.run("typeof window.ran") == "undefined"


def test_pointing_at_a_curve_shows_the_values_of_that_step(tab: Browser, page: str) -> None:
    shown(tab, page)
    legend = "document.querySelector('[data-chart=\"0\"] .u-legend').textContent"
    before = tab.run(legend)
    assert before.startswith("step60")  # the last one, as long as nobody points
    at = tab.run(
        "(() => { const r = document.querySelector('[data-chart=\"0\"] .u-over').getBoundingClientRect();"
        "return [r.x + r.width * 0.4, r.y + r.height / 2] })()"
    )
    tab.point(*at)
    tab.wait(f"!{legend}.startsWith('step60')")
    step = tab.run("document.querySelector('[data-chart=\"0\"] .u-value').textContent")
    assert 20 <= int(step) <= 28
    other = tab.run("document.querySelector('[data-chart=\"1\"] .u-value').textContent")
    assert other == step  # all charts follow


def test_a_page_is_read_by_keys_alone(tab: Browser, page: str) -> None:
    shown(tab, page)
    values = "[...document.querySelectorAll('[data-chart=\"0\"] .u-value')].map((e) => e.textContent)"
    newest = tab.run(values)
    tab.run("document.querySelector('[data-chart=\"0\"]').focus()")
    assert "arrow keys" in tab.run("document.activeElement.getAttribute('aria-label')")
    seen = []
    for key in ("Home", "ArrowRight", "ArrowRight", "ArrowLeft", "End", "Escape"):
        tab.press(key)
        tab.wait("new Promise((done) => requestAnimationFrame(() => done(true)))")
        seen.append(tab.run(values))
    assert seen[1] == seen[3] != seen[2]
    assert len({tuple(one) for one in seen[:3]}) == 3
    assert seen[5] == newest, "away from the curve it shows the newest values again"
    reached = set[str]()
    for _ in range(60):
        tab.press("Tab")
        reached.add(
            tab.run("document.activeElement.id || document.activeElement.className || document.activeElement.tagName")
        )
    assert {"text", "SUMMARY"} <= reached, reached
    tab.run("document.querySelector('.sample .text:has(.t)').focus()")
    tab.press("ArrowRight")
    first = tab.run("document.querySelector('.t.on').title")
    tab.press("ArrowRight")
    assert tab.run("document.querySelectorAll('.t.on').length") == 1
    assert tab.run("document.querySelector('.t.on').closest('.sample').querySelector('.token').textContent") != first
    assert tab.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_is_readable_in_light_and_in_the_dark(tab: Browser, page: str, scheme: str) -> None:
    """Text has the contrast of WCAG 2.2, 1.4.3: 4.5 to 1, on the page and on its boxes."""
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    try:
        shown(tab, page)
        names = ("--back", "--box", "--text", "--quiet", "--accent")
        read = "getComputedStyle(document.documentElement).getPropertyValue"
        colors = {name: luminance(tab.run(f"{read}('{name}').trim()")) for name in names}
        drawn = luminance(tab.run(as_hex("getComputedStyle(document.body).backgroundColor")))
    finally:
        tab.call("Emulation.setEmulatedMedia", features=[])
    assert drawn == colors["--back"]
    assert (colors["--back"] > 0.5) is (scheme == "light")
    for behind in ("--back", "--box"):
        for text in ("--text", "--quiet"):
            low, high = sorted((colors[behind], colors[text]))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (behind, text)


def as_hex(expression: str) -> str:
    """JavaScript that writes `rgb(1, 2, 3)` as `#010203`."""
    return f"'#' + {expression}.match(/\\d+/g).slice(0, 3).map((v) => Number(v).toString(16).padStart(2, '0')).join('')"


def luminance(color: str) -> float:
    """Relative luminance of `#rrggbb` (WCAG 2.2)."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_smoothing_redraws_and_leaves_evaluations_as_they_are(tab: Browser, page: str) -> None:
    shown(tab, page)
    assert tab.run("document.getElementById('smoothing-value').textContent") == "0.60"
    curves = "document.querySelectorAll('[data-chart=\"0\"] .u-series').length"
    assert tab.run(curves) == 4  # step, the raw curve, the smooth one, the evaluations
    tab.run(
        "(() => { const s = document.getElementById('smoothing'); s.value = 0; s.dispatchEvent(new Event('input')) })()"
    )
    assert tab.run(curves) == 3


def test_samples_are_filtered_and_coloured(tab: Browser, page: str) -> None:
    shown(tab, page)
    visible = "[...document.querySelectorAll('.sample')].filter((e) => e.getClientRects().length).length"
    everything = tab.run(visible)
    choose = (
        "(() => {{ const f = document.getElementById('filters').elements; f['{}'].value = '{}';"
        "f['{}'].dispatchEvent(new Event('input', {{bubbles: true}})) }})()"
    )
    tab.run(choose.format("kind", "worse", "kind"))
    worse = tab.run(visible)
    assert 0 < worse < everything
    assert tab.run(
        "[...document.querySelectorAll('.sample')].every((e) => e.hidden || Number(e.dataset.advantage) < 0)"
    )
    tab.run(choose.format("text", "nowhere to be found", "text"))
    assert tab.run(visible) == 0
    assert tab.run("document.getElementById('found').textContent") == "0 prompts"
    tab.run(choose.format("text", "", "text") + ";" + choose.format("kind", "all", "kind"))
    assert tab.run(visible) == everything
    color = "getComputedStyle(document.querySelector('.prompt .{}')).backgroundColor"
    assert tab.run(color.format("u2")) != "rgba(0, 0, 0, 0)"
    tab.run(set_value("colors", "none", "change"))
    assert tab.run(color.format("u2")) == "rgba(0, 0, 0, 0)"
    tab.run("document.querySelector('.prompt .sample .t').click()")
    assert "probability" in tab.run("document.querySelector('.prompt .sample .token').textContent")


def test_an_episode_is_a_conversation(tab: Browser, page: str) -> None:
    shown(tab, page)
    card = "document.querySelector('.episode')"
    labels = tab.run(f"[...{card}.querySelectorAll('.label, .who')].map((e) => e.textContent)")
    assert labels == [
        "row 1 of 2, 13 tokens trained", "given: 3 tokens", "policy, version 3, 4: 4 tokens, trained",
        "given: 2 tokens", "policy, version 4: 9 tokens, trained",
        "row 2 of 2, 2 tokens trained, chain 1, weight 0.5", "given: 3 tokens",
        "policy, in row 1, which trains it: 4 tokens", "policy, version 4: 2 tokens, trained",
        "19 sampled = 15 trained + 4 abandoned; ended: agent",
    ]  # fmt: skip
    tools = f"{card}.querySelector('.tools')"
    assert not tab.run(f"{tools}.open")
    tab.run(f"{tools}.querySelector('summary').click()")
    assert "<script>" in tab.run(f"{tools}.querySelector('td:last-child').textContent")
    assert tab.run(f"{card}.querySelectorAll('.turn.policy .t').length") > 0
    assert tab.run("window.ran") is None


def test_two_runs_are_drawn_over_each_other(tab: Browser, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, seed=seed, lr=lr) for name, seed, lr in (("one", 0, 1e-6), ("two", 1, 5e-6))]
    for width in (1280, 390):
        shown(tab, write_comparison(runs, tmp_path / "page.html").as_uri(), width)
        assert tab.run("document.documentElement.scrollWidth") == width
        tab.run("document.querySelectorAll('details.flat').forEach((box) => { box.open = true })")
        for at in range(16):
            tab.run(f"document.querySelector('[data-chart=\"{at}\"]').scrollIntoView()")
            tab.wait(f"document.querySelector('[data-chart=\"{at}\"] .u-legend')?.textContent.includes('two')")
        legend = tab.run("document.querySelector('[data-chart=\"0\"] .u-legend').textContent")
        assert "one" in legend
        assert "two" in legend
        assert "5e-06" in tab.run("document.getElementById('main').textContent")
        assert tab.run("document.documentElement.dataset.problems ?? ''") == ""


def test_a_run_that_ended_earlier_has_no_value_where_it_did_not_get(tab: Browser, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, steps=steps) for name, steps in (("long", 40), ("short", 10))]
    shown(tab, write_comparison(runs, tmp_path / "page.html").as_uri())
    legend = "document.querySelector('[data-chart=\"0\"] .u-legend').innerText.replace(/\\s+/g, ' ')"
    assert " at 10" in tab.run(legend).partition("short")[2]  # as long as nobody points: where its last value is
    assert " at " not in tab.run(legend).partition("short")[0]
    at = tab.run(
        "(() => { const r = document.querySelector('[data-chart=\"0\"] .u-over').getBoundingClientRect();"
        "return [r.x + r.width * 0.8, r.y + r.height / 2] })()"
    )
    tab.point(*at)
    tab.wait(f"!{legend}.includes(' at 10')")
    assert tab.run(legend).partition("short")[2].strip(" :") == "\N{EN DASH}"


def test_curves_stand_over_time_and_tokens_too(tab: Browser, page: str) -> None:
    shown(tab, page)
    step = "document.querySelector('[data-chart=\"0\"] .u-series')?.innerText.replace(/\\s+/g, ' ').trim()"
    for axis, end in (("time", r"14\.77 min"), ("tokens", r"10\.\d+M"), ("step", "60")):
        tab.run(set_value("axis", axis, "change"))
        tab.wait(f"{step}?.startsWith('{axis}')")
        assert re.fullmatch(rf"{axis} ?:? ?{end}", tab.run(step))
        assert tab.run("document.documentElement.dataset.problems ?? ''") == ""


def test_curves_are_found_by_words_and_flat_ones_are_folded(tab: Browser, page: str) -> None:
    shown(tab, page)
    visible = (
        "[...document.querySelectorAll('figure h3')].filter((e) => e.getClientRects().length).map((e) => e.innerText)"
    )
    everything = tab.run(visible)
    assert "Accuracy" in everything
    assert "time/reward_s" not in everything  # one of the others, which are closed
    tab.run(set_value("find", "entropy policy", "input"))
    assert tab.run(visible) == ["Entropy"]
    assert tab.run("document.getElementById('kept').innerText") == "1 chart"
    tab.run(set_value("find", "eval_s", "input"))  # never changes, among the others
    assert tab.run(visible) == ["time/eval_s"]
    tab.run(set_value("find", "", "input"))
    assert tab.run(visible) == everything


def test_an_axis_does_not_blow_noise_up(tab: Browser, tmp_path: Path) -> None:
    """Values between 0.500 and 0.504 filled the whole chart."""
    run = tmp_path / "calm"
    run.mkdir()
    lines = [f'{{"step": {step}, "policy/entropy": {0.5 + step % 5 / 1000}}}\n' for step in range(1, 30)]
    (run / "metrics.jsonl").write_text("".join(lines))
    shown(tab, write_report(run)[0].as_uri())
    labels = tab.run("[...document.querySelectorAll('[data-chart=\"0\"]')].length")
    assert labels == 1
    image = (
        "(() => { const c = document.querySelector('[data-chart=\"0\"] canvas'), w = c.width, h = c.height;"
        "const d = c.getContext('2d').getImageData(0, 0, w, h).data; let top = h, bottom = 0;"
        "for (let y = 0; y < h; y++) for (let x = 0; x < w; x++) { const i = 4 * (y * w + x);"
        "if (d[i + 3] > 200 && Math.abs(d[i] - 0x3b) < 30 && Math.abs(d[i + 2] - 0xc4) < 30)"
        " { top = Math.min(top, y); bottom = Math.max(bottom, y) } } return (bottom - top) / h })()"
    )
    assert 0 < tab.run(image) < 0.2


def test_a_live_page_draws_new_steps_by_itself_and_keeps_what_was_typed(tab: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=10)
    with LiveServer(LivePage(run)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            shown(tab, server.url)
            assert tab.run("document.title").startswith("run \N{MIDDLE DOT} ")
            assert tab.run("document.querySelector('h1').innerText") == "run"
            tab.wait("/ ago$/.test(document.querySelector('.state').innerText)")
            tab.run("document.getElementById('filters').elements['text'].value = 'natalia'")
            tab.run(set_value("smoothing", "0.8", "input"))
            with (run / "metrics.jsonl").open("a") as file:
                file.write('{"step": 11, "reward/mean": 0.9, "reward/accuracy": 0.9}\n')
            tab.wait("document.documentElement.dataset.updates === '1'")
            tab.wait("document.querySelector('[data-chart=\"0\"] .u-value')?.textContent === '11'")
            assert tab.run("document.getElementById('filters').elements['text'].value") == "natalia"
            assert tab.run("document.getElementById('smoothing-value').textContent") == "0.80"
            assert tab.run("document.documentElement.dataset.problems ?? ''") == ""
            assert tab.run("typeof window.ran") == "undefined"
        finally:
            server.shutdown()
            thread.join()
    tab.wait("document.body.classList.contains('lost')")

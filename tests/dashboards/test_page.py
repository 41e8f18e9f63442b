"""The page in a real browser, in front of the agent's own web application."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import expect

from tests.dashboards.charts import LAYERS, LEFT, RANKS, RIGHT, cell_centre, chart, hover, pixel, small_run
from tests.dashboards.conftest import OpenPage, Serve
from tests.dashboards.fake_run import FAULT_STEP, Run, alert, broken_run
from tests.server_programs import wait_until
from trainermon.core.values import Finding, Kind, SeriesKey

pytestmark = pytest.mark.server

LIGHT_MARK, DARK_MARK = [214, 0, 108], [255, 79, 154]


def test_200_layers_and_2000_steps_become_ready(serve: Serve, open_page: OpenPage) -> None:
    run = Run(num_steps=2000, num_blocks=49)
    assert len(run.rows) == 200

    agent = serve(run)
    page = open_page(agent)

    print(f"ready after {page.locator('html').get_attribute('data-ready')} ms")
    expect(page.locator("#run-id")).to_have_text("gpt-124m-byte")
    expect(page.locator("#state")).to_have_text("live")
    expect(page.locator(".headline")).to_have_text("Training is healthy")


def test_figures_are_those_of_the_run(serve: Serve, open_page: OpenPage) -> None:
    run = small_run()
    run.loss[-1], run.grad_norm[-1], run.step_time[-1] = 3.25, 0.5, 0.4
    run.dead = {2}

    agent = serve(run)
    page = open_page(agent)

    for name, text in [("step", "200"), ("loss", "3.250"), ("grad-norm", "0.5000"), ("step-time", "400 ms")]:
        expect(page.locator(f"#figure-{name} .number")).to_have_text(text)
    expect(page.locator("#figure-ranks .number")).to_have_text("3 / 4")
    expect(page.locator(".dots .gone")).to_have_count(1)
    expect(page.locator(".headline")).to_have_text("Rank 2 is gone")
    expect(page.locator(".path")).to_have_text("/data/runs/gpt-124m-byte")


def test_single_nonfinite_cell_is_marked_and_named(serve: Serve, open_page: OpenPage) -> None:
    run = Run(num_steps=2000, num_blocks=48)
    run.heat[101, 699] = np.inf

    agent = serve(run)
    page = open_page(agent)
    at = cell_centre(page, LAYERS, row=101, step=700, rows=len(run.rows), steps=2000)

    # A cell is half a pixel wide and a little more than one high here.
    assert pixel(page, LAYERS, at) == LIGHT_MARK
    for x, y in [(-2, 0), (2, 0), (0, -2), (0, 2)]:
        assert pixel(page, LAYERS, {"x": at["x"] + x, "y": at["y"] + y}) == LIGHT_MARK
    expect(page.locator(".origin").first).to_have_text(f"◆ not finite from step 700: {run.rows[101]}")


def test_mark_is_seen_in_the_dark_too(serve: Serve, open_page: OpenPage) -> None:
    run = small_run()
    run.heat[3, 99] = np.inf

    agent = serve(run)
    page = open_page(agent, color_scheme="dark")
    at = cell_centre(page, LAYERS, row=3, step=100, rows=len(run.rows), steps=200)

    assert pixel(page, LAYERS, at) == DARK_MARK


def test_loss_that_is_not_finite_is_a_mark_at_the_upper_edge(serve: Serve, open_page: OpenPage) -> None:
    run = small_run()
    run.loss[120:141] = np.inf

    agent = serve(run)
    page = open_page(agent)
    at = cell_centre(page, 1, row=0, step=121, rows=1, steps=200)

    assert pixel(page, 1, {"x": at["x"], "y": 1}) == LIGHT_MARK
    assert pixel(page, 1, {"x": at["x"], "y": 6}) == LIGHT_MARK
    middle, after = (cell_centre(page, 1, row=0, step=step, rows=1, steps=200)["x"] for step in (131, 143))
    assert pixel(page, 1, {"x": middle, "y": 1}) == LIGHT_MARK
    assert pixel(page, 1, {"x": after, "y": 1}) != LIGHT_MARK


def test_tooltip_tells_row_step_and_value(serve: Serve, open_page: OpenPage) -> None:
    run = small_run()
    run.heat[7, 149] = 0.0123
    run.heat[8, 149] = np.inf

    agent = serve(run)
    page = open_page(agent)
    place = {"rows": len(run.rows), "steps": 200, "step": 150}
    hover(page, LAYERS, cell_centre(page, LAYERS, row=7, **place))
    expect(page.locator(".tip")).to_have_text(re.compile(rf"^{run.rows[7]}step 150gradients, reduced, RMS: 0\.01230$"))
    hover(page, LAYERS, cell_centre(page, LAYERS, row=8, **place))
    expect(page.locator(".tip")).to_contain_text("contains NaN or Inf")


def test_slow_rank_is_told_against_its_peers(serve: Serve, open_page: OpenPage) -> None:
    run = small_run()
    run.rank_time[:, 99] = [0.4, 0.4, 0.6, 0.4]

    agent = serve(run)
    page = open_page(agent)
    hover(page, RANKS, cell_centre(page, RANKS, row=2, step=100, rows=4, steps=200))

    expect(page.locator(".tip")).to_contain_text("rank 2")
    expect(page.locator(".tip")).to_contain_text("1.50 \N{MULTIPLICATION SIGN} the median rank (400 ms)")


def test_crosshair_runs_through_all_charts(serve: Serve, open_page: OpenPage) -> None:
    run = small_run()
    run.loss[49], run.grad_norm[49] = 7.125, 1.25

    agent = serve(run)
    page = open_page(agent)
    hover(page, LAYERS, cell_centre(page, LAYERS, row=0, step=50, rows=len(run.rows), steps=200))

    expect(page.locator(".readout").nth(1)).to_have_text("7.125 at step 50")
    expect(page.locator(".readout").nth(2)).to_have_text("1.250 at step 50")


def test_dragging_zooms_every_chart_and_a_double_click_resets(serve: Serve, open_page: OpenPage) -> None:
    agent = serve(small_run())
    page = open_page(agent)
    size = chart(page, 1).bounding_box()
    assert size is not None
    begin, end = (cell_centre(page, 1, row=0, step=step, rows=1, steps=200)["x"] for step in (50, 100))
    page.mouse.move(size["x"] + begin, size["y"] + 40)
    page.mouse.down()
    page.mouse.move(size["x"] + end, size["y"] + 40, steps=3)
    page.mouse.up()

    expect(page.locator("#zoom-text")).to_have_text("steps 50 to 100")
    hover(page, LAYERS, {"x": LEFT + 1, "y": 5})
    expect(page.locator(".tip")).to_contain_text("step 50")
    chart(page, LAYERS).dblclick(position={"x": LEFT + 100, "y": 50})
    expect(page.locator("#zoom-reset")).to_be_hidden()


def test_charts_obey_the_keyboard(serve: Serve, open_page: OpenPage) -> None:
    agent = serve(small_run())
    page = open_page(agent)
    chart(page, 1).focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".readout").nth(1)).to_contain_text("at step 2")
    page.keyboard.press("End")
    page.keyboard.press("+")
    expect(page.locator("#zoom-reset")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#zoom-reset")).to_be_hidden()


def test_another_quantity_is_asked_for_and_shown(serve: Serve, open_page: OpenPage) -> None:
    agent = serve(small_run())
    page = open_page(agent)
    page.get_by_label("Quantity", exact=True).select_option("actv")
    page.get_by_label("Statistic").select_option("absmax")

    wait_until(lambda: any("kind=actv&statistic=absmax" in path for path in agent.requests), what="the request")
    hover(page, LAYERS, {"x": LEFT + 10, "y": 10})
    expect(page.locator(".tip")).to_contain_text("activations, largest magnitude")


def test_step_event_moves_header_and_charts(serve: Serve, open_page: OpenPage) -> None:
    run = small_run()

    agent = serve(run)
    page = open_page(agent)
    agent.publish("step", {**run.append(), "loss": 2.125})

    expect(page.locator("#figure-step .number")).to_have_text("201")
    expect(page.locator("#figure-loss .number")).to_have_text("2.125")
    hover(page, 1, {"x": cell_centre(page, 1, row=0, step=201, rows=1, steps=201)["x"], "y": 40})
    expect(page.locator(".readout").nth(1)).to_have_text("2.125 at step 201")


def test_value_that_was_not_recorded_is_no_fault(serve: Serve, open_page: OpenPage) -> None:
    run = small_run()
    run.loss[:] = np.nan

    agent = serve(run)
    page = open_page(agent)
    expect(page.locator("#figure-loss .number")).to_have_text("\N{EN DASH}")
    agent.publish("step", {**run.append(), "loss": None})

    expect(page.locator("#figure-step .number")).to_have_text("201")
    expect(page.locator("#figure-loss .number")).to_have_text("\N{EN DASH}")
    at = cell_centre(page, 1, row=0, step=201, rows=1, steps=201)
    assert pixel(page, 1, {"x": at["x"], "y": 1}) != LIGHT_MARK


def test_without_alerts_it_says_who_watches(serve: Serve, open_page: OpenPage) -> None:
    agent = serve(small_run())
    page = open_page(agent)

    expect(page.locator("#alerts")).to_have_text("No alerts. 9 rules are watching.")
    expect(page.locator("#dumps")).to_contain_text("No dumps.")


def test_rules_that_have_no_loss_to_look_at_are_told(serve: Serve, open_page: OpenPage) -> None:
    run = small_run()
    usual = run.describe
    run.state = "finished"
    run.describe = lambda: {**usual(), "rules_without_loss": 4}  # type: ignore[method-assign]
    page = open_page(serve(run))

    said = "5 of 9 rules are watching, 4 have no loss to look at"
    expect(page.locator("#alerts")).to_have_text(f"No alerts. {said}.")
    expect(page.locator("#health")).to_contain_text(f"{said}; none has fired.")
    expect(page.locator("#health")).to_contain_text("monitor.record(loss=loss)")


def test_run_without_steps_waits(serve: Serve, open_page: OpenPage) -> None:
    agent = serve(Run(num_steps=0, num_blocks=1, world_size=2))
    page = open_page(agent)
    expect(page.locator(".headline")).to_have_text("Waiting for the first step")
    agent.publish("step", agent.run.append())

    expect(page.locator("#figure-step .number")).to_have_text("1")
    expect(page.locator(".headline")).to_have_text("Training is healthy")


def test_heat_map_that_comes_up_later_is_shown(serve: Serve, open_page: OpenPage) -> None:
    run = Run(num_steps=0, num_blocks=1, world_size=2)
    run.kinds = []
    agent = serve(run)
    page = open_page(agent)
    agent.publish("step", run.append())
    expect(page.locator("#figure-step .number")).to_have_text("1")
    run.kinds = ["grad_reduced"]

    expect(page.get_by_label("Quantity", exact=True)).to_be_visible()
    expect(page.locator(".track .hint").nth(LAYERS)).to_contain_text("8 rows")


def test_layers_without_a_value_are_not_counted(serve: Serve, open_page: OpenPage) -> None:
    run = small_run()
    run.heat[:] = np.nan
    agent = serve(run)
    page = open_page(agent)

    expect(page.locator(".track .hint").nth(LAYERS)).to_have_text("")


def test_alert_event_appears_everywhere_and_resolves(serve: Serve, open_page: OpenPage) -> None:
    agent = serve(small_run())
    page = open_page(agent)
    fired = alert(step=150, first_step=150)
    agent.publish("alert", fired)

    expect(page.locator(".headline")).to_have_text("Not healthy since step 150 on rank 3")
    expect(page.locator("#figure-firing .number")).to_have_text("1")
    expect(page.locator("tr.alert")).to_contain_text("gradient-nonfinite")
    expect(page).to_have_title(re.compile("▲ 1"))
    size = chart(page, 0).bounding_box()
    assert size is not None
    hover(page, 0, {"x": LEFT + 149.5 / 200 * (size["width"] - LEFT - RIGHT), "y": 10})
    expect(page.locator(".tip")).to_contain_text("gradient-nonfinite, rank 3, step 150")
    agent.publish("alert", {**fired, "state": "resolved", "step": 160})
    expect(page.locator(".headline")).to_have_text("Training is healthy")


def test_alerts_of_all_ranks_share_a_row_that_unfolds(serve: Serve, open_page: OpenPage) -> None:
    agent = serve(broken_run())
    page = open_page(agent)
    row = page.locator("tr.alert", has_text="fatal")
    expect(row).to_have_count(1)
    expect(row.locator("td").nth(3)).to_have_text("0\N{EN DASH}7")
    button = row.get_by_role("button", name="+ 97 more")
    button.click()

    expect(button).to_have_attribute("aria-expanded", "true")
    expect(button).to_be_focused()
    expect(page.locator(".findings")).to_contain_text("and 97 more series")


def test_what_a_rule_has_found_again_and_again_is_one_row_that_unfolds(serve: Serve, open_page: OpenPage) -> None:
    run = Run(num_steps=200)
    over = [
        alert(id=f"s{step}", rule="straggler", severity="warning", state="resolved", first_step=step, step=step + 9)
        for step in range(10, 190, 9)
    ]
    run.alerts = [*over, alert(id="now", rule="straggler", severity="warning", first_step=195, step=199)]
    page = open_page(serve(run))
    rows = page.locator("tr.alert")

    expect(rows).to_have_count(2)
    expect(page.locator("#alerts-hint")).to_have_text("1 firing, 21 in all")
    expect(rows.nth(0)).to_contain_text("firing")
    times = rows.nth(1).get_by_role("button", name="20 times")
    times.click()
    expect(rows).to_have_count(21)
    expect(rows.nth(20)).to_contain_text("resolved at 190")
    times.click()
    expect(rows).to_have_count(2)


def test_alerts_are_counted_as_they_are_shown_and_values_say_of_what(serve: Serve, open_page: OpenPage) -> None:
    agent = serve(broken_run())
    page = open_page(agent)

    expect(page.locator("tr.alert.firing")).to_have_count(3)
    expect(page.locator("#alerts-hint")).to_have_text("3 firing, 5 in all")
    expect(page.locator("#figure-firing .number")).to_have_text("3")
    values = [row.locator("td").nth(5).text_content() for row in page.locator("tr.alert").all()]
    assert values == [
        "12 not finite",
        "12 not finite",
        "1 not finite",
        "548 ms (1.3 ×)",
        "0.01210 RMS (15 ×)",
    ]
    page.get_by_role("button", name="+ 97 more").first.click()
    expect(page.locator(".finding-table")).to_contain_text("12 not finite")


def test_step_of_an_alert_is_shown_by_a_click(serve: Serve, open_page: OpenPage) -> None:
    agent = serve(broken_run())
    page = open_page(agent)
    page.get_by_role("button", name="Show the step").click()

    expect(page.locator("#zoom-text")).to_have_text("steps 1,528 to 1,752")


@pytest.mark.parametrize(("num_steps", "shown"), [(60, "steps 30 to 50"), (21, "drag across a chart to look closer")])
def test_step_in_a_short_run_is_shown_from_near(serve: Serve, open_page: OpenPage, num_steps: int, shown: str) -> None:
    run = Run(num_steps=num_steps, num_blocks=2, world_size=2)
    step = num_steps * 2 // 3
    run.alerts = [alert(step=step, first_step=step)]
    agent = serve(run)
    page = open_page(agent)
    page.get_by_role("button", name="Show the step").click()

    expect(page.locator("#zoom-text")).to_have_text(shown)
    expect(page.locator(".readout").nth(1)).to_contain_text(f"at step {step}")
    expect(page.locator("#zoom-reset")).to_be_visible(visible=num_steps > 21)


def test_diagnosis_tells_the_way_to_the_loss(serve: Serve, open_page: OpenPage) -> None:
    agent = serve(broken_run())
    page = open_page(agent)
    expect(page.locator(".detail").first).to_have_text(agent.run.diagnoses["gradient-nonfinite-1-1640"]["headline"])
    page.get_by_role("link", name="Open the diagnosis").click()

    expect(page.locator(".report-head .headline")).to_have_text(re.compile("^h.23.mlp.fc: a weight was not finite"))
    modules = [text.strip() for text in page.locator(".node-head code").all_text_contents()]
    assert modules == ["h.23.mlp.fc", "h.23.mlp.act", "h.23.mlp.proj", "h.23", "ln_f", "head", "(loss)"]
    expect(page.locator(".chain li").first).to_contain_text("512 NaN, 512 Inf of 3.15 M elements")
    expect(page.locator(".chain .omitted")).to_have_text("143 modules left out")
    rows = page.locator(".rank-table tbody tr")
    expect(rows.nth(0)).to_contain_text("began here")
    expect(rows.nth(1).locator("td").first).to_have_text("0\N{EN DASH}2, 4\N{EN DASH}7")
    expect(page.locator(".parameter-table")).to_contain_text("1 Inf of 2.36 M elements")
    facts = page.locator(".facts-of-report")
    expect(facts).to_contain_text("Causeinherited the parameter was not finite before")
    expect(facts).to_contain_text("Run againreproducible the replay's forwards gave the same bits as the step's")
    expect(page.locator(".level-table")).to_contain_text("only its gradients were bad before the reduction")
    expect(page.locator(".contrast-table")).to_contain_text(
        re.compile("h.23.mlp.fc.weight parameters, before the step.*rms 7.500")
    )
    expect(page.locator(".settings")).to_contain_text("wg_distribution")
    report = page.get_by_role("link", name="The whole report")
    expect(report).to_have_attribute("href", f"diagnosis/gradient-nonfinite-1-1640/1/{FAULT_STEP}")
    page.get_by_role("link", name="Back to the run").click()
    expect(page.locator("#timeline")).to_be_visible()


def test_diagnosis_that_is_not_there_says_so(serve: Serve, open_page: OpenPage) -> None:
    agent = serve(small_run())
    page = open_page(agent, "#/diagnosis/nothing/1/7", may_lose=True)

    expect(page.locator("#diagnosis")).to_contain_text("there is no diagnosis of this dump (yet)")
    expect(page.locator("#diagnosis")).to_contain_text("--step 7")


def test_untrusted_text_stays_text(serve: Serve, open_page: OpenPage) -> None:
    evil = '<img src=x onerror="document.title=1">'
    run = broken_run()
    run.run_id = run.rows[0] = evil
    report = run.diagnoses["gradient-nonfinite-1-1640"]
    report["headline"] = report["module"] = report["chain"][0]["module"] = evil
    finding = Finding(series=SeriesKey(Kind.GRAD_REDUCED, evil), value=1.0, baseline=2.0)
    texts: dict[str, Any] = {"rule": evil, "message": evil, "findings": (finding,), "id": evil}
    run.alerts = [{**alert(**texts), "diagnosis": "javascript:alert(1)"}, *run.alerts]

    agent = serve(run)
    page = open_page(agent)
    expect(page.locator("#run-id")).to_have_text(evil)
    expect(page.locator("tr.alert", has_text=evil).first).to_be_visible()
    hover(page, LAYERS, {"x": LEFT + 10, "y": 1})
    expect(page.locator(".tip")).to_contain_text(evil)
    assert page.locator('a[href^="javascript"]').count() == 0
    assert page.locator("img").count() == 0
    page.goto(f"{agent.url}#/diagnosis/gradient-nonfinite-1-1640/1/{FAULT_STEP}")
    expect(page.locator(".report-head .headline")).to_have_text(evil)
    assert page.locator("img").count() == 0


def test_agent_that_went_away_is_told_and_its_return_is_noticed(serve: Serve, open_page: OpenPage) -> None:
    run = small_run()
    agent = serve(run)
    page = open_page(agent, may_lose=True)
    agent.stop()

    expect(page.locator("#banner")).to_contain_text("up to step 200")
    expect(page.locator("#state")).to_have_text("reconnecting")
    expect(page.locator(".headline")).to_have_text("The agent does not answer")
    expect(page.locator("#figure-step .number")).to_have_text("200")
    run.append()
    serve(run, port=agent.port)
    expect(page.locator("#banner")).to_be_hidden()
    expect(page.locator("#state")).to_have_text("live")
    hover(page, 1, {"x": cell_centre(page, 1, row=0, step=201, rows=1, steps=201)["x"], "y": 40})
    expect(page.locator(".readout").nth(1)).to_contain_text("at step 201")


def test_end_of_a_run_is_no_alarm(serve: Serve, open_page: OpenPage) -> None:
    run = small_run()
    agent = serve(run)
    page = open_page(agent, may_lose=True)
    run.state, run.dead = "finished", {0, 1, 2, 3}
    agent.publish("state", {"state": "finished"})
    expect(page.locator("#state")).to_have_text("finished")
    agent.stop()

    expect(page.locator("#banner")).to_contain_text("The run has finished and its agent has ended")
    expect(page.locator(".headline")).to_have_text("Finished healthy at step 200")


def test_store_that_cannot_write_is_told(serve: Serve, open_page: OpenPage) -> None:
    run = small_run()
    usual = run.describe
    run.describe = lambda: {**usual(), "problem": "no space left on device"}  # type: ignore[method-assign]

    agent = serve(run)
    page = open_page(agent)

    expect(page.locator("#banner")).to_contain_text("no space left on device")


def test_printing_repaints_in_light(serve: Serve, open_page: OpenPage) -> None:
    agent = serve(small_run())
    page = open_page(agent, color_scheme="dark")
    dark = pixel(page, 1, {"x": LEFT + 20, "y": 90})
    page.evaluate("() => dispatchEvent(new Event('beforeprint'))")

    wait_until(lambda: pixel(page, 1, {"x": LEFT + 20, "y": 90}) != dark, what="a repaint for paper")
    assert min(pixel(page, 1, {"x": LEFT + 20, "y": 90})) > 200

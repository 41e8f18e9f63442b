"""Draws every generated dashboard on a recorded run with Grafana's own panel library: `make dashboards-render`.

Pictures and a report go to `build/dashboards`. It needs npm; node_modules take 700 MB below `build`.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from tests.dashboards.conftest import CHROMIUM_FLAGS, DRAWN
from tests.dashboards.grafana.recorded_run import STEP_S, GrafanaRun
from tests.dashboards.grafana.servers import PICKED, influxdb_with, prometheus_with
from tests.server_programs import find_program
from trainermon.dashboards.grafana.files import FOLDER, DashboardFile, dashboards

BUILD = Path(__file__).parents[3] / "build"
SOURCES = Path(__file__).parent / "panels"
NUM_STEPS = int(3600 / STEP_S)
READY_MS = 600_000


def build_panels() -> Path:
    """Return the folder of the page, built anew."""
    folder = BUILD / "grafana-panels"
    shutil.copytree(SOURCES, folder, dirs_exist_ok=True)
    install = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock"]
    subprocess.run(install, cwd=folder, check=True)
    subprocess.run(["npx", "vite", "build", "--logLevel", "warn"], cwd=folder, check=True)
    return folder / "dist"


@contextlib.contextmanager
def serving(page: Path, servers: dict[str, str]) -> Iterator[str]:
    """Serve the page, the dashboards, and behind their names the servers that hold the run."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, directory=str(page), **named)

        def do_GET(self) -> None:
            name, _, rest = self.path.lstrip("/").partition("/")
            if name == "dashboards":
                self.answer(200, (FOLDER / rest).read_bytes())
            elif name in servers:
                try:
                    with urllib.request.urlopen(f"{servers[name]}/{rest}", timeout=900) as response:
                        self.answer(200, response.read())
                except urllib.error.HTTPError as error:
                    self.answer(error.code, error.read())
            else:
                super().do_GET()

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def draw(browser: Browser, address: str, file: DashboardFile, run: GrafanaRun) -> dict[str, list[str]]:
    """Write the picture of a dashboard; return what went wrong, and which panels have nothing to show."""
    query = {
        "dashboard": f"{file.source}/{file.name}",
        "from": int(run.start_s),
        "to": int(run.end_s) + 4,
        "picked": json.dumps(PICKED),
    }
    page = browser.new_page(viewport={"width": 1624, "height": 1000})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{address}/?{urllib.parse.urlencode(query)}")
    num_panels = sum(panel["type"] != "row" for panel in file.body["panels"])
    counted = "n => document.querySelectorAll('.panel-done,.panel-empty,.panel-error').length >= n"
    page.wait_for_function(counted, arg=num_panels, timeout=READY_MS)
    settled = settled_picture(page)
    picture = BUILD / "dashboards" / f"{file.source}-{Path(file.name).stem}.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_bytes(settled)
    errors += page.locator(".panel-error").all_inner_texts()
    empty = page.locator(".panel-empty").evaluate_all("found => found.map(e => e.dataset.title)")
    page.close()
    return {"errors": errors, "empty": empty}


def settled_picture(page: Page) -> bytes:
    """Return the picture of the whole page once two in a row are equal: panels draw after they have their data."""
    before = b""
    while (picture := page.screenshot(full_page=True)) != before:
        before = picture
        page.evaluate(DRAWN)
    return picture


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="names such as prometheus/overview")
    parser.add_argument("--built", action="store_true", help="take the page as it was built before")
    options = parser.parse_args()
    page = BUILD / "grafana-panels" / "dist" if options.built else build_panels()
    run = GrafanaRun(NUM_STEPS, float(int(time.time())))
    files = [*dashboards("prometheus"), *dashboards("influxdb")]
    wanted = [f for f in files if not options.only or f"{f.source}/{Path(f.name).stem}" in options.only]
    failed = False
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {}
        if any(f.source == "prometheus" for f in wanted):
            servers["prometheus"] = stack.enter_context(prometheus_with(run, folder)).url
        if any(f.source == "influxdb" for f in wanted):
            servers["influxdb"] = stack.enter_context(influxdb_with(run, folder)).server.url
        address = stack.enter_context(serving(page, servers))
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=find_program("chromium"), args=list(CHROMIUM_FLAGS))
        for file in wanted:
            found = draw(browser, address, file, run)
            failed |= bool(found["errors"])
            sys.stdout.write(f"{file.source}/{file.name}: {found}\n")
            sys.stdout.flush()
        browser.close()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

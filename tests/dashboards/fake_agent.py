"""An agent that never trained anything: serves the page and made-up data by the agent's HTTP contract.

Run it to look at the page: `python tests/dashboards/fake_agent.py` prints the address and adds a step every half second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import mimetypes
import queue
import struct
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import Response, StreamingResponse

WEB = Path(__file__).parents[2] / "dashboards" / "web"
CSP = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'"


def plain(value: Any) -> Any:
    """Write non-finite numbers as the agent does, as text."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value


def layer_names(num_blocks: int) -> list[str]:
    """Weights of a GPT in the order of its definition: 4 per block and 4 more."""
    parts = ("attn.qkv.weight", "attn.proj.weight", "mlp.fc.weight", "mlp.proj.weight")
    blocks = [f"h.{block}.{part}" for block in range(num_blocks) for part in parts]
    return ["wte.weight", "wpe.weight", *blocks, "ln_f.weight", "head.weight"]


class Run:
    """Everything the page can ask for, as plain attributes that a test changes at will."""

    def __init__(
        self, *, num_steps: int = 2000, num_blocks: int = 48, world_size: int = 8, bad_step: int | None = None
    ) -> None:
        random = np.random.default_rng(0)
        self.rows = layer_names(num_blocks)
        self.num_steps, self.bad_step = num_steps, bad_step
        self.steps = list(range(1, num_steps + 1))
        time_ = np.arange(num_steps) / 2000
        self.loss = (
            2.2 + 8.4 * np.exp(-5.2 * time_) + 0.055 * random.standard_normal(num_steps) * (1 + np.exp(-4 * time_))
        )
        self.grad_norm = (0.55 + 6 * np.exp(-9 * time_)) * np.exp(0.16 * random.standard_normal(num_steps))
        self.step_time = 0.412 + 0.012 * random.standard_normal(num_steps)
        self.heat = self._heat(random)
        self.rank_time = self.step_time[None, :] * np.exp(0.015 * random.standard_normal((world_size, num_steps)))
        self.world_size = world_size
        if num_steps > 1300 and world_size > 5:
            self.rank_time[5, 901:1240] *= 1.33
            self._spike(random, 1296)
        if bad_step is not None:
            self._break(bad_step)
        self.alerts: list[dict[str, Any]] = []
        self.dumps: list[dict[str, Any]] = []
        self.diagnoses: dict[str, dict[str, Any]] = {}
        self.state = "running"
        self.run_id = "gpt-124m-byte"
        self.dead: set[int] = set()

    def _heat(self, random: np.random.Generator) -> np.ndarray:
        depth = np.linspace(0, 1, len(self.rows))[:, None]
        time_ = np.linspace(0, 1, self.num_steps)[None, :]
        own = 0.5 * random.standard_normal((len(self.rows), 1))
        own += 0.35 * (np.arange(len(self.rows)) % 4)[:, None]
        walk = np.cumsum(random.standard_normal((len(self.rows), self.num_steps)), axis=1) * 0.004
        noise = 0.18 * random.standard_normal((len(self.rows), self.num_steps))
        return np.exp(-7.2 - 1.6 * depth + 2.6 * np.exp(-8 * time_) + own + walk + noise).astype(np.float32)

    def _spike(self, random: np.random.Generator, step: int) -> None:
        first, length = step - 1, 22
        decay = np.exp(-np.arange(length) / 6)
        self.loss[first : first + length] += 1.9 * decay
        self.grad_norm[first : first + length] *= 1 + 9 * decay
        self.heat[110:, first : first + length] *= 1 + 11 * decay[None, :]

    def _break(self, step: int) -> None:
        """From `step` on nothing is finite any more, as after an optimizer step with bad gradients."""
        column = step - 1
        self.grad_norm[column] = np.nan
        self.heat[: len(self.rows) // 2, column] = np.inf
        self.heat[:, column + 1 :] = np.inf
        self.loss[column + 1 :] = np.nan
        self.grad_norm[column + 1 :] = np.nan

    def describe(self) -> dict[str, Any]:
        """Answer of /api/run."""
        last = self.num_steps - 1
        ranks = [
            {"rank": rank, "alive": rank not in self.dead, "step": self.num_steps, "phase": "STEP", "lag_s": 0.03}
            for rank in range(self.world_size)
        ]
        return plain(
            {
                "run_id": self.run_id,
                "attempt": 1,
                "host": "node-07",
                "state": self.state,
                "step": self.steps[last] if self.steps else None,
                "started_s": 1_785_000_000.0,
                "world_size": self.world_size,
                "output": f"/data/runs/{self.run_id}",
                "ranks": ranks,
                "loss": float(self.loss[last]) if self.steps else None,
                "grad_norm": float(self.grad_norm[last]) if self.steps else None,
                "step_time_s": float(self.step_time[last]) if self.steps else None,
                "alerts_firing": sum(alert["state"] == "firing" for alert in self.alerts),
                "bytes_per_step": 192_000,
                "skipped_records": 0,
                "lag_s": 0.04,
                "version": "0.1.0",
                "rules": 9,
                "model": {"parameters": 124_439_808, "tensors": 148},
                "heatmaps": [
                    {"kind": "grad_reduced", "statistics": ["rms", "norm", "max", "mean", "zero_ratio", "nonfinite"]},
                    {"kind": "param_updated", "statistics": ["rms", "norm"]},
                    {"kind": "actv", "statistics": ["rms", "max"]},
                ],
            }
        )

    def lines(self, names: list[str]) -> dict[str, Any]:
        """Answer of /api/lines."""
        series = {name: [float(value) for value in getattr(self, name)] for name in names}
        return plain({"steps": self.steps, "series": series})

    def grid(self, rows: list[str], values: np.ndarray, columns: int, **header: Any) -> bytes:
        """Frame of /api/heatmap and /api/ranks, pooled to at most `columns` by the largest value."""
        stride = max(1, math.ceil(values.shape[1] / columns))
        short = -values.shape[1] % stride
        padded = np.pad(values.astype(np.float32), ((0, 0), (0, short)), constant_values=np.nan)
        pooled = np.fmax.reduce(padded.reshape(len(rows), -1, stride), axis=2) if values.size else padded
        text = json.dumps({"rows": rows, "first_step": 1, "stride": stride, "columns": pooled.shape[1], **header})
        encoded = text.encode() + b" " * (-len(text.encode()) % 4)
        return struct.pack("<I", len(encoded)) + encoded + pooled.astype("<f4").tobytes()

    def append(self) -> dict[str, Any]:
        """One more step like the last finite ones; returns its event."""
        random = np.random.default_rng(self.num_steps)
        self.num_steps += 1
        self.steps.append(self.num_steps)
        self.loss = np.append(self.loss, 2.2 + 0.055 * random.standard_normal())
        self.grad_norm = np.append(self.grad_norm, 0.56 * np.exp(0.16 * random.standard_normal()))
        self.step_time = np.append(self.step_time, 0.412 + 0.012 * random.standard_normal())
        column = self.heat[:, -1:] if self.heat.shape[1] else np.full((len(self.rows), 1), 1e-3, np.float32)
        self.heat = np.append(self.heat, column * np.exp(0.18 * random.standard_normal(column.shape)), axis=1)
        times = self.step_time[-1] * np.exp(0.015 * random.standard_normal((self.world_size, 1)))
        self.rank_time = np.append(self.rank_time, times, axis=1)
        return plain(
            {
                "step": self.num_steps,
                "loss": float(self.loss[-1]),
                "grad_norm": float(self.grad_norm[-1]),
                "step_time_s": float(self.step_time[-1]),
                "time_s": time.time(),
            }
        )


def alert(**changes: Any) -> dict[str, Any]:
    """An alert as the agent's JSON has it, with `changes`."""
    series = {
        "kind": "grad_reduced",
        "name": "h.23.mlp.proj.weight",
        "slot": "",
        "call": 0,
        "micro_step": None,
        "stage": 0,
    }
    base = {
        "id": "a1",
        "rule": "gradient-not-finite",
        "severity": "fatal",
        "state": "firing",
        "attempt": 1,
        "rank": 3,
        "step": 1640,
        "first_step": 1640,
        "time_s": 1_785_000_680.0,
        "kind": "grad_reduced",
        "value": 12.0,
        "baseline": 0.0,
        "num_series": 98,
        "findings": [{"series": series, "value": 12.0, "baseline": 0.0}],
        "message": "gradients are not finite on rank 3 (98 of 196 series)",
        "dump": None,
        "diagnosis": None,
    }
    return plain({**base, **changes})


def example_diagnosis() -> dict[str, Any]:
    """The report of a weight that went to Inf, in the schema of analysis/findings.py."""

    def tensor(slot: str, nans: int, infs: int, **more: Any) -> dict[str, Any]:
        base = {
            "slot": slot,
            "dtype": "torch.float32",
            "shape": [4, 256, 768],
            "count": 786_432,
            "nans": nans,
            "infs": infs,
            "max": 11.52,
            "min": -9.87,
        }
        return {**base, **more}

    def link(module: str, class_name: str, bad: dict[str, Any], omitted: int = 0) -> dict[str, Any]:
        return {
            "module": module,
            "class_name": class_name,
            "direction": "forward",
            "call": 0,
            "tensor": bad,
            "omitted": omitted,
        }

    nothing = {"max": None, "min": None}
    weight = {"shape": [3072, 768], "count": 2_359_296, "max": 0.184, "min": -0.179}
    return {
        "verdict": "located",
        "run_id": "gpt-124m-byte",
        "step": 1640,
        "attempt": 1,
        "rank": 3,
        "headline": "h.23.mlp.fc: a weight was not finite before step 1640 on rank 3",
        "reason": "h.23.mlp.fc.weight held 1 Inf before the forward of step 1640 on rank 3, and on no other rank. Every later module on the way to the loss received it.",
        "module": "h.23.mlp.fc",
        "class_name": "Linear",
        "call": 0,
        "micro_step": 0,
        "phase": "parameter",
        "tensor": tensor("parameters.weight", 0, 1, **weight),
        "source": "examples/ddp_gpt.py:88 x = x + self.mlp(self.ln_2(x))",
        "candidates": [],
        "chain": [
            link("h.23.mlp.fc", "Linear", tensor("output.0", 512, 512, shape=[4, 256, 3072], count=3_145_728)),
            link("h.23.mlp.act", "GELU", tensor("output.0", 1024, 0, shape=[4, 256, 3072], count=3_145_728)),
            link("h.23.mlp.proj", "Linear", tensor("output.0", 786_432, 0, **nothing)),
            link("h.23", "Block", tensor("output.0", 786_432, 0, **nothing)),
            link("ln_f", "LayerNorm", tensor("output.0", 786_432, 0, **nothing), omitted=143),
            link("head", "Linear", tensor("output.0", 262_144, 0, shape=[4, 256, 256], count=262_144, **nothing)),
            link("(loss)", "", tensor("output.0", 1, 0, shape=[], count=1, **nothing)),
        ],
        "ranks": [
            {
                "rank": rank,
                "role": "origin" if rank == 3 else "innocent",
                "replay": "nonfinite" if rank == 3 else "clean",
                "unreduced": 98 if rank == 3 else 0,
                "reduced": 98,
            }
            for rank in range(8)
        ],
        "parameters": [{"name": "h.23.mlp.fc.weight", "count": 2_359_296, "nans": 0, "infs": 1}],
        "consequences": [
            "98 of 196 gradients of rank 3 were not finite before the reduction; after it, those of all 8 ranks.",
            "The optimizer wrote NaN into all 196 parameters at step 1640.",
        ],
        "evidence": ["replay of step 1640 on ranks 0–7", "statistics of steps 1632–1640"],
        "dump": "dumps/nonfinite-1-1640/attempt1/step1640/rank3",
        "version": 1,
    }


def example_alerts() -> list[dict[str, Any]]:
    """A straggler that went away, a spike, and a gradient that is not finite."""
    address = "/api/diagnosis/nonfinite-1-1640/1/1640"
    norm = {"kind": "feature", "name": "grad_norm", "slot": "", "call": 0, "micro_step": None, "stage": 0}
    names = layer_names(48)
    findings = [
        {
            "series": {**norm, "kind": "grad_reduced", "name": names[110 + row]},
            "value": 0.0121 - row * 1e-3,
            "baseline": 0.00081,
        }
        for row in range(6)
    ]
    return [
        alert(dump="nonfinite-1-1640", diagnosis=address, num_series=98),
        alert(
            id="a2",
            rule="gradient-spike",
            severity="warning",
            state="resolved",
            step=1322,
            first_step=1296,
            rank=0,
            value=0.0121,
            baseline=0.00081,
            num_series=86,
            findings=findings,
            message="RMS of 86 gradients far above their median",
        ),
        alert(
            id="a3",
            rule="straggler",
            severity="warning",
            state="resolved",
            step=1241,
            first_step=903,
            rank=5,
            kind="step",
            value=0.548,
            baseline=0.412,
            num_series=1,
            findings=[{"series": {**norm, "kind": "step", "name": "step_time"}, "value": 0.548, "baseline": 0.412}],
            message="rank 5 is 1.33 times slower than the median rank",
        ),
        alert(
            id="a4",
            rule="loss-not-finite",
            severity="critical",
            step=1641,
            first_step=1641,
            rank=0,
            kind="loss",
            value=math.nan,
            baseline=2.21,
            num_series=1,
            findings=[{"series": {**norm, "kind": "loss", "name": "loss"}, "value": math.nan, "baseline": 2.21}],
            message="the loss is NaN on all ranks",
        ),
    ]


def example_run(*, broken: bool) -> Run:
    """A realistic run; `broken`: ends eight per cent after a NaN, with alerts, dump and diagnosis."""
    run = Run(num_steps=1780 if broken else 2000, bad_step=1640 if broken else None)
    run.alerts = example_alerts() if broken else example_alerts()[1:3]
    if broken:
        address = "/api/diagnosis/nonfinite-1-1640/1/1640"
        run.dumps = [
            {
                "id": "nonfinite-1-1640",
                "attempt": 1,
                "step": 1640,
                "ranks": list(range(8)),
                "path": "dumps/nonfinite-1-1640/attempt1/step1640",
                "status": "written",
                "diagnosis": address,
            }
        ]
        run.diagnoses["nonfinite-1-1640"] = example_diagnosis()
    return run


class FakeAgent:
    """Serves `run` in a thread of its own; `publish` sends an event to every open page."""

    def __init__(self, run: Run, *, port: int = 0) -> None:
        self.run = run
        self.requests: list[str] = []
        self._clients: list[queue.SimpleQueue[str | None]] = []
        config = uvicorn.Config(
            self._application(),
            host="127.0.0.1",
            port=port,
            log_level="error",
            ws="none",
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, name="fake-agent")

    def start(self) -> None:
        """Return once it listens."""
        self._thread.start()
        deadline = time.monotonic() + 10
        while not self._server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise RuntimeError("the fake agent did not start within 10 s")
            time.sleep(0.005)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.servers[0].sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://127.0.0.1:{self.port}/"

    def stop(self) -> None:
        """End open streams, then the server."""
        for client in self._clients:
            client.put(None)
        self._server.should_exit = True
        self._thread.join(10)

    def publish(self, event: str, value: Any) -> None:
        """Send an event to every open page."""
        for client in self._clients:
            client.put(f"event: {event}\ndata: {json.dumps(value)}\n\n")

    @property
    def num_clients(self) -> int:
        """Number of pages that listen."""
        return len(self._clients)

    def _application(self) -> FastAPI:
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

        @app.middleware("http")
        async def guard(request: Request, call_next: Any) -> Response:
            self.requests.append(request.url.path)
            reply: Response = await call_next(request)
            reply.headers["Content-Security-Policy"] = CSP
            return reply

        self._add_page(app)
        self._add_answers(app)
        return app

    def _add_page(self, app: FastAPI) -> None:
        @app.get("/")
        def page() -> Response:
            return Response((WEB / "index.html").read_bytes(), media_type="text/html")

        @app.get("/static/{name}")
        def static(name: str) -> Response:
            path = WEB / name
            if not path.is_file():
                raise HTTPException(404)
            return Response(path.read_bytes(), media_type=mimetypes.guess_type(name)[0])

    def _add_answers(self, app: FastAPI) -> None:
        run = lambda: self.run  # noqa: E731 - a test may exchange the run

        @app.get("/api/run")
        def describe() -> Response:
            return _json(run().describe())

        @app.get("/api/lines")
        def lines(names: str) -> Response:
            return _json(run().lines(names.split(",")))

        @app.get("/api/heatmap")
        def heatmap(kind: str, statistic: str, columns: int = 1000) -> Response:
            return Response(run().grid(run().rows, run().heat, columns, kind=kind, statistic=statistic))

        @app.get("/api/ranks")
        def ranks(quantity: str, columns: int = 1000) -> Response:
            names = [f"rank {rank}" for rank in range(run().world_size)]
            return Response(run().grid(names, run().rank_time, columns, quantity=quantity))

        @app.get("/api/alerts")
        def alerts() -> Response:
            return _json(run().alerts)

        @app.get("/api/dumps")
        def dumps() -> Response:
            return _json(run().dumps)

        @app.get("/api/diagnosis/{identity}/{attempt}/{step}")
        def diagnosis(identity: str, attempt: int, step: int) -> Response:
            if identity not in run().diagnoses:
                raise HTTPException(404, "there is no diagnosis of this dump (yet)")
            return _json(run().diagnoses[identity])

        @app.get("/events")
        async def events() -> Response:
            return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[str]:
        client: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._clients.append(client)
        try:
            yield "retry: 200\n\n"
            while True:
                try:
                    event = client.get_nowait()
                except queue.Empty:
                    await asyncio.sleep(0.01)
                    continue
                if event is None:
                    return
                yield event
        finally:
            self._clients.remove(client)


def _json(value: Any) -> Response:
    return Response(json.dumps(value), media_type="application/json")


@contextlib.contextmanager
def serving(run: Run, *, port: int = 0) -> Iterator[FakeAgent]:
    """A fake agent that is stopped at the end of the block."""
    agent = FakeAgent(run, port=port)
    agent.start()
    try:
        yield agent
    finally:
        agent.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--healthy", action="store_true", help="without the fault")
    options = parser.parse_args()
    with (
        serving(example_run(broken=not options.healthy), port=options.port) as agent,
        contextlib.suppress(KeyboardInterrupt),
    ):
        sys.stdout.write(f"{agent.url}\n")
        sys.stdout.flush()
        while True:
            time.sleep(0.5)
            agent.publish("step", agent.run.append())


if __name__ == "__main__":
    main()

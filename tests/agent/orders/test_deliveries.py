"""Dumps wait in the outbox until they can be taken to the run directory, and the agent goes on meanwhile."""

import asyncio

from trainermon.agent.orders import deliveries
from trainermon.agent.orders.deliveries import DumpDeliveries
from trainermon.core.outbox import Outbox
from trainermon.core.spool import open_spool

PLACE = "dumps/a1/attempt1/step7/rank0"
DEADLINE_S = 900


async def until(condition):
    for _ in range(int(DEADLINE_S / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("not in time")


def test_a_dump_that_cannot_be_delivered_is_told_once_and_tried_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(deliveries, "RETRY_S", 0.0)
    spool, run_dir = open_spool(tmp_path / "spool" / "run"), tmp_path / "output/run"
    run_dir.mkdir(parents=True)
    run_dir.chmod(0o777)
    parcel = Outbox(spool, run_dir, 0).parcel(PLACE)
    parcel.content.mkdir(parents=True)
    (parcel.content / "dump.json").write_text("{}")
    parcel.send()

    async def main():
        delivered = DumpDeliveries(spool, run_dir)
        idle_at_first = delivered.idle
        delivered.poll()
        await until(lambda: delivered.problem)
        problem = delivered.problem
        run_dir.chmod(0o700)
        await asyncio.wait_for(delivered.done(), DEADLINE_S)
        assert (idle_at_first, delivered.idle) == (False, True)
        assert delivered.problem == ""
        await delivered.close()
        return problem

    problem = asyncio.run(main())

    assert "expected no write permission" in problem
    assert (run_dir / PLACE / "dump.json").read_text() == "{}"
    assert len([record for record in caplog.records if "tried again" in record.getMessage()]) == 1

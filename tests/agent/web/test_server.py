"""At which address the page of a run is."""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from urllib.parse import urlsplit

from trainermon.agent.place import AgentPlace
from trainermon.agent.settings import AgentSettings
from trainermon.agent.web.listener import FIRST_PORT, NUM_PORTS, AgentListener
from trainermon.core.config.schema import AgentConfig


def ports(output, runs, *, configured=0, together=False):
    """Return the ports of the pages of `runs` in `output`, each up alone, or all `together`."""

    async def opened():
        with ThreadPoolExecutor(1) as executor:
            found, up = [], []
            for run in runs:
                settings = AgentSettings(run_id=run, output=str(output / run), agent=AgentConfig(port=configured))
                place = AgentPlace(
                    run_id=run, spool=output, run_dir=output / run, node_dir=output / run / "nodes" / "n"
                )
                listener = AgentListener(place, settings, token="t" * 43, host="n", executor=executor)
                listener.open(SimpleNamespace(), SimpleNamespace())
                found.append(urlsplit(listener.url).port)
                up.append(listener)
                if not together:
                    await up.pop().close()
            for listener in up:
                await listener.close()
            return found

    return asyncio.run(opened())


def test_runs_of_a_folder_have_their_page_at_one_address(tmp_path):
    first, second, again = ports(tmp_path, ["a", "b", "a"])

    assert first == second == again
    assert FIRST_PORT <= first < FIRST_PORT + NUM_PORTS


def test_two_at_once_have_an_address_each(tmp_path):
    assert len(set(ports(tmp_path, ["a", "b"], together=True))) == 2


def test_a_configured_port_is_taken(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        wanted = free.getsockname()[1]

    assert ports(tmp_path, ["a"], configured=wanted) == [wanted]

"""Draw the pictures of docs/guides/terminal-interface.md, and that of a server in serving.md, again, from the sample
documents and the embedded model.

PYTHONPATH=tests:. python -m tui.pictures
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from serve.live import serving
from textual.pilot import Pilot

from pictool.commands.settings.settings import Settings
from pictool.commands.tui import make_exports
from pictool.commands.tui_process.job import WorkerJob
from pictool.commands.tui_process.worker import TuiWorker
from pictool.runtime.model import load_model
from pictool.store.store import Store
from pictool.tui.app import PicApp
from pictool.tui.export import draw_png, screen_lines
from pictool.tui.services import LinkForm, LoadedTrace, Services
from pictool.tui.watching import Address
from tui.drive import settle

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
QUERY = "On which river does Dusdale lie?"
LINKS = {
    "full": ("full",), "naive": ("naive",), "lego-16": ("legolink", "k=16"), "blend": ("cacheblend", "ratio=0.15"),
    "fixup": ("fixup", "ratio=0.15"),
}  # fmt: skip
FIVE = [*LINKS]
# A picture: its size, the traces that are open, and the keys that are pressed before it is taken.
PICTURES: dict[str, tuple[tuple[int, int], Sequence[str], Sequence[str]]] = {
    "tui-home": ((100, 34), FIVE, ["escape", "down", "space", "down", "down", "space", "p"]),
    "tui-compare": ((120, 36), ["full", "lego-16", "blend"], ["slash", *"Tem", "enter"]),
    "tui-four": ((80, 24), ["full", "lego-16", "blend", "fixup"], ["f", *["right"] * 60]),
    "tui-overlap": ((132, 36), ["lego-16", "blend", "fixup"], ["m", "f", *["d"] * 24]),
    "tui-attention": ((110, 36), ["naive"], ["a", *"llll", "h", "slash", *"Tem", "enter"]),
    "tui-fixups": ((80, 24), [], ["slash", *"Femlia", "enter", "enter", "h", "f", *["right"] * 4]),
    "tui-sinks": ((100, 34), [], ["slash", *"Femlia", "enter", "enter", "a"]),
}


def link_all(settings: Settings) -> None:
    """Link the pages of a book by every policy, into traces in the working directory."""
    worker = TuiWorker(lambda *_: None, settings)
    documents = tuple(sorted(str(path) for path in Path("docs").glob("book-3-page-*.txt")))
    for name, (algo, *fields) in LINKS.items():
        worker.link(LinkForm(documents, QUERY, algo, tuple(fields), f"{name}.trace"))


async def take(name: str, app: PicApp) -> None:
    size, _, keys = PICTURES[name]
    async with app.run_test(size=size, notifications=False) as pilot:
        await settle(pilot)
        await _press(pilot, keys)
        (IMAGES / f"{name}.png").write_bytes(draw_png(screen_lines(app)))


async def _press(pilot: Pilot[None], keys: Sequence[str]) -> None:
    for key in keys:
        await pilot.press("space" if key == " " else key)
        await settle(pilot)


async def take_server(seconds: float) -> None:
    """A server of the embedded model to which three clients send questions, watched for some seconds."""
    with serving(load_model("embedded"), Store("served")) as live, ThreadPoolExecutor(3) as clients:
        pages = sorted(Path("docs").glob("book-3-page-*.txt"))
        texts = [{"model": live.backend.model, "text": page.read_text()} for page in pages]
        caches = [live.ok("POST", "/v1/caches", json=text)["id"] for text in texts]
        body = {"model": live.backend.model, "messages": [{"role": "user", "content": QUERY}], "cache_ids": caches}
        until = time.monotonic() + seconds

        def ask(client: int) -> None:
            while time.monotonic() < until:
                live.ok("POST", "/v1/chat/completions", json=body | {"max_tokens": 8 * (client + 1)})
                time.sleep(0.2 * (client + 1))

        asked = [clients.submit(ask, client) for client in range(3)]
        with WorkerJob(Settings()) as job:
            app = PicApp(Store(), [], Services(job, make_exports()), server=Address(live.url))
            async with app.run_test(size=(100, 30), notifications=False) as pilot:
                await asyncio.sleep(seconds - 4)
                await settle(pilot)
                (IMAGES / "tui-server.png").write_bytes(draw_png(screen_lines(app)))
        for each in asked:
            each.result()


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        Path("docs").symlink_to(ROOT / "fixtures" / "docs")
        settings = Settings().override(device="cpu")
        link_all(settings)
        with WorkerJob(settings) as job:
            for name, (_, traces, _) in PICTURES.items():
                loaded = [LoadedTrace.read(Path(f"{trace}.trace")) for trace in traces]
                asyncio.run(take(name, PicApp(Store(), loaded, Services(job, make_exports()))))
        asyncio.run(take_server(30))
        os.chdir("/")


if __name__ == "__main__":
    main()

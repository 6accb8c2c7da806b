"""Hostile remotes: a loopback HTTP server, a file system of fsspec's, a directory; under link, compile, pull and push.

Pauses and timeouts are those of the remote with small numbers, so that what would take a minute takes a second.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

from commands.run import write

import pictool.store.remote.remote as remote_module
from hostile.filesystem import HostileFiles, draw_faults
from hostile.judge import Case, Outcome, Step, fine
from hostile.scene import Scene
from hostile.server import HostileServer, draw_answer
from hostile.surfaces.base import Surface, put_something_else
from hostile.surfaces.objects import forge, healing
from hostile.values import mutate_bytes
from pictool.store.remote.remote import Remote, Retry


class QuickRemote(Remote):
    def __init__(self, url: str, *_: Any, **__: Any) -> None:
        super().__init__(url, Retry(attempts=2, first_s=0.01, most_s=0.02), timeout_s=0.2, min_rate=16 << 20)


class Remotes(Surface):
    """The remote has the objects of the scene, some of them forged, and answers with faults."""

    name, weight = "remotes", 8

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        setattr(remote_module, "Remote", QuickRemote)  # noqa: B010

    def make(self, draw: random.Random) -> Case:
        scene, codec = self.scene, draw.choice(("none", "none", "zstd", "int8"))
        scene.write_texts()
        content, forged = self._content(codec, draw)
        kind = draw.choice(("http", "http", "hostile", "oci", "directory"))
        url, what = {"http": self._serve, "directory": self._directory}.get(kind, partial(self._file_system, kind))(
            content, draw
        )
        kept: dict[Path, bytes] = {}
        for path, data in scene.write_store(codec).items():
            if draw.random() < 0.4:
                kept[path.absolute()] = data
            else:
                path.unlink()
        steps = [
            self._step(codec, url, kind, draw),
            Step(("store", "verify", "--store", "st"), (), fine, must_answer=True),
        ]
        return Case(f"{kind}: {', '.join([*forged, what])}", (*steps, healing(scene, codec)), kept, ("st",))

    def _content(self, codec: str, draw: random.Random) -> tuple[dict[str, bytes], list[str]]:
        """Objects by their path below the remote's root; some are forged, exchanged or damaged."""
        content, what = dict(self.scene.objects[codec]), list[str]()
        for name in sorted(content):
            kind = draw.random()
            if kind < 0.3:
                content[name], done = forge(content[name], draw)
                what.append(done)
            elif kind < 0.4:
                content[name], done = mutate_bytes(content[name], draw)
                what.append(done)
            elif kind < 0.45:
                content[name] = self.scene.objects[codec][draw.choice(sorted(content))]
                what.append("another object")
        return content, what

    def _serve(self, content: dict[str, bytes], draw: random.Random) -> tuple[str, str]:
        what, answer = draw_answer(draw)
        server = HostileServer({f"/{name}": data for name, data in content.items()}, answer)
        self.opened.callback(server.close)
        return server.url, what

    def _file_system(self, protocol: str, content: dict[str, bytes], draw: random.Random) -> tuple[str, str]:
        what, faults = draw_faults(draw) if draw.random() < 0.8 else ("honest", {})
        HostileFiles.files.clear()
        HostileFiles.faults.clear()
        HostileFiles.files.update({f"far/{name}": data for name, data in content.items()})
        HostileFiles.faults.update(faults)
        return f"{protocol}://far", what

    def _directory(self, content: dict[str, bytes], draw: random.Random) -> tuple[str, str]:
        for name, data in content.items():
            write(Path("far", name), data)
        if draw.random() < 0.5:
            path = draw.choice([Path("far/objects"), Path("far/tmp"), *(Path("far", name) for name in sorted(content))])
            return "far", f"{path} is {put_something_else(path, draw, Path.cwd())}"
        return "far", "honest"

    def _step(self, codec: str, url: str, kind: str, draw: random.Random) -> Step:
        scene = self.scene
        keys, remote = scene.keys[codec], ("--remote", url, "--store", "st")
        names = (url, *(key[:12] for key in keys.values()), "far", *keys)

        def right(outcome: Outcome) -> str | None:
            return scene.check_answer(codec, outcome)

        def pushed(outcome: Outcome) -> str | None:
            """What is in the directory after a push is what was sent."""
            key = keys["b.txt"]
            path = Path("objects", key[:2], f"{key}.kvo")
            is_there = Path("far", path).is_file() and Path("far", path).read_bytes() == scene.objects[codec][str(path)]
            return None if is_there or kind != "directory" else "the remote has another object"

        compiling = ("compile", *keys, "-m", scene.model, "--codec", codec, *remote)
        link = scene.link(codec, more=("--remote", url))
        steps = (
            Step(link, names, right, must_answer=True),
            Step(compiling, names, must_answer=True),
            Step(("store", "pull", *keys.values(), *remote), names),
            Step(scene.link(codec, *keys.values(), more=("--remote", url)), names, right),
            Step(("store", "push", "all", *remote), names),
        )
        step = draw.choices(steps, (4, 2, 3, 2, 2))[0]
        if step.arguments[1] == "push" and draw.random() < 0.6:
            key = keys["b.txt"]
            path = Path("objects", key[:2], f"{key}.kvo")
            write(Path("st", path), scene.objects[codec][str(path)])
            return Step(("store", "push", key, *remote), names, pushed)
        return step

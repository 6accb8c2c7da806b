"""Conversations that a server kept on disk: damaged chains, and turns of two tenants with forks, edits and clients that
vanish (`tests/conversing.py`). Whatever is there, the answers are those of a server that kept nothing. And sizes."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import ClassVar

from commands.run import write
from conversing import converse

from hostile.judge import Case, Outcome, Step
from hostile.scene import Scene
from hostile.surfaces.base import Surface, put_something_else
from hostile.surfaces.objects import forge
from hostile.values import mutate_bytes, mutate_text

SEEDS, TURNS, LIMIT_S = range(1, 9), 8, 20.0
_SIZES = ("1G", "60K", "500M", "1", "1e9", "0x10", "１G", "-1", "nan", "inf", "9" * 400, "1 G", "1GB", "K", "")


class Conversations(Surface):
    """Some of the chains of an earlier server with the same conversations are replaced; or a size is."""

    name: ClassVar[str] = "conversations"
    weight: ClassVar[int] = 1

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self._known: dict[int, tuple[str, dict[Path, bytes]]] = {}  # answers and files by seed

    def make(self, draw: random.Random) -> Case:
        if draw.random() < 0.2:
            return self._sizes(draw)
        seed = draw.choice(SEEDS)
        answers, files = self._honest(seed)
        for path, content in files.items():
            write(path, content)
        blocks = [path for path in files if path.suffix == ".kvo"]
        spoilt = draw.sample(blocks, draw.choice((1, 1, 2, len(blocks) // 2)))
        what = [self._spoil(path, files, draw) for path in spoilt]
        if draw.random() < 0.15:
            place = draw.choice([Path("st/prefixes"), Path("st/prefixes/objects"), Path("st/prefixes/lock"), blocks[0]])
            what.append(f"{place}: {put_something_else(place, draw, self.scene.root / 'outside')}")

        def check(outcome: Outcome) -> str | None:
            return None if outcome.out == answers else f"other answers: {outcome.out!r}, not {answers!r}"

        step = Step((*self._command(seed), "--size", draw.choice(("1G", "60K"))), (), check, True, LIMIT_S)
        return Case(f"seed {seed}: {'; '.join(what)}"[:2000], (step, step), stores=("st", "st/prefixes"))

    def _sizes(self, draw: random.Random) -> Case:
        """Options of a server that does not start: it has no pool."""
        option, size = draw.choice(("--keep-prefixes", "--learn", "--pool")), draw.choice(_SIZES)
        size = mutate_text(size, draw)[0] if draw.random() < 0.7 else size
        sizes = {"--keep-prefixes": "1G", "--pool": "0", "--store": "st", "-m": str(self.scene.model)} | {option: size}
        if option == "--pool" or size.strip() in ("0", ""):
            sizes |= {"--keep-prefixes": "nothing"}
        arguments = ("serve", *(f"{name}={value}" for name, value in sizes.items() if name != "-m"), "-m", sizes["-m"])

        def check(_: Outcome) -> str | None:
            return "a server"

        return Case(f"{option}={size!r}", (Step(arguments, (option, "--keep-prefixes"), check),))

    def _command(self, seed: int) -> tuple[object, ...]:
        return (converse.__name__, "st", self.scene.model, "--seed", seed, "--turns", TURNS)

    def _honest(self, seed: int) -> tuple[str, dict[Path, bytes]]:
        """The answers of a seed, and what a server keeps; a second one answers alike."""
        if seed not in self._known:
            step = Step(self._command(seed), must_answer=True, limit_s=LIMIT_S)
            (first, problems), (again, more) = (self.scene.judge.run_step(step) for _ in range(2))
            assert problems == more == [] and first.out == again.out, (problems[:3], more[:3])
            names = [path for path in Path("st").rglob("*") if path.is_file()]
            self._known[seed] = first.out, {path: path.read_bytes() for path in sorted(names)}
            shutil.rmtree("st")
        return self._known[seed]

    def _spoil(self, path: Path, files: dict[Path, bytes], draw: random.Random) -> str:
        kind = draw.random()
        if kind < 0.1:
            return put_something_else(path, draw, self.scene.root / "outside")
        if kind < 0.2:
            path.unlink(missing_ok=True)
            return "gone"
        if kind < 0.35:
            new, what = draw.choice([content for other, content in files.items() if other != path]), "another file"
        else:
            new, what = (mutate_bytes if kind < 0.6 else forge)(files[path], draw)
        path.unlink(missing_ok=True)
        write(path, new)
        return what

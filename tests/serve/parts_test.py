"""Parts of stored documents in messages (`--reuse-parts`), and documents that are nearly in one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tiny

from pictool.errors import InputError
from pictool.linker.grid import parse_policy
from pictool.runtime.model import wrap_model
from pictool.serve.backends.torch.backend import BackendSettings, TorchBackend
from pictool.serve.tenants import Tenant
from pictool.store.store import Store
from serve.live import KEYS, QUESTION, Live, serving, text_of, tiny_model

SENTENCES = [f"The harbour of {name} has {number} lines of festival words.\n" for number, name in enumerate(
    ("Aleph", "Bruin", "Celt", "Dorn", "Esk", "Fal", "Gant", "Hive", "Isk", "Jolt", "Kelp", "Lorn")
)]  # fmt: skip
LONG = "".join(SENTENCES)
PART = "".join(SENTENCES[4:9])
SETTINGS = BackendSettings(parse_policy("legolink-4"), refresh_s=3600, reuses_parts=True)


def explained(live: Live, content: str, **pic: Any) -> dict[str, Any]:
    got: dict[str, Any] = live.chat(content + "\n\n" + QUESTION, pic={"explain": True, **pic})
    return got


def test_a_part_is_linked_and_said_to_be_one(tmp_path: Path) -> None:
    with serving(tiny_model(), Store(tmp_path / "store"), settings=SETTINGS) as live:
        live.cache(LONG)
        live.backend.index.refresh()
        got = explained(live, "Read: " + PART)
        report, (part,) = got["pic"], [part for part in got["pic"]["parts"] if part["state"] == "linked"]
        assert (report["chunks"], report["source"], part["reason"]) == (1, "part", "part")
        assert "nearest" not in report
        total = len(live.backend.engine_of(Tenant("default")).model.encode(LONG))
        assert part["part_of"] == total and 0 < part["part_start"] < part["part_end"] < total
        assert part["part_end"] - part["part_start"] == part["end"] - part["start"]
        assert report["recomputed_tokens"] == 4 and got["usage"]["prompt_tokens_details"]["cached_tokens"] > 64
        full = live.chat(f"Read: {PART}\n\n{QUESTION}", pic=False)
        for policy in ("legolink:k=999", "cacheblend-100"):
            everything = explained(live, "Read: " + PART, policy=policy, verify=True)
            assert everything["pic"]["source"] == "part" and text_of(everything) == text_of(full)
            assert everything["pic"]["verify"]["kl"] < 1e-8
        whole = explained(live, "Read: " + LONG)["pic"]
        assert whole["source"] == "recognised" and all("part_of" not in part for part in whole["parts"])


NEAR = {
    f"{LONG[:300]}Zebra{LONG[305:]}": r"up to token \d+ of [\d,]+; then a part is another",
    LONG[:-150]: r"up to token \d+ of [\d,]+; then it is cut, or goes on differently",
    PART: r"from token \d+ to token \d+ of [\d,]+; its beginning is missing, or another",
    LONG.replace("\n", "\n\n"): r"up to token \d+ of [\d,]+; the prompt has its text with other white space",
}


@pytest.mark.parametrize("content", NEAR)
def test_the_nearest_miss_is_told_with_its_reason_to_its_tenant_alone(tmp_path: Path, content: str) -> None:
    with serving(tiny_model(), Store(tmp_path / "store"), KEYS, key="key-of-a") as live:
        live.cache(LONG)
        live.backend.index.refresh()
        report = explained(live, content)["pic"]
        assert report["source"] == "none" and report["chunks"] == 0
        (key,) = live.store.keys()
        assert re.fullmatch(f"equals object {key[:12]} " + NEAR[content], report["nearest"])
        assert "nearest" not in explained(live, content, recognise=False)["pic"]
        assert "nearest" not in explained(live, LONG)["pic"]
        other = Live(live.url, live.backend, live.service, live.store, "key-of-b")
        assert "nearest" not in explained(other, content)["pic"]
        other.client.close()


def test_parts_of_another_tenant_are_not_linked(tmp_path: Path) -> None:
    with serving(tiny_model(), Store(tmp_path / "store"), KEYS, SETTINGS, key="key-of-a") as live:
        live.cache(LONG)
        live.backend.index.refresh()
        assert explained(live, PART)["pic"]["source"] == "part"
        other = Live(live.url, live.backend, live.service, live.store, "key-of-b")
        report = explained(other, PART)["pic"]
        assert report["source"] == "none" and "nearest" not in report
        other.client.close()


def test_a_hybrid_has_no_states_of_parts(tmp_path: Path) -> None:
    hybrid = wrap_model(tiny.random_module(tiny.CONFIGS["qwen3_next"]()), tiny.tokenizer())
    with pytest.raises(InputError, match=r"--reuse-parts: .* is a hybrid"):
        TorchBackend(hybrid, Store(tmp_path / "store"), SETTINGS)

"""What differs between versions of vLLM, without vLLM: which are supported, and what each one counts."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest

from pictool.engines.vllm.versions import INSTALL, SUPPORTED, cache_hit_source, require_version
from pictool.errors import InputError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A version that `import vllm` seems to find."""
    version = str(request.param)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))  # type: ignore[arg-type]
    return version


@pytest.mark.parametrize("installed", ["0.31.0", "0.31.2+cpu", "0.32.0", "0.32.1rc1"], indirect=True)
def test_both_versions_are_supported(installed: str) -> None:
    assert installed.startswith(SUPPORTED)
    require_version()


@pytest.mark.parametrize("installed", ["0.3.1", "0.30.0", "0.310.0", "0.33.0", "1.31.0"], indirect=True)
def test_others_are_refused_in_one_line(installed: str) -> None:
    with pytest.raises(InputError, match=rf"^vLLM {re.escape(installed)} .* 0\.31\.\* .* 0\.32\.\*") as error:
        require_version()
    assert "\n" not in str(error.value) and str(error.value).endswith(INSTALL)


@pytest.mark.parametrize("installed", ["0.31.0"], indirect=True)
def test_0_31_counts_no_sources_of_cache_hits(installed: str) -> None:
    assert cache_hit_source() is None

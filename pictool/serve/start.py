"""Starting a home on the torch engine: what is checked before the first request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pictool.errors import InputError
from pictool.linker.grid import label_of
from pictool.linker.policies import BASELINE, make_policy
from pictool.serve.check import check_linking
from pictool.serve.torch_home import HomeSettings, TorchHome

if TYPE_CHECKING:
    from pictool.runtime.model import Model
    from pictool.store.store import Store


def start_home(
    model: Model, store: Store, settings: HomeSettings, limit: float | None, refuses: bool = False,
    warn: Callable[[str], None] = lambda _: None,
) -> TorchHome:  # fmt: skip
    """Load the model, and check that it takes the policy well.

    Args:
        limit: KL(full ‖ linked) in nats above which the server falls back to exact answers; None: nothing is checked.
        refuses: above it, no server is started.

    Raises:
        InputError: the check failed, and `refuses`. PicError: the model cannot be loaded.
    """
    _ = model.stack, model.target, model.eos_ids
    home = TorchHome(model, store, settings)
    if limit is None or not settings.policy.needs.objects:
        return home
    try:
        checked = check_linking(model, settings.policy, limit, store.root)
        label = label_of(settings.policy)
        home.divergence = {label: checked.kl}
        if not checked.is_good:
            problem = (
                f"{label}: linked answers of {model.name} are {checked.kl:.3g} nats from full recompute, more than "
                f"{checked.limit:g}"
            )
            if refuses:
                raise InputError(f"{problem}; try another --algo, or a larger --check-limit")
            home.policy, home.problem = make_policy(BASELINE), problem
            warn(f"{problem}; requests that name no policy are answered exactly")
    except BaseException:
        home.close()
        raise
    return home

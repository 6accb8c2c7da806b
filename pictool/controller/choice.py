"""The choice of a ratio for one prompt, on the machine and store at hand (CacheBlend §5.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pictool.controller.calibration import OnMeasure, compute_profile, load_profile
from pictool.controller.cost import ComputeMeasurement, Estimator, layer_work
from pictool.controller.decision import STORE_TIER, RatioChoice, choose_ratio
from pictool.controller.prompt_size import measure_size
from pictool.linker.policies import make_policy
from pictool.linker.policies.base import Policy
from pictool.linker.spec import Spec
from pictool.runtime import architectures, quantized
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model


def auto_ratio(
    model: Model, store: Store, spec: Spec, *, on_measure: OnMeasure | None = None
) -> RatioChoice:  # fmt: skip
    """The ratio for a prompt whose objects are read from where the store lives (CacheBlend §5.1).

    Args:
        spec: its policy with any ratio; what counts are the layers that it checks.
        on_measure: called before something is measured, which happens once per machine, model and place.

    Raises:
        PicError: an unusable document, or a store whose directory cannot be measured.
    """
    size = measure_size(model, store, spec, on_measure=on_measure)
    estimator = make_estimator(model, spec.policy, compute_profile(model, on_measure=on_measure))
    speed = load_profile(model, STORE_TIER, store.root, on_measure=on_measure).cold
    return choose_ratio(estimator, size, speed)


def with_ratio(policy: Policy, ratio: float) -> Policy:
    """The same policy with another share of rows.

    Raises:
        InputError: none of its fields is that, or the ratio is no share.
    """
    knob = policy.knob
    field = knob.field if knob is not None and knob.is_share else "ratio"
    return make_policy(policy.name, policy.params | {field: ratio})


def make_estimator(model: Model, policy: Policy, measured: Sequence[ComputeMeasurement]) -> Estimator:
    """The delays of a policy, from what was measured of the model."""
    layers = model.geometry.layers
    return Estimator.fit(measured, layer_work(layers, policy.check_layers(layers), projection_share(model)))


def projection_share(model: Model) -> float:
    """The share of the layers' weights that project to Q, K and V: a checked layer runs these for all rows."""
    module = quantized.empty_module(model.whole_config)  # a plan from a kept profile loads no weights
    architectures.keep_language_model(module)
    projections, computed = architectures.count_weights(module, model.config)
    return projections / computed

"""Experts are served only with the numbers that their tensors' names must have."""

from __future__ import annotations

from typing import Any

import pytest

from llm_engine.config import ConfigError
from llm_tools.experts import refuse_misnumbered

Shapes = dict[str, tuple[int, ...]]
LAYER = "model.layers.1.block_sparse_moe.experts"
FOUR: dict[str, Any] = {"num_local_experts": 4}


def mixture(experts: int = 4) -> Shapes:
    return {
        "model.layers.1.block_sparse_moe.gate.weight": (experts, 8),
        "model.layers.1.mlp.shared_experts.up_proj.weight": (8, 8),
        "model.layers.0.mlp.down_proj.weight": (8, 16),
        **{f"{LAYER}.{i}.{w}.weight": (16, 8) for i in range(experts) for w in ("w1", "w2", "w3")},
    }


def renamed(old: str, new: str, shapes: Shapes) -> Shapes:
    return {name.replace(old, new): shape for name, shape in shapes.items()}


def refusal(shapes: Shapes, config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        refuse_misnumbered("model", shapes, config)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    "config",
    [
        FOUR,
        {},
        {"text_config": {"num_experts": 4}},
        {"num_experts": [4, 4]},
        {"num_experts": 0},
        {"zero_expert_num": 1, "num_experts": 3},
    ],
)
def test_experts_from_zero_without_a_gap_are_taken(config: dict[str, Any]) -> None:
    refuse_misnumbered("model", mixture(), config)
    refuse_misnumbered("model", mixture(12), {"n_routed_experts": 12})


@pytest.mark.parametrize("config", [FOUR, {}])
@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "experts.1.w2",
            "experts.9.w2",
            f"lacks 1 tensor of experts, first '{LAYER}.1.w2.weight' (and holds 1 without a place, "
            f"first '{LAYER}.9.w2.weight')",
        ),
        ("experts.3.", "experts.5.", f"lacks 3 tensors of experts, first '{LAYER}.3.w1.weight'"),
        ("experts.0.", "experts.4.", f"lacks 3 tensors of experts, first '{LAYER}.0.w1.weight'"),
        ("experts.3.w1", "other.w1", f"lacks 1 tensor of experts, first '{LAYER}.3.w1.weight'"),
        ("experts.3.w1", "experts.02.w1", f"one expert twice, as '{LAYER}.2.w1.weight' and '{LAYER}.02.w1.weight'"),
    ],
)
def test_a_wrong_number_is_told_with_the_name(old: str, new: str, told: str, config: dict[str, Any]) -> None:
    assert told in refusal(renamed(old, new, mixture()), config)


def test_experts_are_as_many_as_the_configuration_says() -> None:
    assert f"lacks 3 tensors of experts, first '{LAYER}.3.w1.weight'" in refusal(mixture(3), FOUR)
    told = f"holds 3 tensors of more experts than config.json states (4), first '{LAYER}.4.w1.weight'"
    assert told in refusal(mixture(5), FOUR)


def test_experts_have_one_shape() -> None:
    shapes = {**mixture(), f"{LAYER}.2.w3.weight": (16, 7)}
    assert (
        f"1 tensor of another shape than other experts', first '{LAYER}.2.w3.weight': [16, 7], not [16, 8]"
        in refusal(shapes, FOUR)
    )

"""Diffusers' split of a DiT on CPU ranks: the outputs of the unsplit DiT up to rounding, alike on every rank."""

from __future__ import annotations

import diffusers
import pytest
import split_cells as cells
import torch
from ranks import Ranks

from enfold.diffusion.layout import PipelineLayout, resolve_pipeline_layout
from enfold.diffusion.split import SplitFacts, split_facts, split_transformer, whole
from enfold.errors import ConfigError, LayoutError

ROUNDING = 1e-5
"""Largest difference, relative to the largest value: fp32, other orders of summation. Measured: 5e-7 at most."""

TOKENS = [(2, {"ulysses": 2}), (2, {"ring": 2}), (4, {"ulysses": 4}), (4, {"ring": 2, "ulysses": 2}), (4, {"ring": 4})]


def wrong(answers: list[cells.Answer]) -> list[str]:
    """Return in words what is wrong with the ranks' answers."""
    found = []
    for rank, answer in enumerate(answers):
        assert answer.plain.isfinite().all() and answer.plain.std() > 0.01
        error = cells.relative(answer.split, answer.plain)
        found += [f"rank {rank}: differs by {error:.1e} from the unsplit one"] if error > ROUNDING else []
        found += [] if answer.split.equal(answers[0].split) else [f"rank {rank}: differs from rank 0"]
        found += [] if answer.whole.equal(answer.plain) else [f"rank {rank}: other bits within whole()"]
        found += [] if answer.again.equal(answer.split) else [f"rank {rank}: other bits the second time"]
    return found


@pytest.mark.parametrize("world,sizes", TOKENS, ids=str)
@pytest.mark.parametrize("name", cells.BUILDERS)
def test_split_tokens_give_the_unsplit_output(ranks: Ranks, name: str, world: int, sizes: dict[str, int]) -> None:
    answers = ranks.run(cells.split_and_run, world, name, sizes)
    assert not wrong(answers)
    assert answers[0].said.endswith(f"(ring {sizes.get('ring', 1)} x ulysses {sizes.get('ulysses', 1)})")


@pytest.mark.parametrize("name", ["Flux", "QwenImage"])
@pytest.mark.parametrize("world", [2, 4])
def test_split_weights_give_the_unsplit_output(ranks: Ranks, name: str, world: int) -> None:
    answers = ranks.run(cells.split_and_run, world, name, {"tp": world})
    assert not wrong(answers)
    assert f"weights are split over {world} ranks" in answers[0].said


@pytest.mark.parametrize("name", cells.BUILDERS)
def test_a_split_without_the_exchange_is_seen(ranks: Ranks, name: str) -> None:
    found = wrong(ranks.run(cells.without_exchange, 2, name, {"ulysses": 2}))
    assert sum("from the unsplit one" in text for text in found) == 2


def test_a_missing_share_of_the_weights_is_seen(ranks: Ranks) -> None:
    found = wrong(ranks.run(cells.without_one_share, 2, "Flux"))
    assert sum("from the unsplit one" in text for text in found) == 2


def test_a_rank_holds_its_share_of_the_weights(ranks: Ranks) -> None:
    """Modulation layers, a large part of so small a model, stay whole in Diffusers' plan."""
    assert all(0.5 < share < 0.75 for share in ranks.run(cells.share_of_parameters, 2, "Flux"))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "shape", [{"text": 16, "masked": 5}, {"text": 13, "masked": 4}, {"text": 13}, {"text": 3, "masked": 2}], ids=str
)
def test_prompts_of_any_length_where_the_model_takes_a_mask(ranks: Ranks, world: int, shape: dict[str, int]) -> None:
    """QwenImage pads to the longest prompt only, which the ranks can seldom share; a prompt of 3 leaves ranks none."""
    assert not wrong(ranks.run(cells.split_and_run, world, "QwenImage", {"ulysses": world}, shape))


BAD_LENGTHS = [
    ("Flux", {"ulysses": 2}, {"text": 15}, "15 tokens (encoder_hidden_states) can't be cut into 2 equal shares"),
    ("Flux", {"ring": 2}, {"side": 3}, "9 tokens (hidden_states) can't be cut into 2 equal shares"),
    ("Flux", {"ring": 2, "ulysses": 2}, {"text": 14}, "14 tokens (encoder_hidden_states) can't be cut into 4"),
    ("Wan", {"ulysses": 4}, {"side": 3}, "18 tokens (output 0 of WanRotaryPosEmbed) can't be cut into 4"),
    ("QwenImage", {"ulysses": 2}, {"side": 3}, "9 tokens (output 0 of QwenEmbedRope) can't be cut into 2"),
    ("QwenImage", {"ring": 2}, {"text": 15}, "2 prompts of up to 15 tokens need a mask on ring 2"),
    ("QwenImage", {"ring": 2}, {"masked": 3}, "2 prompts of up to 16 tokens need a mask on ring 2"),
]


@pytest.mark.parametrize("name,sizes,shape,text", BAD_LENGTHS, ids=str)
def test_lengths_that_ranks_cannot_share(
    ranks: Ranks, name: str, sizes: dict[str, int], shape: dict[str, int], text: str
) -> None:
    """Every rank raises alike, before it waits for another one, and the next forward is right."""
    world = PipelineLayout(**sizes).num_ranks
    for kind, message, after in ranks.run(cells.error_of, world, name, sizes, shape, limit_s=60):
        assert (kind, after) == ("InputError", "right")
        assert message.startswith(text)
        assert "--ulysses-degree" in message or f"a multiple of {world}, such as" in message


BAD_LAYOUTS = [
    (
        "Flux",
        {"ulysses": 3},
        "LayoutError",
        "has replicas of 3 ranks, the process group has 2; use sizes",
    ),
    ("Flux", {"copies": 4}, "LayoutError", "has replicas of 4 ranks, the process group has 2"),
    ("Wan", {"tp": 2}, "ConfigError", "WanTransformer3DModel can't be split over 2 ranks (no _tp_plan in Diffusers)"),
]


@pytest.mark.parametrize("name,sizes,kind,text", BAD_LAYOUTS, ids=str)
def test_layouts_that_do_not_fit(ranks: Ranks, name: str, sizes: dict[str, int], kind: str, text: str) -> None:
    for found, message, after in ranks.run(cells.error_of, 2, name, sizes, {}, limit_s=60):
        assert (found, after) == (kind, "unsplit")
        assert text in message


@pytest.mark.parametrize("sizes", [{"ulysses": 4}, {"tp": 2}], ids=str)
def test_a_rank_that_fails_ends_the_others_after_the_timeout(ranks: Ranks, sizes: dict[str, int]) -> None:
    """Not at once as in an encoder: Diffusers' collectives know no Watch."""
    world = PipelineLayout(**sizes).num_ranks
    *waiting, failed = ranks.run(cells.broken_rank, world, "Flux", sizes, 6.0, limit_s=120)
    assert failed[0] == "MemoryError: made up"
    assert any("Timed out waiting 6000ms" in text for text, _ in waiting)
    for text, wall_s in waiting:
        assert text.startswith("RuntimeError: ")
        assert 4 < wall_s < 40
    assert not wrong(ranks.run(cells.split_and_run, world, "Flux", sizes))


@pytest.mark.parametrize("sizes", [{"ulysses": 2}, {"ring": 2}, {"tp": 2}], ids=str)
def test_nothing_stays_replaced(ranks: Ranks, sizes: dict[str, int]) -> None:
    assert ranks.run(cells.what_stays_replaced, 2, "Flux", sizes) == [[], []]


@pytest.mark.parametrize(
    "kind,text",
    [("ulysses", "ZeroDivisionError"), ("tp", "ZeroDivisionError"), ("ring", "does not support return_lse=True")],
)
def test_diffusers_by_itself_fails_on_cpu_ranks(ranks: Ranks, kind: str, text: str) -> None:
    """Where one of these passes, Diffusers can do it, and enfold's part can go."""
    for message in ranks.run(cells.plain_diffusers, 2, kind):
        assert text in message


def test_a_transformer_is_split_once(ranks: Ranks) -> None:
    for message in ranks.run(cells.split_twice, 2):
        assert message.startswith("ConfigError: FluxTransformer2DModel is split already; load it again")


def test_split_weights_are_whole_nowhere(ranks: Ranks) -> None:
    for message in ranks.run(cells.whole_of_split_weights, 2):
        assert "are split over 2 ranks and none has them all" in message


def test_an_error_within_whole_leaves_the_split(ranks: Ranks) -> None:
    assert ranks.run(cells.whole_that_fails, 2) == [True, True]


# What needs no ranks.


def test_what_diffusers_can_split() -> None:
    assert split_facts("FluxTransformer2DModel") == SplitFacts(has_cp_plan=True, has_tp_plan=True)
    assert split_facts(diffusers.WanTransformer3DModel) == SplitFacts(has_cp_plan=True, has_tp_plan=False)
    assert split_facts("SD3Transformer2DModel") == SplitFacts(has_cp_plan=False, has_tp_plan=False)
    assert split_facts("UNet2DConditionModel") == SplitFacts(has_cp_plan=False, has_tp_plan=False)
    with pytest.raises(ConfigError, match=r"Diffusers .* has no class NoTransformer2DModel"):
        split_facts("NoTransformer2DModel")


def test_sd3_names_replicas() -> None:
    facts = split_facts("SD3Transformer2DModel")
    with pytest.raises(LayoutError, match=r"--num-gpus 4: SD3Transformer2DModel can't be split .* use --dp-size 4"):
        resolve_pipeline_layout(
            4,
            transformer="SD3Transformer2DModel",
            can_split_sequence=facts.has_cp_plan,
            can_split_weights=facts.has_tp_plan,
        )


def test_one_rank_needs_no_split() -> None:
    transformer = cells.build("Flux")
    said = split_transformer(transformer, PipelineLayout(), group=None, device="cpu")
    assert said == "FluxTransformer2DModel runs whole on one rank"
    with whole(transformer), torch.no_grad():
        assert cells.run(transformer, cells.inputs("Flux")).isfinite().all()

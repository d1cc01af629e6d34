"""What a caller may pass and get back: every kind of argument and output, as the plain module takes and gives it."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
import transformers as hf
from cells import differences, groups_of, plain
from ranks import Ranks
from torch import nn

import enfold
from enfold.comm import Axis
from enfold.errors import LayoutError, UnknownFamilyError
from enfold.spread import parallelize_encoder

LAYOUTS = {
    "fold on 2": (2, (1, 1, 2)),
    "fold on 4": (4, (1, 1, 4)),
    "dp on 4": (4, (1, 4, 1)),
    "combined": (4, (1, 2, 2)),
}
F32 = torch.float32
Calls = dict[str, tuple[tuple[Any, ...], dict[str, Any]]]


def spread(group: dist.ProcessGroup, module: nn.Module, layout: tuple[int, int, int]) -> Any:
    return parallelize_encoder(copy.deepcopy(module), layout=enfold.Layout(*layout), groups=groups_of(group))


def randomized(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    module = build().eval().requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(std=parameter.shape[-1] ** -0.5) if parameter.dim() > 1 else parameter.normal_(0.5, 0.2)
    return module


@lru_cache(maxsize=1)
def eager(name: str) -> nn.Module:
    """Return a model that can give its attention weights; with equal weights, but not with equal bits, to `plain`."""
    module = copy.deepcopy(plain(name, F32))
    module.set_attn_implementation("eager")
    return module


def four_d_mask(batch: dict[str, Any]) -> torch.Tensor:
    """Return the additive [row, 1, query, key] form of a padding mask."""
    mask = batch["attention_mask"]
    allowed = mask[:, None, None, :].expand(-1, 1, mask.shape[1], -1)
    return torch.zeros(allowed.shape).masked_fill(allowed == 0, torch.finfo(F32).min)


def _text_calls(name: str) -> Calls:
    """Return calls by what is special about them."""
    batch = models.inputs(name, 5)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    calls: Calls = {
        "a tuple": ((), {**batch, "return_dict": False}),
        "a tuple with hidden states": ((), {**batch, "return_dict": False, "output_hidden_states": True}),
        "positional arguments": ((ids, mask), {}),
        "no mask": ((ids,), {}),
        "a mask that is None": ((), {"input_ids": ids, "attention_mask": None}),
    }
    if name != "CLIP text":
        embeds = plain(name, F32).get_input_embeddings()(ids)
        calls["embeddings"] = ((), {"inputs_embeds": embeds, "attention_mask": mask})
    positions = torch.arange(ids.shape[1])
    if name == "CLIP text":
        calls["positions for all rows"] = ((), {**batch, "position_ids": positions[None]})
        calls["positions per row"] = ((), {**batch, "position_ids": positions[None].repeat(5, 1).flip(1)})
    if name == "BERT":
        calls["token types"] = ((), {**batch, "token_type_ids": (ids % 2).contiguous()})
        calls["a 4-D mask"] = ((), {"input_ids": ids, "attention_mask": four_d_mask(batch)})
    if name == "Qwen3":
        calls["positions per row"] = ((), {**batch, "position_ids": positions[None] + torch.arange(5)[:, None]})
    return calls


@lru_cache(maxsize=1)
def _calls_and_answers(name: str) -> dict[str, tuple[tuple[Any, ...], dict[str, Any], Any]]:
    """Return each call with what the plain module gives."""
    no_cache = {"use_cache": False} if name == "Qwen3" else {}
    calls = _text_calls(name).items()
    return {label: (args, kwargs, plain(name, F32)(*args, **kwargs, **no_cache)) for label, (args, kwargs) in calls}


def _compare_calls(group: dist.ProcessGroup, name: str, layout: tuple[int, int, int]) -> list[str]:
    module = spread(group, plain(name, F32), layout)
    return [
        f"{label}: {text}"
        for label, (args, kwargs, want) in _calls_and_answers(name).items()
        for text in differences(want, module(*args, **kwargs))
    ]


@pytest.mark.parametrize("world,layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", ["T5", "CLIP text", "BERT", "Qwen3"])
def test_arguments_and_tuples(ranks: Ranks, name: str, world: int, layout: tuple[int, int, int]) -> None:
    assert ranks.run(_compare_calls, world, name, layout) == [[]] * world


def _attentions(group: dist.ProcessGroup, name: str, layout: tuple[int, int, int]) -> list[str]:
    batch = models.inputs(name, 5)
    want = eager(name)(**batch, output_attentions=True, output_hidden_states=True)
    heads = {weights.shape[1] for weights in want.attentions}
    assert heads == {getattr(eager(name).config, "num_attention_heads", None)}
    got = spread(group, eager(name), layout)(**batch, output_attentions=True, output_hidden_states=True)
    return differences(want, got)


@pytest.mark.parametrize("world,layout", [(2, (1, 1, 2)), (4, (1, 2, 2))])
@pytest.mark.parametrize("name", ["T5", "CLIP text", "BERT", "Qwen3", "ViT"])
def test_attention_weights_come_back_whole(ranks: Ranks, name: str, world: int, layout: tuple[int, int, int]) -> None:
    assert ranks.run(_attentions, world, name, layout) == [[]] * world


def _planes(group: dist.ProcessGroup, layout: tuple[int, int, int], num_rows: int) -> list[str]:
    """Qwen2.5-VL takes positions as one plane per rotary axis, [3, rows, length]."""
    batch = models.inputs("Qwen2.5-VL", num_rows)
    steps = torch.arange(batch["input_ids"].shape[1]).repeat(num_rows, 1)
    batch["position_ids"] = torch.stack([steps, steps + torch.arange(num_rows)[:, None], steps // 2])
    want = plain("Qwen2.5-VL", F32)(**batch)
    return differences(want, spread(group, plain("Qwen2.5-VL", F32), layout)(**batch))


@pytest.mark.parametrize("num_rows", [3, 5])
@pytest.mark.parametrize("world,layout", [(2, (1, 2, 1)), (4, (1, 2, 2))])
def test_positions_in_three_planes(ranks: Ranks, world: int, layout: tuple[int, int, int], num_rows: int) -> None:
    assert ranks.run(_planes, world, layout, num_rows) == [[]] * world


# Modules that are not of a known family: dp and replicate need no table.

Named = namedtuple("Named", ["features", "nothing", "pair"])


class Custom(hf.PreTrainedModel):
    """An encoder of somebody's own, that returns what it likes."""

    config_class = hf.PretrainedConfig

    def __init__(self, config: hf.PretrainedConfig, kind: str) -> None:
        super().__init__(config)
        self.kind = kind
        self.layer = nn.Sequential(nn.Linear(1088, 1088), nn.GELU(), nn.Linear(1088, 1088))
        self.pool = nn.Linear(1088, 64)

    def forward(self, pixel_values: torch.Tensor, scale: float = 1.0, *, flip: bool = False) -> Any:
        features = self.layer(pixel_values) * scale
        pooled = self.pool(features.mean(1))
        if self.kind == "dict":
            return {"features": features, "none": None, "same": features, "words": "text", "deep": {"pooled": [pooled]}}
        if self.kind == "namedtuple":
            return Named(features, None, (pooled, 3))
        return pooled.sum() if self.kind == "scalar" else features


def _custom(group: dist.ProcessGroup, kind: str, layout: tuple[int, int, int]) -> list[str]:
    module = randomized(lambda: Custom(hf.PretrainedConfig(), kind))
    pixels = torch.randn(5, 7, 1088, generator=torch.Generator().manual_seed(1))
    want, got = module(pixels, 0.5, flip=True), spread(group, module, layout)(pixels, 0.5, flip=True)
    return differences(want, got)


@pytest.mark.parametrize("kind", ["dict", "namedtuple", "tensor"])
def test_outputs_of_any_class(ranks: Ranks, kind: str) -> None:
    for world, layout in ((2, (1, 2, 1)), (4, (1, 4, 1)), (4, (2, 2, 1)), (2, (2, 1, 1))):
        assert ranks.run(_custom, world, kind, layout) == [[]] * world


def _not_rows(group: dist.ProcessGroup) -> str:
    module = randomized(lambda: Custom(hf.PretrainedConfig(), "scalar"))
    try:
        spread(group, module, (1, 2, 1))(torch.zeros(2, 3, 1088))
    except enfold.errors.EnfoldError as error:
        return str(error)
    return ""


def test_an_output_that_has_no_rows_can_not_come_from_dp(ranks: Ranks) -> None:
    for text in ranks.run(_not_rows, 2):
        assert "does not hold 1 rows" in text


STRANGERS = {
    "Electra": lambda: hf.ElectraModel(hf.ElectraConfig(**models.BERT_LIKE, embedding_size=1088)),
    "DistilBERT": lambda: hf.DistilBertModel(
        hf.DistilBertConfig(dim=1088, hidden_dim=2816, n_heads=17, n_layers=2, vocab_size=models.VOCAB)
    ),
    "BART": lambda: hf.BartModel(
        hf.BartConfig(
            d_model=1088, encoder_ffn_dim=2816, decoder_ffn_dim=2816, encoder_layers=1, decoder_layers=1,
            encoder_attention_heads=17, decoder_attention_heads=17, vocab_size=models.VOCAB,
        )
    ),
}  # fmt: skip


def _stranger(group: dist.ProcessGroup, name: str, mode: str) -> tuple[list[str], str]:
    module = randomized(STRANGERS[name])
    batch = models.inputs("BERT", 5)
    got = enfold.parallelize(copy.deepcopy(module), mode, group=group)(**batch)
    try:
        enfold.parallelize(copy.deepcopy(module), "fold", group=group)
    except UnknownFamilyError as error:
        return differences(module(**batch), got), str(error)
    return differences(module(**batch), got), ""


@pytest.mark.parametrize("name", STRANGERS)
@pytest.mark.parametrize("mode", ["dp", "replicate"])
def test_an_unknown_family_runs_without_a_table(ranks: Ranks, name: str, mode: str) -> None:
    for different, text in ranks.run(_stranger, 2, name, mode):
        assert not different
        assert "has no table" in text and "use dp or replicate" in text
        assert all(family in text for family in ("T5", "CLIP text", "Qwen2.5-VL"))


# Calls that dp does not split.


@contextlib.contextmanager
def warnings_of_enfold() -> Iterator[list[str]]:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("enfold").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("enfold").removeHandler(handler)


def image_call(num_rows: int) -> dict[str, Any]:
    """Return a batch for the tiny Qwen2.5-VL with one picture of 4 x 4 patches (2 x 2 image tokens) in every text."""
    ids = models.inputs("Qwen2.5-VL", num_rows)["input_ids"].clamp(min=3)
    ids[:, 2:8] = torch.tensor([902, 900, 900, 900, 900, 903])
    pixels = torch.randn(num_rows * 16, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(5))
    grid = torch.tensor([[1, 4, 4]] * num_rows)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == 900).long(),
        "pixel_values": pixels,
        "image_grid_thw": grid,
    }


def _with_image(group: dist.ProcessGroup, layout: tuple[int, int, int]) -> tuple[list[str], list[str]]:
    batch = image_call(3)
    module = spread(group, plain("Qwen2.5-VL", F32), layout)
    with warnings_of_enfold() as said:
        got = [module(**batch, output_hidden_states=True) for _ in range(2)]
    want = plain("Qwen2.5-VL", F32)(**batch, output_hidden_states=True)
    return [text for each in got for text in differences(want, each)], said


@pytest.mark.parametrize("world,layout,num_warnings", [(2, (1, 2, 1), 1), (4, (1, 2, 2), 1), (2, (1, 1, 2), 0)])
def test_a_call_with_pictures_is_not_split(
    ranks: Ranks, world: int, layout: tuple[int, int, int], num_warnings: int
) -> None:
    for different, said in ranks.run(_with_image, world, layout):
        assert not different
        assert len(said) == num_warnings
        assert all("texts and images" in text and "every rank encodes all of it" in text for text in said)


def _two_towers(group: dist.ProcessGroup) -> tuple[list[str], list[str]]:
    """CLIP's scores are [texts, images]: as many texts as images must not pass for one batch."""
    text, vision = {**models.BERT_LIKE, "num_hidden_layers": 1}, {**models.VISION_LIKE, "num_hidden_layers": 1}
    module = randomized(lambda: hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision)))
    batch = {**models.inputs("CLIP text", 4), **models.inputs("CLIP vision", 4)}
    both = spread(group, module, (1, 2, 1))
    with warnings_of_enfold() as said:
        got = both(**batch)
    return differences(module(**batch).to_tuple(), got.to_tuple()), said


def test_texts_and_images_that_are_compared_are_not_split(ranks: Ranks) -> None:
    for different, said in ranks.run(_two_towers, 2):
        assert not different and len(said) == 1


def _quiet(group: dist.ProcessGroup, num_rows: int) -> tuple[list[str], list[str]]:
    module = spread(group, plain("T5", F32), (1, dist.get_world_size(group), 1))
    with warnings_of_enfold() as said:
        got = module(**models.inputs("T5", num_rows))
    if num_rows:
        return differences(plain("T5", F32)(**models.inputs("T5", num_rows)), got), said
    empty = got.last_hidden_state
    return [] if (*empty.shape, empty.dtype) == (0, models.LENGTH, models.HIDDEN, F32) else [str(empty.shape)], said


@pytest.mark.parametrize("num_rows", [0, 1])
def test_dp_says_nothing_of_batches_that_can_not_be_split(ranks: Ranks, num_rows: int) -> None:
    assert ranks.run(_quiet, 4, num_rows) == [([], [])] * 4


@pytest.mark.parametrize("name", ["CLIP text + projection", "SigLIP vision"])
def test_many_rows_on_each_rank(ranks: Ranks, name: str) -> None:
    """From 33 on the rows of a pooled vector are no longer few, and each rank computes its own."""
    assert ranks.run(_many, 2, name) == [[], []]


def _many(group: dist.ProcessGroup, name: str) -> list[str]:
    batch = models.inputs(name, 69, length=4)
    return differences(plain(name, F32)(**batch), spread(group, plain(name, F32), (1, 2, 1))(**batch))


# Caches and generate().


def _tiny_qwen2() -> nn.Module:
    config = hf.Qwen2Config(**{**models.LLAMA_LIKE, "num_attention_heads": 17, "num_key_value_heads": 1})
    return randomized(lambda: hf.Qwen2ForCausalLM(config))


def _cached(group: dist.ProcessGroup, layout: tuple[int, int, int]) -> list[str]:
    batch = models.inputs("Qwen2", 2)
    module, want = spread(group, plain("Qwen2", F32), layout), plain("Qwen2", F32)(**batch)
    silent, asked = module(**batch), module(**batch, use_cache=True)
    found = [*differences(want, silent), *differences(want, asked)]
    if silent.get("past_key_values") is not None:
        found.append("a cache that nobody asked for")
    if getattr(asked, "past_key_values", None) is None or asked.past_key_values.get_seq_length() != models.LENGTH:
        found.append("no cache")
    return found


@pytest.mark.parametrize("layout", [(1, 1, 2), (1, 2, 1), (2, 1, 1)])
def test_a_cache_is_for_who_asks(ranks: Ranks, layout: tuple[int, int, int]) -> None:
    assert ranks.run(_cached, 2, layout) == [[], []]


def _generated(group: dist.ProcessGroup, layout: tuple[int, int, int]) -> tuple[list[str], list[str]]:
    module = _tiny_qwen2()
    batch = models.inputs("Qwen2", 2)
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    want = module.generate(**batch, **options)
    with warnings_of_enfold() as said:
        got = spread(group, module, layout).generate(**batch, **options)
    return differences((want.sequences, want.logits), (got.sequences, got.logits)), said


@pytest.mark.parametrize("world,layout,num_warnings", [(2, (1, 1, 2), 0), (4, (1, 1, 4), 0), (2, (1, 2, 1), 1)])
def test_generate_gives_the_same_tokens(
    ranks: Ranks, world: int, layout: tuple[int, int, int], num_warnings: int
) -> None:
    for different, said in ranks.run(_generated, world, layout):
        assert not different
        assert len(said) == num_warnings


# The state around a call: gradients, autocast, training, a part of the model called by itself.


def _contexts(group: dist.ProcessGroup, layout: tuple[int, int, int]) -> list[str]:
    reference = copy.deepcopy(plain("T5", F32)).requires_grad_()
    module = spread(group, reference, layout)
    batch = models.inputs("T5", 5)
    contexts = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "enable_grad": torch.enable_grad,
        "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
    }
    found = []
    for label, context in contexts.items():
        with context():
            want, got = reference(**batch), module(**batch)
            if label == "enable_grad" and got.last_hidden_state.requires_grad != (layout[1] == layout[2] == 1):
                found.append("gradients can't flow through ranks, and must not seem to")
            if torch.is_grad_enabled() and label != "enable_grad":
                found.append(f"gradients were switched on in {label}")
        found += [f"{label}: {text}" for text in differences(want.last_hidden_state, got.last_hidden_state)]
    return found


@pytest.mark.parametrize("world,layout", [*LAYOUTS.values(), (2, (2, 1, 1))], ids=[*LAYOUTS, "replicate"])
def test_gradient_modes_and_autocast(ranks: Ranks, world: int, layout: tuple[int, int, int]) -> None:
    assert ranks.run(_contexts, world, layout) == [[]] * world


def _training(group: dist.ProcessGroup) -> list[bool]:
    modules = [copy.deepcopy(plain("T5", F32)).train(is_training) for is_training in (True, False)]
    return [spread(group, module, (1, 1, 2)).training for module in modules]


def test_training_or_not_is_left_as_it_is(ranks: Ranks) -> None:
    assert ranks.run(_training, 2) == [[True, False]] * 2


def _parts(group: dist.ProcessGroup, layout: tuple[int, int, int]) -> list[str]:
    """A pipeline may call parts of an encoder by themselves, also before the encoder's first call."""
    module, reference = spread(group, plain("Qwen3", F32), layout), plain("Qwen3", F32)
    ids = models.inputs("Qwen3", 3)["input_ids"]
    want = reference.get_input_embeddings()(ids)
    found = differences(want, module.get_input_embeddings()(ids), "embeddings")
    found += differences(reference(ids), module(ids))
    return found + differences(reference.layers[0].mlp(want), module.layers[0].mlp(want), "a layer")


@pytest.mark.parametrize("layout", [(1, 1, 2), (1, 2, 1)])
def test_parts_of_an_encoder_by_themselves(ranks: Ranks, layout: tuple[int, int, int]) -> None:
    assert ranks.run(_parts, 2, layout) == [[], []]


# Which ranks talk to which.


def _traffic(group: dist.ProcessGroup, layout: tuple[int, int, int]) -> dict[str, int]:
    module = spread(group, plain("T5", F32), layout)
    counts: Counter[str] = Counter()
    gather = Axis.all_gather

    def counted(axis: Axis, x: torch.Tensor) -> torch.Tensor:
        counts[axis.name] += axis.size > 1
        return gather(axis, x)

    Axis.all_gather = counted  # type: ignore[method-assign]
    try:
        module(**models.inputs("T5", 8, length=33))  # more rows per rank than are few
    finally:
        Axis.all_gather = gather  # type: ignore[method-assign]
    return {name: number for name, number in counts.items() if number}


@pytest.mark.parametrize(
    "world,layout,axes",
    [
        (4, (1, 4, 1), {"replica", "dp"}),
        (4, (1, 1, 4), {"replica", "tp"}),
        (4, (1, 2, 2), {"replica", "dp", "tp"}),
        (2, (2, 1, 1), {"replica"}),
    ],
)
def test_only_the_axes_of_the_layout_communicate(
    ranks: Ranks, world: int, layout: tuple[int, int, int], axes: set[str]
) -> None:
    for counts in ranks.run(_traffic, world, layout):
        assert set(counts) == axes
        assert counts["replica"] == 2, "what the ranks were called with, and whether all came through"
        assert counts.get("dp", 1) == 1, "the outputs, and nothing inside"
        assert counts.get("tp", 9) == 9, "the embedding, and input and output of two row-parallel layers in two layers"


# Sizes that don't divide.

SMALL = {"d_model": 1088, "d_ff": 2816, "num_heads": 17, "d_kv": 64, "num_layers": 2, **models.TOKENS, **models.GATED}
WIDE = {**models.LLAMA_LIKE, "num_hidden_layers": 1}
SIZES: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "6 heads": (lambda: hf.T5EncoderModel(hf.T5Config(**{**SMALL, "num_heads": 6})), "", ""),
    "5 heads": (lambda: hf.UMT5EncoderModel(hf.UMT5Config(**{**SMALL, "num_heads": 5})), "", ""),
    "2 heads": (
        lambda: hf.T5EncoderModel(hf.T5Config(**{**SMALL, "num_heads": 2})),
        "attention: 2 heads < 4 ranks",
        "SelfAttention.q",
    ),
    "6 heads, 3 of keys": (
        lambda: hf.Qwen2Model(
            hf.Qwen2Config(**{**WIDE, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 1152})
        ),
        "",
        "",
    ),
    "a width of 2762": (
        lambda: hf.BertModel(hf.BertConfig(**{**models.BERT_LIKE, "intermediate_size": 2762, "num_hidden_layers": 1})),
        "",
        "",
    ),
    "a width of 130": (
        lambda: hf.BertModel(hf.BertConfig(**{**models.BERT_LIKE, "intermediate_size": 130, "num_hidden_layers": 1})),
        "up: 130 features are 2 units of 64 < 4 ranks",
        "intermediate.dense",
    ),
    "a prime vocabulary with a head": (lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**WIDE)), "", ""),
    "a prime vocabulary, tied": (
        lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**WIDE, tie_word_embeddings=True)),
        "",
        "",
    ),
}


def _uneven(
    group: dist.ProcessGroup, label: str, layout: tuple[int, int, int]
) -> tuple[list[str], tuple[str, ...], bool]:
    build, _, whole = SIZES[label]
    reference = randomized(build)
    module = spread(group, reference, layout)
    found = [
        text
        for num_rows in (1, 5)
        for text in differences(reference(**models.inputs("T5", num_rows)), module(**models.inputs("T5", num_rows)))
    ]
    sizes = {name: tuple(parameter.shape) for name, parameter in reference.named_parameters()}
    kept = [sizes[name] == tuple(x.shape) for name, x in module.named_parameters() if whole and whole in name]
    return found, module.plan.whole_parts, all(kept)


@pytest.mark.parametrize("label", SIZES)
def test_sizes_that_do_not_divide(ranks: Ranks, label: str) -> None:
    for layout in ((1, 1, 4), (1, 2, 2)):
        for found, whole, is_kept in ranks.run(_uneven, 4, label, layout):
            assert not found, f"{layout}: {found}"
            assert is_kept or layout[2] == 2
            said = SIZES[label][1]
            assert (said in whole) if said and layout[2] == 4 else True


def _nothing_to_cut(group: dist.ProcessGroup) -> str:
    tiny = hf.T5Config(d_model=64, d_ff=64, num_heads=1, d_kv=64, num_layers=1, vocab_size=50)
    try:
        enfold.parallelize(hf.T5EncoderModel(tiny), "fold", group=group)
    except LayoutError as error:
        return str(error)
    return ""


def test_a_fold_that_cuts_nothing_is_an_error(ranks: Ranks) -> None:
    for text in ranks.run(_nothing_to_cut, 2):
        assert "fold over tp=2 would shard nothing" in text
        assert "1 heads < 2 ranks" in text

"""Pipelines that draw on real ranks: equal bits for every encoder mode and number of ranks, and for plain Diffusers."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pipelines
import pytest
import torch
import torch.distributed as dist
import whole_pipelines
from ranks import Ranks

from enfold.diffusion.drawing import Timeline
from enfold.diffusion.layout import PipelineLayout
from enfold.diffusion.outline import outline
from enfold.diffusion.requests import GenerateRequest, PipelineReport, PipelineSpec
from enfold.diffusion.worker import PipelineWorker
from enfold.errors import ConfigError, EncodeError, EnfoldError, InputError
from enfold.layout import Layout

CPU = torch.device("cpu")
MODES = ("replicate", "fold", "dp", "auto")
OTHER_KERNELS = ("SD3", "QwenImage") if torch.backends.cpu.get_cpu_capability() == "AVX512" else ("SD3",)
ONE = [GenerateRequest(pipelines.PROMPT, seed=3)]


def guided(name: str, *parts: tuple[int, int, str]) -> list[GenerateRequest]:
    """Return requests with negative prompts: (number of the prompt, number of pictures, negative prompt) each."""
    scale: dict[str, Any] = {whole_pipelines.GUIDED[name]: 3.0}
    return [
        GenerateRequest(pipelines.PROMPTS[i], seed=3 + 10 * i, num_images=n, negative_prompt=negative, **scale)
        for i, n, negative in parts
    ]


def several(name: str) -> list[GenerateRequest]:
    return guided(name, (0, 2, "blurry"), (2, 1, "a large whale"), (0, 1, "blurry"))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    saved: dict[str, Path] = {}

    def folder(name: str) -> str:
        if name not in saved:
            saved[name] = whole_pipelines.save(name, tmp_path_factory.mktemp(name))
        return str(saved[name])

    return folder


def loaded(group: dist.ProcessGroup, folder: str, **options: Any) -> tuple[PipelineWorker, PipelineReport]:
    size = dist.get_world_size(group)
    worker = PipelineWorker(rank=dist.get_rank(group), world_size=size, group=group, device=CPU)
    layout = options.pop("layout", PipelineLayout(copies=size))
    return worker, worker.load(PipelineSpec(folder, layout, timeout_s=30, **options))


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def latents(worker: PipelineWorker, requests: list[GenerateRequest]) -> torch.Tensor:
    with torch.no_grad():
        return worker.loaded.pictures(requests, Timeline(lambda note: None), "latent")[0]


def pictures(worker: PipelineWorker, requests: list[GenerateRequest]) -> torch.Tensor:
    return torch.cat([result.pictures for result in worker.generate(requests)])


def _drawn(group: dist.ProcessGroup, folder: str, name: str, options: dict[str, Any]) -> tuple[list[str], list[Any]]:
    """Return digests of latents and pictures of one request and of several, and the encoders' layouts."""
    worker, _ = loaded(group, folder, **options)
    found = [digest(draw(worker, what)) for what in (ONE, several(name)) for draw in (latents, pictures)]
    layouts = [(plan.layout.replicate, plan.layout.dp, plan.layout.tp) for plan in worker.plans.values()]
    return found, layouts


def _beside_plain(group: dist.ProcessGroup, folder: str, name: str) -> tuple[list[str], float]:
    """Return what `_drawn` returns, from plain Diffusers, and how far its latents of several are from enfold's."""
    pipe = whole_pipelines.plain(folder)
    found = []
    for requests in (ONE, several(name)):
        batch = whole_pipelines.draw_plain(name, pipe, requests, "latent")
        images = whole_pipelines.draw_plain(name, pipe, requests, "np")
        frames = images if images.dim() == 5 else images.unsqueeze(1)
        found += [digest(batch), digest((frames * 255).round().to(torch.uint8))]
    worker, _ = loaded(group, folder)
    return found, ((batch - latents(worker, several(name))).abs().max() / batch.std()).item()


@pytest.mark.parametrize("name", whole_pipelines.BUILDERS)
def test_equal_bits_whatever_the_encoders_do(ranks: Ranks, folder_of: Callable[[str], str], name: str) -> None:
    """One rank, 2 ranks in each mode, and plain Diffusers called with prompt=.

    For several prompts at once plain torch takes other kernels in some encoders, enfold does not.
    """
    folder = folder_of(name)
    plain, gap = ranks.run(_beside_plain, 1, folder, name)[0]
    alone, _ = ranks.run(_drawn, 1, folder, name, {})[0]
    assert len(set(alone)) == 4
    assert alone[:2] == plain[:2]
    assert alone == plain or name in OTHER_KERNELS
    assert gap < 1e-4
    layouts = set()
    for mode in MODES:
        for found, seen in ranks.run(_drawn, 2, folder, name, {"mode": mode}):
            assert found == alone, mode
            layouts.update(seen)
    assert layouts == {(2, 1, 1), (1, 2, 1), (1, 1, 2)}


@pytest.mark.parametrize("name", whole_pipelines.BUILDERS)
def test_config_files_say_what_the_loaded_pipeline_says(folder_of: Callable[[str], str], name: str) -> None:
    folder = folder_of(name)
    worker = PipelineWorker(rank=0, world_size=1, group=None, device=CPU)
    report = vars(worker.load(PipelineSpec(folder, PipelineLayout())))
    foreseen = vars(outline(Path(folder), PipelineLayout()))
    same = {"pipeline_class", "is_video", "defaults", "multiple", "frame_step", "accepts", "max_tokens", "cuts_text"}
    for field in {*same, "num_parameters"}:
        assert foreseen[field] == report[field], field


def test_what_config_files_do_not_tell_is_left_to_the_loaded_pipeline(
    folder_of: Callable[[str], str], tmp_path: Path
) -> None:
    (tmp_path / "model_index.json").write_bytes((Path(folder_of("Flux")) / "model_index.json").read_bytes())
    assert outline(tmp_path, PipelineLayout()) is None


def test_a_folder_that_can_not_be_used_is_refused_before_it_is_loaded(
    folder_of: Callable[[str], str], tmp_path: Path
) -> None:
    shutil.copytree(folder_of("Flux"), tmp_path / "flux", ignore=shutil.ignore_patterns("*.safetensors"))
    assert outline(tmp_path / "flux", PipelineLayout()) is not None, "no weight is needed"
    (tmp_path / "flux" / "generation_defaults.json").write_text('{"height": "tall"}')
    with pytest.raises(ConfigError, match=r"height='tall' must be a number"):
        outline(tmp_path / "flux", PipelineLayout())


def test_equal_bits_on_four_ranks(ranks: Ranks, folder_of: Callable[[str], str]) -> None:
    folder = folder_of("Flux")
    alone, _ = ranks.run(_drawn, 1, folder, "Flux", {})[0]
    for options in ({"mode": "fold"}, {"encoder_layout": Layout(dp=2, tp=2)}):
        assert {tuple(found) for found, _ in ranks.run(_drawn, 4, folder, "Flux", options)} == {tuple(alone)}, options


def _fast(group: dist.ProcessGroup, folder: str) -> list[str]:
    worker, _ = loaded(group, folder, mode="fold", numerics="fast")
    return [digest(latents(worker, ONE))]


def test_an_all_reduce_fold_has_other_bits(ranks: Ranks, folder_of: Callable[[str], str]) -> None:
    """The control: latents do show what the encoders did."""
    exact, _ = ranks.run(_drawn, 1, folder_of("Flux"), "Flux", {})[0]
    for found in ranks.run(_fast, 2, folder_of("Flux")):
        assert found[0] != exact[0]


def _orders(group: dist.ProcessGroup, folder: str) -> tuple[list[int], Any, Any]:
    """Return the seeds of a batch, and how far its pictures, in both orders, are from each picture drawn by itself."""
    worker, _ = loaded(group, folder)
    batch = guided("Flux", (0, 2, "blurry"), (1, 3, "blurry"))
    results = worker.generate(batch)
    alone = torch.cat(
        [
            pictures(worker, [replace(request, seed=request.seed + i, num_images=1)])
            for request in batch
            for i in range(request.num_images)
        ]
    ).float()

    def gaps(found: torch.Tensor) -> Any:
        return (found.float().unsqueeze(1) - alone).abs().flatten(2).amax(2).tolist()

    seeds = [seed for result in results for seed in result.seeds]
    return seeds, gaps(torch.cat([result.pictures for result in results])), gaps(pictures(worker, batch[::-1]))


def test_pictures_of_several_requests_stand_in_order(ranks: Ranks, folder_of: Callable[[str], str]) -> None:
    """Each is the one that the request gives by itself, but for the rounding of a larger batch in the DiT."""
    seeds, gaps, swapped = ranks.run(_orders, 1, folder_of("Flux"))[0]
    assert seeds == [3, 4, 13, 14, 15]
    for found, order in ((gaps, [0, 1, 2, 3, 4]), (swapped, [2, 3, 4, 0, 1])):
        assert [[gap <= 1 for gap in row] for row in found] == [[i == own for i in range(5)] for own in order]


def _rows_encoded(group: dist.ProcessGroup, folder: str, mode: str) -> list[Any]:
    worker, _ = loaded(group, folder, mode=mode)
    rows: list[int] = []
    encoder = worker.loaded.opened.encoders["text_encoder_2"]
    encoder.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[0]))
    first = worker.generate(several("Flux"))
    again = worker.generate(several("Flux"))
    other = worker.generate(guided("Flux", (1, 1, "blurry")))
    same = all(torch.equal(a.pictures, b.pictures) for a, b in zip(first, again, strict=True))
    counts = [(result.num_texts, result.cached_texts) for result in (first[0], again[0], other[0])]
    return [rows, counts, same]


@pytest.mark.parametrize("mode", ["dp", "fold"])
def test_each_different_text_is_encoded_once(ranks: Ranks, folder_of: Callable[[str], str], mode: str) -> None:
    """2 prompts and 2 negative prompts in 3 requests for 4 pictures: one call with 4 rows; then what is new."""
    for rows, counts, same in ranks.run(_rows_encoded, 2, folder_of("Flux"), mode):
        assert rows == [4, 1]
        assert counts == [(4, 0), (4, 4), (2, 1)]
        assert same


def _hits(group: dist.ProcessGroup, folder: str, name: str) -> list[bool]:
    """Whether a text has the bits that it has when it is encoded alone: among others, and from the cache."""
    worker, _ = loaded(group, folder, mode="dp")
    options = worker.loaded.options(None)
    texts = [*pipelines.PROMPTS, *pipelines.NEGATIVE]
    with torch.no_grad():
        together, hits = worker.loaded._rows(texts, options)
        cached, all_hits = worker.loaded._rows(texts, options)
        for value in cached[texts[0]].values():
            value.zero_()  # a caller that writes into what it got
        cached, _ = worker.loaded._rows(texts, options)
        alone = {text: worker.loaded.encode([text], options)[0] for text in texts}
    assert (hits, all_hits) == (0, len(texts))
    return [
        all(torch.equal(rows[text][key], value) for text in texts for key, value in alone[text].items())
        for rows in (together, cached)
    ]


@pytest.mark.parametrize("name", ["SD3", "Flux"])
def test_a_hit_has_the_bits_of_a_miss_in_any_batch(ranks: Ranks, folder_of: Callable[[str], str], name: str) -> None:
    assert ranks.run(_hits, 2, folder_of(name), name) == [[True, True]] * 2


def _different_caches(group: dist.ProcessGroup, folder: str) -> tuple[bool, list[tuple[int, int]]]:
    worker, _ = loaded(group, folder, mode="fold")
    first = worker.generate(ONE)[0]
    if worker.rank == 1:
        worker.loaded.cache = type(worker.loaded.cache)(2**20, "another")  # as if this rank had lost its entries
    again = worker.generate(ONE)[0]
    counts = [(each.num_texts, each.cached_texts) for each in (first, again)]
    return torch.equal(first.pictures, again.pictures), counts


def test_ranks_that_hold_other_entries_agree(ranks: Ranks, folder_of: Callable[[str], str]) -> None:
    assert ranks.run(_different_caches, 2, folder_of("Flux")) == [(True, [(1, 0), (1, 0)])] * 2


def _failing(group: dist.ProcessGroup, folder: str, where: str) -> tuple[str, str, bool]:
    worker, _ = loaded(group, folder, mode="fold")
    before = worker.generate(ONE)[0].pictures
    handle = None
    if worker.rank == 1:

        def fail(*_: Any) -> None:
            raise RuntimeError(f"no memory in {where}")

        component, _, part = where.partition(".")
        target = getattr(worker.loaded.pipeline, component).get_submodule(part)
        handle = target.register_forward_pre_hook(fail)
    outcome = ("", "")
    try:
        worker.generate([replace(ONE[0], prompt="one green circle")])
    except EnfoldError as error:
        outcome = (type(error).__name__, str(error))
    if handle is not None:
        handle.remove()
    return *outcome, torch.equal(before, worker.generate(ONE)[0].pictures)


@pytest.mark.parametrize("where", ["text_encoder_2.encoder.final_layer_norm", "vae.decoder"])
def test_one_rank_fails_and_the_next_call_works(ranks: Ranks, folder_of: Callable[[str], str], where: str) -> None:
    outcomes = ranks.run(_failing, 2, folder_of("Flux"), where)
    assert len({text for _, text, _ in outcomes}) == 1
    for kind, text, works in outcomes:
        assert kind == EncodeError.__name__
        assert "rank 1 failed" in text and f"no memory in {where}" in text
        assert works


def _offloaded(group: dist.ProcessGroup, folder: str) -> tuple[bool, list[str], bool]:
    options = {"mode": "fold"}
    want = pictures(loaded(group, folder, **options)[0], ONE)
    worker, _ = loaded(group, folder, offload_encoders=True, **options)
    moves: list[str] = []
    for name, encoder in worker.loaded.opened.encoders.items():
        move = encoder.to

        def counted(device: Any, name: str = name, move: Any = move) -> Any:
            moves.append(f"{name} to {device}")
            return move(device)

        encoder.to = counted
    hidden = []
    plain_call = type(worker.loaded.pipeline).__call__
    worker.loaded.pipeline.transformer.register_forward_pre_hook(
        lambda *_: hidden.append(worker.loaded.pipeline.text_encoder is None)
    )
    got = pictures(worker, ONE)
    pictures(worker, ONE)  # from the cache: nothing moves
    back = worker.loaded.pipeline.text_encoder is not None
    assert plain_call is type(worker.loaded.pipeline).__call__
    return torch.equal(want, got) and all(hidden) and len(hidden) == 4 and back, moves, back


def test_offloaded_encoders_visit_the_device_for_the_encode(ranks: Ranks, folder_of: Callable[[str], str]) -> None:
    """On a machine without a GPU the device is the CPU, so the moves are counted."""
    for same, moves, _ in ranks.run(_offloaded, 2, folder_of("Flux")):
        assert same
        assert moves == ["text_encoder to cpu", "text_encoder_2 to cpu"] * 2


def _encoded(group: dist.ProcessGroup, folder: str, name: str) -> tuple[list[str], bool, str]:
    worker, _ = loaded(group, folder, mode="dp")
    texts = pipelines.PROMPTS[:2]
    rows = worker.encode(texts, None, [0, -1])
    own = [{key: value for key, value in row.items() if "." not in key} for row in rows]
    by_text = torch.cat([pictures(worker, [GenerateRequest(text, seed=5)]) for text in texts])
    by_rows = torch.cat([pictures(worker, [GenerateRequest("", seed=5, embeds=row)]) for row in own])
    try:
        worker.encode(texts, None, [77])
    except InputError as error:
        return sorted(rows[0]), torch.equal(by_text, by_rows), str(error)
    return sorted(rows[0]), torch.equal(by_text, by_rows), ""


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("SD3", ["pooled_prompt_embeds", "prompt_embeds", "text_encoder.hidden_states.-1", "text_encoder.text_embeds"]),
        ("QwenImage", ["prompt_embeds", "text_encoder.attention_mask", "text_encoder.hidden_states.0"]),
    ],
)
def test_what_encode_returns_draws_the_same_picture(
    ranks: Ranks, folder_of: Callable[[str], str], name: str, names: list[str]
) -> None:
    for found, same, error in ranks.run(_encoded, 2, folder_of(name), name):
        assert set(names) <= set(found)
        assert same
        assert "has the hidden states [77]" in error


def _split(group: dist.ProcessGroup, folder: str) -> tuple[float, float, str, str]:
    worker, report = loaded(group, folder, mode="dp", layout=PipelineLayout(ulysses=dist.get_world_size(group)))
    split = worker.generate(ONE)[0].pictures.float()
    alone = worker.generate(ONE, whole_dit=True)[0].pictures.float()
    again = worker.generate(ONE)[0].pictures.float()
    return (split - alone).abs().max().item(), (split - again).abs().max().item(), report.splits, digest(alone.byte())


def test_a_split_dit_draws_the_same_within_rounding(ranks: Ranks, folder_of: Callable[[str], str]) -> None:
    folder = folder_of("Flux")
    alone, _ = ranks.run(_drawn, 1, folder, "Flux", {})[0]
    found = ranks.run(_split, 2, folder)
    for gap, jitter, words, _ in found:
        assert gap <= 1 and jitter == 0
        assert "split over 2 ranks" in words
    assert {whole for *_, whole in found} == {alone[1]}


def test_requests_that_differ_are_no_batch(ranks: Ranks, folder_of: Callable[[str], str]) -> None:
    texts = ranks.run(_mixed, 1, folder_of("Wan"))
    assert "2 requests of 2 signatures" in texts[0]


def _mixed(group: dist.ProcessGroup, folder: str) -> str:
    worker, _ = loaded(group, folder)
    try:
        worker.generate([*ONE, replace(ONE[0], num_inference_steps=3)])
    except InputError as error:
        return str(error)
    return ""

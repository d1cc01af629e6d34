"""A served text encoder on real ranks: vectors, whole conditioning sets, and ranks that die or hang."""

from __future__ import annotations

import base64
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import openai
import pytest
import torch
from fake_backend import Live, serving, until
from safetensors.torch import load

from enfold.engine import Engine
from enfold.server.backends import EncoderBackend, EncoderOptions
from enfold.server.limits import Limits
from enfold.worker import EncoderSpec

TEXTS = ["a red fox", "one small green circle above two blue squares", "whale"]


def backend_of(folder: Path, **options: Any) -> EncoderBackend:
    spec = EncoderSpec(str(folder), mode="dp", timeout_s=20, batch_size=8)
    return EncoderBackend(spec, EncoderOptions(replica_size=2, threads_per_rank=1, **options))


@pytest.fixture(scope="module")
def live(bert: Path) -> Iterator[Live]:
    with serving(backend_of(bert), batching_max_size=8, batching_delay_s=0.01) as server:
        yield server


@pytest.fixture(scope="module")
def rows(bert: Path) -> torch.Tensor:
    """What one rank gives, scaled to length 1."""
    with Engine(EncoderSpec(str(bert), mode="replicate")) as engine:
        return torch.nn.functional.normalize(torch.stack(engine.encode(TEXTS)), dim=-1)


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_openai_client_gets_the_vectors_of_one_rank(client: openai.OpenAI, rows: torch.Tensor) -> None:
    answer = client.embeddings.create(model="fake", input=TEXTS)  # the client asks for base64 by itself
    assert [each.index for each in answer.data] == [0, 1, 2]
    assert torch.equal(torch.tensor([each.embedding for each in answer.data]), rows)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    one = client.embeddings.create(model="fake", input=TEXTS[1], encoding_format="float")
    assert torch.allclose(torch.tensor(one.data[0].embedding), rows[1], atol=1e-6)


def test_base64_is_little_endian_float32(live: Live, rows: torch.Tensor) -> None:
    body = {"input": TEXTS, "encoding_format": "base64"}
    answer = httpx.post(live.url + "/v1/embeddings", json=body, timeout=60).json()
    raw = [base64.b64decode(each["embedding"]) for each in answer["data"]]
    assert np.array_equal(np.stack([np.frombuffer(each, "<f4") for each in raw]), rows.numpy())
    assert answer["enfold"]["plan"]["encoder"].startswith("BERT: dp")


def test_token_ids_are_texts_too(live: Live, client: openai.OpenAI, rows: torch.Tensor) -> None:
    ids = live.backend.tokenize(TEXTS).ids
    many = client.embeddings.create(model="fake", input=ids)
    assert torch.equal(torch.tensor([each.embedding for each in many.data]), rows)
    one = client.embeddings.create(model="fake", input=ids[1])
    assert len(one.data) == 1 and torch.allclose(torch.tensor(one.data[0].embedding), rows[1], atol=1e-6)


def test_pooling_and_length_can_be_chosen(live: Live, bert: Path) -> None:
    with Engine(EncoderSpec(str(bert), mode="replicate")) as engine:
        first = torch.stack(engine.encode(TEXTS, pooling="cls"))
    body = {"input": TEXTS, "pooling": "cls", "normalize": False, "encoding_format": "float"}
    answer = httpx.post(live.url + "/v1/embeddings", json=body, timeout=60).json()
    assert torch.allclose(torch.tensor([each["embedding"] for each in answer["data"]]), first, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": 5}, "input"),
        ({"input": [10**6]}, "they go from 0 to"),
        ({"input": [[5] * 500]}, "1 to 128"),
        ({"input": "a " * 400}, "more than the 128 tokens"),
        ({"input": ["a"] * 300}, "300"),
        ({"input": "a", "dimensions": 64}, "have 128"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ],
)
def test_inputs_that_can_not_be(live: Live, body: dict[str, Any], words: str) -> None:
    answer = httpx.post(live.url + "/v1/embeddings", json=body, timeout=60)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


def test_a_text_that_is_too_long_can_be_cut(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="fake", input="a " * 400, extra_body={"truncate": True}, dimensions=128)
    assert answer.usage.prompt_tokens == 128


def test_encode_gives_chosen_layers_and_masks(live: Live, bert: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    response = httpx.post(live.url + "/encode", json={"input": TEXTS, "layers": [0, 2, -1]}, timeout=60)
    assert response.status_code == 200, response.text
    found = load(response.content)
    plain, tokenizer = AutoModel.from_pretrained(bert).eval(), AutoTokenizer.from_pretrained(bert)
    for place, text in enumerate(TEXTS):
        with torch.no_grad():
            wanted = plain(**tokenizer(text, return_tensors="pt"), output_hidden_states=True)
        own = {name.removeprefix(f"{place}.encoder."): x for name, x in found.items() if name.startswith(f"{place}.")}
        assert set(own) == {
            "last_hidden_state",
            "attention_mask",
            "pooler_output",
            "hidden_states.0",
            "hidden_states.2",
            "hidden_states.-1",
        }
        assert torch.allclose(own["hidden_states.0"], wanted.hidden_states[0], atol=1e-5)
        assert torch.allclose(own["last_hidden_state"], wanted.last_hidden_state, atol=1e-5)
        assert torch.equal(own["last_hidden_state"], own["hidden_states.-1"])
        assert torch.allclose(own["pooler_output"], wanted.pooler_output, atol=1e-5)
        assert own["attention_mask"].shape == wanted.last_hidden_state.shape[:2] and bool(own["attention_mask"].all())
    refused = httpx.post(live.url + "/encode", json={"input": "a", "layers": [9]}, timeout=60)
    assert refused.status_code == 400 and "layer 9" in refused.json()["error"]["message"]


def test_an_encoder_draws_nothing(live: Live, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="is an encoder"):
        client.images.generate(prompt="a fox")
    assert httpx.post(live.url + "/v1/videos", json={"prompt": "a fox"}).status_code == 400


def test_a_killed_rank_is_replaced_and_nothing_waits_for_ever(bert: Path) -> None:
    with serving(backend_of(bert, num_replicas=2), limits=Limits(call_s=5)) as server:
        victim = server.backend.executors[0].pids[1]
        os.kill(victim, signal.SIGKILL)
        health = until(lambda: _health(server, 503, 0), 5, "health tells of the death")
        assert health["status"] == "degraded" and health["ready"]  # the other replica serves
        answers = [_embed(server).status_code for _ in range(4)]
        assert answers == [200] * 4
        until(lambda: _health(server, 200, 0), 100, "the replica is back")
        assert victim not in server.backend.executors[0].pids
        assert _embed(server).status_code == 200


def test_a_rank_that_hangs_is_a_503_and_is_replaced(bert: Path) -> None:
    with serving(backend_of(bert), limits=Limits(call_s=2)) as server:
        for pid in server.backend.executors[0].pids:
            os.kill(pid, signal.SIGSTOP)
        answer = _embed(server)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "ranks_lost"
        until(lambda: server.service.ready, 100, "the ranks are back")
        assert _embed(server).status_code == 200


def _embed(server: Live) -> httpx.Response:
    return httpx.post(server.url + "/v1/embeddings", json={"input": "a red fox"}, timeout=60)


def _health(server: Live, status: int, replica: int) -> dict[str, Any] | None:
    """Return /health if this replica is ready (200) or is not (503)."""
    told: dict[str, Any] = httpx.get(server.url + "/health").json()
    is_ready = told["replicas"][replica]["state"] == "ready"
    return told if is_ready == (status == 200) else None

"""`enfold serve` over a real port: routes, limits, batching, failures and health, with a backend without ranks."""

from __future__ import annotations

import base64
import io
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import openai
import pytest
import torch
from fake_backend import FakeBackend, Live, serving, until
from PIL import Image
from safetensors.torch import load, save

from enfold.server.limits import Limits

DRAW = "/v1/images/generations"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(FakeBackend()) as server:
        yield server


@pytest.fixture
def web(live: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=30) as client:
        yield client


def client_of(server: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30)


def post(server: Live, body: dict[str, Any], path: str = DRAW) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=30)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def picture_of(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content))


# Pictures.


def test_openai_client_gets_a_picture(live: Live) -> None:
    with client_of(live) as client:
        answer = client.images.generate(
            prompt="a red circle", n=2, size="64x48", response_format="b64_json", extra_body={"seed": 7}
        )
    assert answer.data is not None and [each.url for each in answer.data] == [None, None]
    pictures = [picture_of(base64.b64decode(each.b64_json or "")) for each in answer.data]
    assert [picture.size for picture in pictures] == [(64, 48)] * 2
    assert all(picture.convert("RGB").getpixel((5, 5)) == (220, 30, 30) for picture in pictures)
    assert [picture.info["seed"] for picture in pictures] == ["7", "8"]  # in order, one seed each
    assert pictures[0].info["prompt"] == "a red circle"
    about = answer.model_dump()["enfold"]
    assert about["seeds"] == [7, 8]
    assert [rank["rank"] for rank in about["timeline"]["ranks"]] == [0, 1]
    assert [span["stage"] for span in about["timeline"]["ranks"][1]["spans"]] == ["encode", "denoise", "decode"]
    assert about["timeline"]["queue_s"] >= 0 and about["plan"]["text_encoder"].startswith("T5: dp")


def test_a_url_leads_to_the_picture(live: Live) -> None:
    with client_of(live) as client:
        answer = client.images.generate(prompt="blue", response_format="url")
    assert answer.data is not None and answer.data[0].url is not None
    response = httpx.get(answer.data[0].url)
    assert response.headers["content-type"] == "image/png"
    assert picture_of(response.content).convert("RGB").getpixel((5, 5)) == (30, 60, 220)
    error_of(httpx.get(answer.data[0].url.replace("img_", "img_x")), 404)


def test_random_seeds_differ_and_are_told(live: Live) -> None:
    seeds = {post(live, {"prompt": "red"}).json()["enfold"]["seeds"][0] for _ in range(3)}
    assert len(seeds) == 3


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "prompt", "empty"),
        ({"prompt": "  "}, "prompt", "empty"),
        ({"prompt": 3}, "prompt", "string"),
        ({"prompt": "x", "n": 0}, "n", "greater"),
        ({"prompt": "x", "n": "2"}, "n", "integer"),
        ({"prompt": "x", "n": 9}, "n", "n is 9"),
        ({"prompt": "x", "n": True}, "n", "integer"),
        ({"prompt": "x", "size": "64"}, "size", "pattern"),
        ({"prompt": "x", "size": "4096x4096"}, "size", "16777216"),
        ({"prompt": "x", "size": "60x60"}, None, "multiple of 8"),
        ({"prompt": "x", "num_inference_steps": 1000}, "num_inference_steps", "num_inference_steps is 1000"),
        ({"prompt": "x" * 9000}, "prompt", "9000"),
        ({"prompt": "x", "negative_prompt": "x" * 9000}, "negative_prompt", "9000"),
        ({"prompt": "x", "seed": -1}, "seed", "greater"),
        ({"prompt": "x", "seed": 2**70}, "seed", "less"),
        ({"prompt": "x", "quality": "hd"}, "quality", "no such field"),
        ({"prompt": "x", "\ud800": 1}, None, "surrogate"),
        ({"prompt": "\ud800"}, None, "surrogate"),
        ({"prompt": "x", "prompt_embeds": "/etc/passwd"}, None, "base64"),
        ({"prompt": "x", "prompt_embeds": base64.b64encode(b"\x80\x04K\x01.").decode()}, None, "safetensors"),
        ({"prompt": "misfit"}, None, "can't do that"),
    ],
)
def test_wrong_values_are_a_400_that_says_why(live: Live, body: dict[str, Any], param: str | None, words: str) -> None:
    error = error_of(post_raw(live, json.dumps(body).encode()), 400)
    assert error["param"] == param and words in error["message"]
    assert error["type"] == "invalid_request_error"


def post_raw(server: Live, content: bytes, kind: str = "application/json") -> httpx.Response:
    return httpx.post(server.url + DRAW, content=content, headers={"Content-Type": kind}, timeout=30)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"x"', b"[" * 100_000, b'{"prompt": NaN}', b"\xff"])
def test_bodies_that_are_no_json_object(live: Live, content: bytes) -> None:
    error_of(post_raw(live, content), 400)


def test_not_a_number_is_no_number(live: Live) -> None:
    error = error_of(post_raw(live, b'{"prompt": "x", "guidance_scale": NaN}'), 400)
    assert error["param"] == "guidance_scale"


def test_other_content_types_and_routes(live: Live, web: httpx.Client) -> None:
    error_of(post_raw(live, b'{"prompt": "x"}', "text/plain"), 415)  # so no page elsewhere can post without asking
    error_of(post_raw(live, b"--x", "multipart/form-data; boundary=x"), 400)
    error_of(post_raw(live, b"", "multipart/form-data"), 400)
    assert error_of(web.get("/nothing"), 404)["type"] == "not_found_error"
    error_of(web.get(DRAW), 405)
    error_of(web.get("/v1/images/../../etc/passwd/content"), 404)
    assert error_of(post(live, {"prompt": "x", "model": "gpt"}), 404)["code"] == "model_not_found"


def test_a_form_is_taken_too(live: Live) -> None:
    response = httpx.post(live.url + DRAW, files={"prompt": (None, "green"), "n": (None, "2")}, timeout=30)
    assert len(response.json()["data"]) == 2, response.text
    twice = [("prompt", (None, "green")), ("prompt", (None, "red"))]
    error_of(httpx.post(live.url + DRAW, files=twice, timeout=30), 400)


# Conditioning: out as safetensors, and in again.


def test_encode_gives_safetensors_that_can_be_drawn(live: Live, web: httpx.Client) -> None:
    response = web.post("/encode", json={"input": ["abc", "abcdef"], "layers": [1]})
    assert response.headers["content-type"] == "application/vnd.safetensors"
    tensors = load(response.content)
    assert {name: x.shape for name, x in tensors.items() if name.startswith("1.")} == {
        "1.prompt_embeds": (1, 4, 8),
        "1.pooled_prompt_embeds": (1, 8),
        "1.text_encoder.hidden_states.1": (1, 4, 8),
    }
    assert float(tensors["0.prompt_embeds"][0, 0, 0]) == 3
    in_base64 = base64.b64encode(response.content).decode()
    for index, value in ((0, 3), (1, 6)):
        body = {"prompt_embeds": in_base64, "prompt_embeds_index": index, "seed": 0}
        (drawn,) = web.post(DRAW, json=body).json()["data"]
        assert picture_of(base64.b64decode(drawn["b64_json"])).convert("RGB").getpixel((9, 9)) == (value,) * 3
    error_of(web.post(DRAW, json={"prompt_embeds": in_base64, "prompt_embeds_index": 2}), 400)
    as_file = {"prompt_embeds": ("x.safetensors", response.content), "prompt_embeds_index": (None, "1")}
    (drawn,) = web.post(DRAW, files=as_file).json()["data"]
    assert picture_of(base64.b64decode(drawn["b64_json"])).convert("RGB").getpixel((9, 9)) == (6, 6, 6)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"prompt_embeds": torch.tensor([[float("nan")]])}, "NaN"),
        ({"prompt_embeds": torch.tensor([[float("inf")]])}, "infinite"),
        ({"prompt_embeds": torch.ones(2, 3)}, "(2, 3)"),
        ({"prompt_embeds": torch.ones(1)}, "(1,)"),
        ({"prompt_embeds": torch.ones(1, 0)}, "empty"),
        ({"prompt_embeds": torch.ones(1, 4, dtype=torch.uint8)}, "uint8"),
        ({"something": torch.ones(1, 4)}, "no prompt_embeds"),
        ({"9999999.prompt_embeds": torch.ones(1, 4)}, "no prompt_embeds"),
    ],
)
def test_conditioning_that_can_not_be(live: Live, tensors: dict[str, torch.Tensor], words: str) -> None:
    error = error_of(post(live, {"prompt_embeds": base64.b64encode(save(tensors)).decode()}), 400)
    assert words in error["message"]


def test_a_safetensors_header_that_lies(live: Live) -> None:
    header = b'{"prompt_embeds":{"dtype":"F32","shape":[1,1000000000],"data_offsets":[0,4000000000]}}'
    content = struct.pack("<Q", len(header)) + header + b"\0" * 4
    error_of(post(live, {"prompt_embeds": base64.b64encode(content).decode()}), 400)
    huge = struct.pack("<Q", 2**60) + b"{}"
    error_of(post(live, {"prompt_embeds": base64.b64encode(huge).decode()}), 400)


# Limits.


def test_bodies_that_are_too_large_or_too_slow() -> None:
    with serving(FakeBackend(), limits=Limits(body_bytes=1000, body_s=0.3)) as server:
        assert error_of(post(server, {"prompt": "x" * 2000}), 413)["code"] == "body_too_large"

        def pieces() -> Iterator[bytes]:  # without Content-Length
            yield from [b"x" * 300] * 10

        kind = {"Content-Type": "application/json"}
        error_of(httpx.post(server.url + DRAW, content=pieces(), headers=kind), 413)
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as slow:
            slow.sendall(
                b"POST /encode HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
            )
            assert slow.recv(4096).startswith(b"HTTP/1.1 408")
        assert post(server, {"prompt": "red"}).status_code == 200


def test_a_full_queue_is_a_429() -> None:
    with serving(FakeBackend(), limits=Limits(pending=1)) as server, ThreadPoolExecutor(3) as threads:
        first = threads.submit(post, server, {"prompt": "hold"})
        until(lambda: server.backend.batches, 5, "the first runs")
        second = threads.submit(post, server, {"prompt": "red"})
        until(lambda: len(server.service.queue) == 1, 5, "the second waits")
        refused = post(server, {"prompt": "green"})
        assert error_of(refused, 429)["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        server.backend.release.set()
        assert (first.result().status_code, second.result().status_code) == (200, 200)


def test_a_deadline_ends_the_wait_and_the_work() -> None:
    with serving(FakeBackend()) as server, ThreadPoolExecutor(2) as threads:
        running = threads.submit(post, server, {"prompt": "hold", "deadline_s": 0.6})
        until(lambda: server.backend.batches, 5, "the first runs")
        began = time.monotonic()
        waiting = threads.submit(post, server, {"prompt": "late", "deadline_s": 0.3})
        assert error_of(waiting.result(), 408)["code"] == "deadline_exceeded"
        assert time.monotonic() - began < 5
        error_of(running.result(), 408)
        server.backend.release.set()
        assert post(server, {"prompt": "red"}).status_code == 200
        assert server.backend.batches == [["hold"], ["red"]]  # what was late never ran


def test_a_client_that_goes_is_dropped_before_its_work_starts() -> None:
    with serving(FakeBackend()) as server, ThreadPoolExecutor(1) as threads:
        first = threads.submit(post, server, {"prompt": "hold"})
        until(lambda: server.backend.batches, 5, "the first runs")
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + DRAW, json={"prompt": "gone"}, timeout=0.4)
        until(lambda: len(server.service.queue) == 0, 5, "the request of the client that went is dropped")
        server.backend.release.set()
        assert first.result().status_code == 200
        assert post(server, {"prompt": "red"}).status_code == 200
        assert server.backend.batches == [["hold"], ["red"]]


def test_a_key_is_needed_where_there_is_one() -> None:
    with serving(FakeBackend(), api_key="secret") as server:
        assert error_of(post(server, {"prompt": "x"}), 401)["code"] == "invalid_api_key"
        for given in ("Bearer wrong", "secret", "Bearer secret2", "Bearer"):
            error_of(httpx.get(server.url + "/v1/models", headers={"Authorization": given}), 401)
        error_of(httpx.get(server.url + "/metrics"), 401)
        error_of(httpx.get(server.url + "/openapi.json"), 401)
        right = {"Authorization": "Bearer secret"}
        answer = httpx.post(server.url + DRAW, json={"prompt": "x", "response_format": "url"}, headers=right)
        assert httpx.get(answer.json()["data"][0]["url"]).status_code == 200  # who has the URL may see it
        for path in ("/", "/page.js", "/health", "/health/live"):
            assert httpx.get(server.url + path).status_code == 200
        assert openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret").models.list().data[0].id == "fake"


# Batches.


def test_requests_that_agree_share_a_batch_and_others_do_not() -> None:
    settings = {"batching_max_size": 3, "batching_delay_s": 0.4}
    with serving(FakeBackend(), **settings) as server, ThreadPoolExecutor(4) as threads:
        bodies = [{"prompt": f"p{i}", "num_inference_steps": 3 if i < 3 else 4, "seed": i} for i in range(4)]
        answers = list(threads.map(lambda body: post(server, body).json(), bodies))
        assert sorted(map(sorted, server.backend.batches)) == [["p0", "p1", "p2"], ["p3"]]
        assert [answer["enfold"]["timeline"]["batch_size"] for answer in answers] == [3, 3, 3, 1]
        assert [answer["enfold"]["seeds"] for answer in answers] == [[0], [1], [2], [3]]


def test_only_the_request_at_fault_fails_and_the_next_one_works() -> None:
    settings = {"batching_max_size": 3, "batching_delay_s": 0.4}
    with serving(FakeBackend(), **settings) as server, ThreadPoolExecutor(3) as threads:
        red, bad, blue = threads.map(lambda word: post(server, {"prompt": word}), ["red", "boom", "blue"])
        assert (red.status_code, blue.status_code) == (200, 200)
        assert "ValueError: boom" in error_of(bad, 500)["message"]
        assert len(server.backend.batches) == 4  # all three, then one by one
        assert post(server, {"prompt": "red"}).status_code == 200
        assert server.backend.restarts == 0 and server.service.ready


def test_replicas_serve_at_the_same_time() -> None:
    with serving(FakeBackend(num_replicas=2)) as server, ThreadPoolExecutor(2) as threads:
        both = [threads.submit(post, server, {"prompt": "hold"}) for _ in range(2)]
        until(lambda: len(server.backend.batches) == 2, 5, "both replicas work")
        server.backend.release.set()
        replicas = {each.result().json()["enfold"]["timeline"]["replica"] for each in both}
        assert replicas == {0, 1}


# Ranks that are lost.


@pytest.mark.parametrize("word", ["kill", "hang", "memory"])
def test_lost_ranks_are_a_503_and_come_back(word: str) -> None:
    with serving(FakeBackend(restart_s=0.5), limits=Limits(call_s=0.2)) as server:
        lost = post(server, {"prompt": word})
        assert error_of(lost, 503)["code"] == "ranks_lost"
        assert int(lost.headers["retry-after"]) >= 1
        health = httpx.get(server.url + "/health")
        assert health.status_code == 503
        assert health.json()["replicas"][0]["state"] == "restarting"
        assert httpx.get(server.url + "/health/live").status_code == 200
        assert httpx.get(server.url + "/health/ready").status_code == 503
        assert post(server, {"prompt": "red"}).status_code == 200  # waits until the ranks are back
        assert server.backend.restarts == 1
        health = httpx.get(server.url + "/health")
        assert health.status_code == 200 and health.json()["replicas"][0]["restarts"] == 1


def test_all_requests_of_a_lost_batch_get_a_503_and_those_that_wait_an_answer() -> None:
    settings = {"batching_max_size": 2, "batching_delay_s": 0.3}
    with serving(FakeBackend(), **settings) as server, ThreadPoolExecutor(3) as threads:
        lost = [threads.submit(post, server, {"prompt": word}) for word in ("kill slow", "red slow")]
        until(lambda: server.backend.batches, 5, "the batch runs")
        waiting = threads.submit(post, server, {"prompt": "blue"})
        assert [each.result().status_code for each in lost] == [503, 503]
        assert waiting.result().status_code == 200


def test_ranks_that_end_while_nothing_runs_cost_no_request() -> None:
    with serving(FakeBackend(num_replicas=1)) as server:
        server.backend.alive[0][1] = False
        health = httpx.get(server.url + "/health")
        assert health.status_code == 503 and health.json()["replicas"][0]["ranks"] == ["alive", "gone"]
        assert post(server, {"prompt": "red"}).status_code == 200
        assert server.backend.restarts == 1


def test_a_replica_that_does_not_start_is_tried_again() -> None:
    with serving(FakeBackend(num_replicas=2, refuse_restarts=1)) as server:
        server.backend.alive[1][0] = False
        told = until(lambda: _state(server, 1)["error"], 5, "health tells the error")
        assert httpx.get(server.url + "/health").json()["status"] == "degraded"
        assert httpx.get(server.url + "/health").status_code == 200  # the other replica is there
        until(lambda: _state(server, 1)["error"] is None, 10, "it starts in the end")
        assert told and _state(server, 1)["restarts"] == 1


def _state(server: Live, replica: int) -> dict[str, Any]:
    state: dict[str, Any] = httpx.get(server.url + "/health").json()["replicas"][replica]
    return state


def test_health_while_the_model_is_loaded() -> None:
    with serving(FakeBackend(load_s=1.0), wait=False) as server:
        health = httpx.get(server.url + "/health")
        assert health.status_code == 503
        told = health.json()
        assert (told["status"], told["live"], told["ready"], told["replicas"]) == ("loading", True, False, [])
        refused = post(server, {"prompt": "red"})
        assert error_of(refused, 503)["code"] == "loading" and "retry-after" in refused.headers
        assert httpx.get(server.url + "/v1/models").json()["data"][0]["id"] == "fake"
        until(lambda: server.service.ready, 10, "loaded")
        assert post(server, {"prompt": "red"}).status_code == 200


# The end.


def test_draining_finishes_what_runs_and_refuses_more() -> None:
    with serving(FakeBackend()) as server, ThreadPoolExecutor(3) as threads:
        running = threads.submit(post, server, {"prompt": "hold"})
        until(lambda: server.backend.batches, 5, "it runs")
        waiting = threads.submit(post, server, {"prompt": "red"})
        until(lambda: len(server.service.queue) == 1, 5, "one waits")
        drain = threads.submit(server.service.drain, 5.0)
        until(lambda: server.service.queue.closed, 5, "draining")
        assert error_of(post(server, {"prompt": "green"}), 503)["code"] == "shutting_down"
        assert httpx.get(server.url + "/health").json()["status"] == "stopping"
        server.backend.release.set()
        assert (running.result().status_code, waiting.result().status_code) == (200, 200)
        drain.result()
        assert server.backend.killed


def test_draining_does_not_wait_for_ever() -> None:
    with serving(FakeBackend()) as server, ThreadPoolExecutor(2) as threads:
        running = threads.submit(post, server, {"prompt": "hold"})
        until(lambda: server.backend.batches, 5, "it runs")
        waiting = threads.submit(post, server, {"prompt": "red"})
        until(lambda: len(server.service.queue) == 1, 5, "one waits")
        began = time.monotonic()
        server.service.drain(0.3)
        assert time.monotonic() - began < 3
        error_of(running.result(), 503)
        error_of(waiting.result(), 503)


# Metrics, models, the document.


def test_metrics_tell_what_happened(web: httpx.Client, live: Live) -> None:
    post(live, {"prompt": "red again"})
    post(live, {"prompt": "boom"})
    lines = web.get("/metrics").text.splitlines()
    figures = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(figures['enfold_requests_total{method="POST",route="/v1/images/generations",status="200"}']) >= 1
    assert float(figures['enfold_errors_total{type="EncodeError"}']) >= 1
    assert float(figures['enfold_texts_total{found="in_cache"}']) >= 1
    assert float(figures['enfold_rank_busy_seconds_total{rank="1",replica="0",stage="denoise"}']) > 0
    assert float(figures['enfold_stage_seconds_count{stage="decode"}']) >= 1
    assert float(figures['enfold_rank_alive{rank="1",replica="0"}']) == 1
    assert float(figures["enfold_queue_length"]) == 0
    assert float(figures["enfold_queue_wait_seconds_count"]) >= 2
    assert float(figures['enfold_batch_size_count{kind="generate"}']) >= 2
    info = next(name for name in figures if name.startswith("enfold_encoder_info"))
    assert all(part in info for part in ('encoder="text_encoder"', 'mode="dp"', 'layout="1x2x1"', "dp was asked"))
    assert all("img_" not in name and "video_" not in name for name in figures)  # ids would make endless series


def test_models_and_a_pipeline_without_vectors(live: Live, web: httpx.Client) -> None:
    with client_of(live) as client:
        (model,) = client.models.list().data
        assert client.models.retrieve("fake").id == model.id == "fake"
        with pytest.raises(openai.BadRequestError, match="POST /encode"):
            client.embeddings.create(model="fake", input="a text")
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("other")
    about = model.model_dump()["enfold"]
    assert about["defaults"]["num_inference_steps"] == 2 and about["limits"]["steps"] == 200
    assert "422" not in web.get("/openapi.json").text


# Clips.


@pytest.fixture(scope="module")
def clips() -> Iterator[Live]:
    with serving(FakeBackend(is_video=True)) as server:
        yield server


@pytest.mark.filterwarnings("ignore:.*Sora API.*")
def test_openai_client_gets_a_clip(clips: Live) -> None:
    with client_of(clips) as client:
        started = client.videos.create(prompt="red slow", size="64x32", extra_body={"num_frames": 5, "fps": 10})  # type: ignore[arg-type]
        assert started.status in ("queued", "in_progress") and started.object == "video"
        done = until(lambda: _finished(client, started.id), 10, "the clip is there")
        assert (done.status, done.progress, done.size, done.seconds) == ("completed", 100, "64x32", "0.5")
        clip = picture_of(client.videos.download_content(done.id).content)
        assert (clip.format, clip.size, getattr(clip, "n_frames", 1)) == ("GIF", (64, 32), 5)
        assert done.id in [each.id for each in client.videos.list().data]
        assert client.videos.delete(done.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.videos.retrieve(done.id)


def _finished(client: openai.OpenAI, key: str) -> Any:
    video = client.videos.retrieve(key)
    return video if video.status in ("completed", "failed") else None


def test_clips_are_cancelled_listed_and_fail_in_words(clips: Live) -> None:
    def start(**body: Any) -> str:
        return str(post(clips, body, "/v1/videos").json()["id"])

    with httpx.Client(base_url=clips.url) as web:
        held = start(prompt="hold")
        waiting = start(prompt="red", seconds=1, fps=4)
        assert web.get(f"/v1/videos/{waiting}").json()["seconds"] == "1"
        error_of(web.get(f"/v1/videos/{waiting}/content"), 404)
        assert web.post(f"/v1/videos/{waiting}/cancel").json()["status"] == "cancelled"
        listed = web.get("/v1/videos", params={"limit": 1}).json()
        assert (listed["first_id"], listed["has_more"]) == (waiting, True)
        after = web.get("/v1/videos", params={"after": waiting}).json()
        assert after["data"][0]["id"] == held and waiting not in [each["id"] for each in after["data"]]
        error_of(web.get("/v1/videos", params={"limit": 0}), 400)
        error_of(web.get("/v1/videos", params={"after": "nothing"}), 404)
        assert web.delete(f"/v1/videos/{held}").json()["deleted"]  # it is drawn to its end and thrown away
        clips.backend.release.set()
        failed = start(prompt="boom")
        told = until(lambda: _failed(web, failed), 10, "the clip fails")
        assert told["error"]["code"] == "failed_on_ranks" and "boom" in told["error"]["message"]
        assert [["red"]] != clips.backend.batches[-1:] and ["red"] not in clips.backend.batches
        assert web.post(f"/v1/videos/{failed}/cancel").json()["status"] == "failed"
        for path in ("", "/content"):
            error_of(web.get(f"/v1/videos/{held}{path}"), 404)
        error_of(web.delete("/v1/videos/nothing"), 404)


def _failed(web: httpx.Client, key: str) -> Any:
    told = web.get(f"/v1/videos/{key}").json()
    return told if told["status"] == "failed" else None


def test_pictures_and_clips_name_each_other(clips: Live, live: Live) -> None:
    assert "/v1/videos" in error_of(post(clips, {"prompt": "x"}), 400)["message"]
    assert "/v1/images" in error_of(post(live, {"prompt": "x"}, "/v1/videos"), 400)["message"]
    error_of(post(clips, {"prompt": "x", "num_frames": 1000}, "/v1/videos"), 400)


def test_loading_that_fails_is_told() -> None:
    failed: list[BaseException] = []
    from enfold.server.service import Service, Settings

    service = Service(lambda: FakeBackend(load_error=ValueError("no weights")), Settings("fake", "diffusion"))
    service.start(on_failure=failed.append)
    until(lambda: failed, 5, "the failure is told")
    assert str(failed[0]) == "no weights" and not service.ready
    service.drain(0.1)


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("enfold")}


def test_no_thread_is_left_after_draining() -> None:
    before = _threads()
    with serving(FakeBackend(num_replicas=2)) as server:
        post(server, {"prompt": "red"})
        assert {"enfold-replica-0", "enfold-replica-1"} <= {thread.name for thread in _threads() - before}
        server.service.drain(2)
        until(lambda: not _threads() - before, 5, "threads end")

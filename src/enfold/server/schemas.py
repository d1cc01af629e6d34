"""The bodies of requests and answers. Fields that OpenAI does not have stand last in each; unknown ones are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Size = Annotated[str, StringConstraints(pattern=r"^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$")]
"""WIDTHxHEIGHT in pixels; auto is what the model does by itself."""

LARGEST_SEED = 2**53 - 1
"""JSON readers keep every whole number up to here."""

LARGEST = 2**31 - 1
Count = Annotated[int, Field(ge=1, le=LARGEST)]
Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED)]
Scale = Annotated[float, Field(ge=-1e4, le=1e4, allow_inf_nan=False)]
Deadline = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Layer = Annotated[int, Field(ge=-1000, le=1000)]
TokenId = Annotated[int, Field(ge=0, le=LARGEST)]


class Body(BaseModel):
    """A request body."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class Drawing(Body):
    """What pictures and clips have in common."""

    prompt: Annotated[str, Field(description="What to draw. With prompt_embeds it is only a label.")] = ""
    model: str | None = None
    size: Size | None = None
    user: Annotated[str | None, Field(description="Accepted for OpenAI's clients; not used.")] = None
    seed: Annotated[Seed | None, Field(description="Picture i has seed + i; left out: a random one.")] = None
    negative_prompt: str | None = None
    num_inference_steps: Count | None = None
    guidance_scale: Scale | None = None
    true_cfg_scale: Scale | None = None
    max_sequence_length: Count | None = None
    prompt_embeds: Annotated[
        str | None, Field(description="A safetensors file of POST /encode in base64, in place of the prompt.")
    ] = None
    prompt_embeds_index: Annotated[int, Field(ge=0, le=LARGEST, description="Which text of that file.")] = 0
    deadline_s: Annotated[Deadline | None, Field(description="Give up after so many seconds.")] = None


class ImagesBody(Drawing):
    """POST /v1/images/generations."""

    n: Count = 1
    response_format: Literal["b64_json", "url"] = "b64_json"
    output_format: Literal["png"] = "png"


class VideosBody(Drawing):
    """POST /v1/videos. seconds times fps is the number of frames, where num_frames is left out."""

    seconds: Annotated[float | None, Field(gt=0, le=3600, allow_inf_nan=False)] = None
    num_frames: Count | None = None
    fps: Annotated[float, Field(ge=1, le=60, allow_inf_nan=False)] = 8.0


class EmbeddingsBody(Body):
    """POST /v1/embeddings: texts, or texts as token ids."""

    input: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[Count | None, Field(description="Only the model's own size is possible.")] = None
    user: Annotated[str | None, Field(description="Accepted for OpenAI's clients; not used.")] = None
    pooling: Annotated[
        Literal["mean", "cls", "last"] | None, Field(description="Left out: what the server was started with.")
    ] = None
    normalize: Annotated[bool, Field(description="Whether vectors are scaled to length 1.")] = True
    truncate: Annotated[bool, Field(description="Whether texts that are too long are cut off, or refused.")] = False
    deadline_s: Deadline | None = None


class EncodeBody(Body):
    """POST /encode: all that the encoders make of texts."""

    input: str | Annotated[list[str], Field(min_length=1)]
    model: str | None = None
    max_sequence_length: Count | None = None
    layers: Annotated[
        list[Layer], Field(max_length=64, description="Hidden states wanted, counted as Transformers does.")
    ] = []
    deadline_s: Deadline | None = None


class ErrorDetail(BaseModel):
    """What went wrong, in words."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Every answer that is no 2xx."""

    error: ErrorDetail


class Picture(BaseModel):
    """One picture, in base64 or as a URL of this server."""

    b64_json: str | None = None
    url: str | None = None


class ImagesAnswer(BaseModel):
    """Pictures, in the order of their seeds. `enfold`: seeds, timeline, texts of the batch, the plan in words."""

    created: int
    data: list[Picture]
    output_format: str
    size: str
    enfold: dict[str, Any]


class Video(BaseModel):
    """A clip that is drawn, or was."""

    id: str
    object: Literal["video"] = "video"
    model: str
    status: Literal["queued", "in_progress", "completed", "failed", "cancelled"]
    progress: int
    created_at: int
    completed_at: int | None
    expires_at: int | None
    prompt: str
    seconds: str
    size: str
    error: dict[str, str] | None
    enfold: dict[str, Any] | None


class VideoList(BaseModel):
    """Clips, newest first."""

    object: Literal["list"] = "list"
    data: list[Video]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedVideo(BaseModel):
    """A clip that is forgotten."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: bool = True


class Embedding(BaseModel):
    """One vector: numbers, or little-endian float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsAnswer(BaseModel):
    """Vectors in the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: dict[str, int]
    enfold: dict[str, Any]


class Model(BaseModel):
    """The model that is served. `enfold`: its type, defaults, limits and plans."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["enfold"] = "enfold"
    enfold: dict[str, Any]


class ModelList(BaseModel):
    """The one model."""

    object: Literal["list"] = "list"
    data: list[Model]


class Health(BaseModel):
    """The state of the server, of its replicas and their ranks."""

    status: Literal["loading", "ready", "degraded", "restarting", "stopping"]
    live: bool
    ready: bool
    model: str
    waiting: int
    replicas: list[dict[str, Any]]

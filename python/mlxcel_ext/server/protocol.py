"""Request bodies of the API. null means the default, unknown fields are ignored, a wrong type is a 400.

Ranges are part of the types, so the OpenAPI document states them, and are the engine's own (RANGES); what
depends on the model (vocabulary, context) is checked by the engine.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from ..sampling_params import MAX_COUNT, MAX_STOPS, RANGES


def _range(name: str) -> Meta:
    low, high = RANGES[name]
    return Meta(ge=low, le=high)


# Both ways of writing 64 bits: a negative seed is its two's complement.
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
StopString = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, _range("min_tokens")]
Positive = Annotated[int, _range("max_tokens")]
TokenId = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
MAX_BIASES = 65536
Choices = Annotated[int, Meta(ge=1, le=128)]
TopLogprobs = Annotated[int, _range("logprobs")]


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaSpec(Struct):
    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaSpec | None = None


class StructuredOutputs(Struct):
    """Exactly one of the five."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=4096)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class GenerationRequest(Struct, kw_only=True):
    """What completions and chat completions have in common."""

    model: str | None = None
    min_tokens: Count | None = None
    temperature: Annotated[float, _range("temperature")] | None = None
    top_p: Annotated[float, _range("top_p")] | None = None
    top_k: Annotated[int, _range("top_k")] | None = None
    min_p: Annotated[float, _range("min_p")] | None = None
    seed: Seed | None = None
    n: Choices | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS["stop"])] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOPS["stop_token_ids"])] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: Annotated[float, _range("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, _range("frequency_penalty")] | None = None
    repetition_penalty: Annotated[float, _range("repetition_penalty")] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, _range("logit_bias")]], Meta(max_length=MAX_BIASES)] | None
    ) = None
    prompt_logprobs: Annotated[int, _range("prompt_logprobs")] | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: Positive | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    user: str | None = None


Prompt = str | list[str | int | list[int]]


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/completions. prompt is text, token ids, or a list of either; max_tokens 0 scores it alone."""

    prompt: Prompt
    max_tokens: Count | None = None
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    best_of: Choices | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class TextPart(Struct):
    type: str
    text: str | None = None


class FunctionCall(Struct):
    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(Struct):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class ChatMessage(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class FunctionSpec(Struct):
    name: Annotated[str, Meta(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct):
    function: FunctionSpec
    type: Literal["function"] = "function"


class NamedFunction(Struct):
    name: str


class NamedToolChoice(Struct):
    function: NamedFunction
    type: Literal["function"] = "function"


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[list[Tool], Meta(max_length=512)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TokenizeRequest(Struct, kw_only=True):
    """Body of POST /tokenize: a text, or messages for the chat template."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None
    skip_special_tokens: bool | None = None


class ModelCard(Struct):
    id: str
    max_model_len: int
    created: int
    root: str
    object: str = "model"
    owned_by: str = "mlxcel-ext"


class PromptTokensDetails(Struct):
    cached_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Struct):
    error: ErrorDetail


encode = msgspec.json.Encoder().encode

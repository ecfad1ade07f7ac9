"""Chat messages as chat templates take them, and the prompt text they render to."""

from __future__ import annotations

import json
import uuid
from typing import Any

import msgspec

from .errors import bad_request
from .protocol import ChatCompletionRequest, ChatMessage, ToolCall
from .state import ServerState
from .tools import described


def as_template_messages(state: ServerState, messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """All messages; a 400 for more than the context has tokens, each of them being one at least."""
    limit = state.engine.max_model_len
    if len(messages) > limit:
        raise bad_request(
            f"This model's context is {limit} tokens; {len(messages)} messages have more",
            "messages",
            "context_length_exceeded",
        )
    return [_as_template_message(message, index) for index, message in enumerate(messages)]


def _as_template_message(message: ChatMessage, position: int) -> dict[str, Any]:
    """Text parts joined, calls with their arguments as objects, "developer" as "system"."""
    where = f"messages[{position}]"
    out: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    content = message.content
    if isinstance(content, list):
        texts = []
        for part in content:
            if part.type != "text" or part.text is None:
                raise bad_request(
                    f"{where}.content: this model reads parts of type text alone, not {part.type!r}",
                    f"{where}.content",
                    "unsupported_value",
                )
            texts.append(part.text)
        content = "\n".join(texts)
    if content is None and not message.tool_calls:
        raise bad_request(f"{where}.content must be a text", f"{where}.content", "invalid_type")
    out["content"] = content or ""
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            out[name] = value
    if message.tool_calls:
        out["tool_calls"] = [_call(call, f"{where}.tool_calls") for call in message.tool_calls]
    return out


def _call(call: ToolCall, where: str) -> dict[str, Any]:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise bad_request(
                f"{where}: function.arguments is not valid JSON", where, "invalid_value"
            ) from None
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": "function", "function": function, **({} if call.id is None else {"id": call.id})}


def render(state: ServerState, request: ChatCompletionRequest) -> str:
    """The prompt of a chat request; a 400 where the template refuses the messages."""
    messages = as_template_messages(state, request.messages)
    use_tools = bool(request.tools) and request.tool_choice != "none"
    tools = [msgspec.to_builtins(tool) for tool in request.tools or []] if use_tools else None
    kwargs = {**state.settings.chat_template_kwargs, **(request.chat_template_kwargs or {})}
    if request.continue_final_message:
        if request.add_generation_prompt:
            raise bad_request(
                "continue_final_message and add_generation_prompt exclude each other",
                "continue_final_message",
                "invalid_value",
            )
        return _render_open(state, messages, tools, kwargs)
    add = request.add_generation_prompt is not False
    return render_messages(state, messages, tools, add_generation_prompt=add, kwargs=kwargs)


def _render_open(
    state: ServerState,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    kwargs: dict[str, Any],
) -> str:
    """The prompt up to the end of the final message's text, for the model to go on from there."""
    final = messages[-1]
    if final["role"] != "assistant" or not final["content"]:
        raise bad_request(
            "continue_final_message wants a final message of the assistant with a text",
            "continue_final_message",
            "invalid_value",
        )
    # A mark shows where that text ends: the text itself may stand elsewhere too, even in the template's own words.
    mark = uuid.uuid4().hex
    marked = [*messages[:-1], {**final, "content": final["content"] + mark}]
    text, found, _ = render_messages(
        state, marked, tools, add_generation_prompt=False, kwargs=kwargs
    ).rpartition(mark)
    if not found:
        raise bad_request(
            "The model's chat template does not show the final message", "messages", "template_error"
        )
    return text


def render_messages(
    state: ServerState,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = True,
    kwargs: dict[str, Any] | None = None,
) -> str:
    """Text of the messages by the model's template."""
    template = state.model.chat_template
    if template is None:
        raise bad_request(
            "This model has no chat template; use /v1/completions", "messages", "no_chat_template"
        )
    if tools and "tools" not in template.source:
        messages = _with_instructions(messages, described(tools))
        tools = None
    reserved = {"messages", "tools", "add_generation_prompt"} & set(kwargs or ())
    if reserved:
        raise bad_request(
            f"chat_template_kwargs must not hold {', '.join(sorted(reserved))}",
            "chat_template_kwargs",
            "invalid_value",
        )
    try:
        return template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **(kwargs or {})
        )
    except ValueError as error:
        raise bad_request(str(error), "messages", "template_error") from None


def _with_instructions(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    if messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}".strip()}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]

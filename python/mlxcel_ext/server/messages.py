"""Chat messages as chat templates take them, and the prompt text they render to."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from .errors import bad_request
from .protocol import ChatCompletionRequest, ChatMessage, ToolCall
from .state import ServerState
from .tools import described


def as_template_message(message: ChatMessage, position: int) -> dict[str, Any]:
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
    messages = [as_template_message(message, index) for index, message in enumerate(request.messages)]
    use_tools = bool(request.tools) and request.tool_choice != "none"
    tools = [msgspec.to_builtins(tool) for tool in request.tools or []] if use_tools else None
    return render_messages(
        state,
        messages,
        tools,
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final=bool(request.continue_final_message),
        kwargs={**state.settings.chat_template_kwargs, **(request.chat_template_kwargs or {})},
    )


def render_messages(
    state: ServerState,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = True,
    continue_final: bool = False,
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
    if continue_final and add_generation_prompt:
        add_generation_prompt = False
    try:
        text = template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **(kwargs or {})
        )
    except ValueError as error:
        raise bad_request(str(error), "messages", "template_error") from None
    if continue_final:
        last = messages[-1]["content"].strip()
        end = text.rfind(last) + len(last) if last in text else len(text)
        text = text[:end]
    return text


def _with_instructions(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    if messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}".strip()}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]

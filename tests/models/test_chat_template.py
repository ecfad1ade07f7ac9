"""Chat templates: what Hugging Face's templates may use, and what happens when they fail."""

from __future__ import annotations

import json

import pytest

from mlxcel_ext.models import ChatTemplate

USER = [{"role": "user", "content": "Hi <b>"}]


def test_blocks_leave_no_whitespace():
    source = "{% for m in messages %}\n    {% if m.role == 'user' %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}"
    assert ChatTemplate(source).render(USER) == "Hi <b>\n"


def test_special_tokens_and_keywords_are_variables():
    template = ChatTemplate("{{ bos_token }}{{ thinking }}{{ add_generation_prompt }}", {"bos_token": "<s>"})
    assert template.render(USER, add_generation_prompt=False, thinking="yes") == "<s>yesFalse"


def test_tojson_is_plain_json():
    template = ChatTemplate("{{ tools | tojson }}|{{ tools[0] | tojson(indent=1) }}")
    tools = [{"type": "function", "a": "<é>"}]
    plain, indented = template.render(USER, tools=tools).split("|")
    assert plain == '[{"type": "function", "a": "<é>"}]'
    assert indented == json.dumps(tools[0], indent=1, ensure_ascii=False)


def test_loop_controls_and_generation_blocks():
    source = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{% generation %}{{ i }}{% endgeneration %}{% endfor %}"
    assert ChatTemplate(source).render(USER) == "01"


def test_strftime_now():
    assert ChatTemplate("{{ strftime_now('%Y') | int > 2000 }}").render(USER) == "True"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ raise_exception('roles must alternate') }}", r"refuses the messages: roles must alternate"),
        ("{{ messages[0].content.nothing.here }}", r"failed: UndefinedError"),
        ("{{ 1 / 0 }}", r"failed: ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", r"failed: TypeError"),
        ("{{ ''.__class__.__mro__ }}", r"failed: SecurityError"),
        ("{{ messages.append(1) }}", r"failed: SecurityError"),
        ("{% for i in range(10000000) %}{% endfor %}", r"failed: OverflowError"),
    ],
)
def test_failing_template_is_a_value_error(source, text):
    with pytest.raises(ValueError, match=rf"\[chat_template\] .*{text}"):
        ChatTemplate(source).render(USER)


def test_syntax_error_names_the_line():
    with pytest.raises(ValueError, match=r"\[chat_template\] line 2: "):
        ChatTemplate("fine\n{% if %}")


def test_folder_with_named_templates(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.from_folder(tmp_path, {})
    assert template.render(USER) == "plain"
    assert template.render(USER, tools=[{}]) == "tools"


def test_jinja_file_comes_before_the_config(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "config"}))
    assert ChatTemplate.from_folder(tmp_path, {}).render(USER) == "config"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ChatTemplate.from_folder(tmp_path, {}).render(USER) == "file"


def test_folder_without_template(tmp_path):
    assert ChatTemplate.from_folder(tmp_path, {}) is None
    assert ChatTemplate.from_gguf({}, {}) is None


def test_odd_template_field_is_a_value_error(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "x"}]}))
    with pytest.raises(ValueError, match="chat_template must be a string, or a list"):
        ChatTemplate.from_folder(tmp_path, {})

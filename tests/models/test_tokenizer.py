"""Tokenizers from GGUF metadata and from tokenizer.json; `tokenizers` and `sentencepiece` are the references."""

from __future__ import annotations

import io
import json
import random
import threading

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from mlxcel_ext.models import Tokenizer
from mlxcel_ext.models.gguf import GGUFFile
from mlxcel_ext.models.gguf_tokenizer import PRE_TOKENIZERS
from mlxcel_ext.models.tokenizer import LONG

TEXT = "The quick brown fox's 12345 jumps over  the lazy dog.\n\n\tÜber größere Bäume: 日本語, 👩‍👧 naïve café!\r\n"
CORPUS = [
    TEXT,
    "We're here; they'll say \"hello world\" 2026 times...",
    "foo_bar(x) = y**2  # comment",
    TEXT.upper(),
] * 4


@pytest.fixture(scope="module")
def smollm2(smollm2_path) -> Tokenizer:
    return Tokenizer.from_gguf(GGUFFile(smollm2_path).metadata, "smollm2")


@pytest.fixture(scope="module")
def trained() -> tokenizers.Tokenizer:
    """A byte-level BPE of at most 600 tokens, as tokenizer.json files hold them."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|start|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def as_metadata(tokenizer: tokenizers.Tokenizer, pre: str, **more: object) -> dict[str, object]:
    """What a converter writes for a byte-level tokenizer."""
    state = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t.startswith("<|") and len(t) > 2 else 1 for t in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["merges"]],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def test_smollm2_known_ids(smollm2):
    assert smollm2.encode("The capital of France is Paris.<|im_end|>") == [
        504,
        3575,
        282,
        4649,
        314,
        7042,
        30,
        2,
    ]
    digits = [smollm2.token_to_id(digit) for digit in "2026"]
    assert smollm2.encode("2026 日本語") == [*digits, *smollm2.encode(" 日本語")]
    assert smollm2.eos_token_ids == (2, 0)
    assert smollm2.vocab_size == 49152
    assert smollm2.special_tokens["bos_token"] == "<|im_start|>"
    assert smollm2.id_to_token(504) == "The"
    assert smollm2.token_to_id("<|im_end|>") == 2
    assert smollm2.is_special(2)
    assert not smollm2.is_special(504)


def test_smollm2_round_trips(smollm2):
    for text in [*CORPUS, "", " ", "\n", "a" * 1000]:
        assert smollm2.decode(smollm2.encode(text)) == text


def test_long_texts_have_the_ids_of_the_library_s_plain_calls(any_tokenizer):
    """They take the batch calls."""
    for text in ("word " * 2 * LONG, "<|im_start|>user\n" + "naïve 中文 \n" * 2 * LONG):
        for special in (True, False):
            ids = any_tokenizer.encode(text, special)
            assert ids == any_tokenizer.backend.encode(text, add_special_tokens=special).ids
            assert len(ids) > LONG
            assert any_tokenizer.decode(ids, special) == any_tokenizer.backend.decode(
                ids, skip_special_tokens=special
            )


def test_other_threads_run_while_a_long_text_is_read(smollm2):
    turns, stop = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not stop.is_set():
            turns += 1

    text = "hello world " * 60_000
    ids = smollm2.encode(text)
    counter = threading.Thread(target=count)
    counter.start()
    try:
        for call in (lambda: smollm2.encode(text), lambda: smollm2.decode(ids)):
            before = turns
            call()
            assert turns - before > 1000
    finally:
        stop.set()
        counter.join()


def test_special_tokens_are_skipped_on_demand(smollm2):
    ids = smollm2.encode("<|im_start|>user<|im_end|>")
    assert smollm2.decode(ids) == "user"
    assert smollm2.decode(ids, skip_special_tokens=False) == "<|im_start|>user<|im_end|>"


def test_gguf_equals_the_tokenizer_it_came_from(trained):
    tokenizer = Tokenizer.from_gguf(as_metadata(trained, "gpt-2"), "x.gguf")
    for text in CORPUS:
        assert tokenizer.encode(text) == trained.encode(text).ids


@pytest.mark.parametrize(
    ("pre", "text", "want"),
    [
        ("gpt-2", "I'm 1234  ok", ["I", "'m", " 1234", " ", " ok"]),
        ("smollm", "I'm 123  ok", ["I", "'m", " ", "1", "2", "3", " ", " ok"]),
        ("qwen2", "I'M 123  ok!\n\n", ["I", "'M", " ", "1", "2", "3", " ", " ok", "!\n\n"]),
        ("llama-bpe", "I'M 12345  ok!\n\n", ["I", "'M", " ", "123", "45", " ", " ok", "!\n\n"]),
        ("tekken", "camelCase 12 HTTPServer a/", ["camel", "Case", " ", "1", "2", " HTTPServer", " a", "/"]),
    ],
)
def test_texts_are_cut_as_each_family_cuts_them(pre, text, want):
    pieces = PRE_TOKENIZERS[pre].build().pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in pieces] == want


def test_beginning_and_end_of_sequence(trained):
    framed = Tokenizer.from_gguf(
        as_metadata(trained, "gpt-2", add_bos_token=True, add_eos_token=True), "x.gguf"
    )
    plain = framed.encode("hello", add_special_tokens=False)
    assert framed.encode("hello") == [1, *plain, 0]
    assert Tokenizer.from_gguf(as_metadata(trained, "gpt-2"), "x.gguf").encode("hello") == plain
    assert Tokenizer.from_gguf(as_metadata(trained, "llama-bpe"), "x.gguf").encode("hello")[0] == 1


@pytest.fixture(scope="module")
def sentencepiece_model() -> sentencepiece.SentencePieceProcessor:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3), model_writer=out, vocab_size=420, model_type="bpe", byte_fallback=True,
        character_coverage=1.0, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())


@pytest.fixture(scope="module")
def sentencepiece_metadata(sentencepiece_model) -> dict[str, object]:
    model, size = sentencepiece_model, sentencepiece_model.vocab_size()
    kinds = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1
        for i in range(size)
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in range(size)],
        "tokenizer.ggml.scores": [model.get_score(i) for i in range(size)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
    }


def test_sentencepiece_ids_are_the_library_s(sentencepiece_model, sentencepiece_metadata):
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata, "x.gguf")
    for text in [*CORPUS, "unseen: Ω≈ç√", "  two  spaces ", "x"]:
        want = sentencepiece_model.encode(text)
        assert tokenizer.encode(text) == [sentencepiece_model.bos_id(), *want]
        assert tokenizer.decode(want) == sentencepiece_model.decode(want)


@pytest.fixture(scope="module", params=["smollm2", "sentencepiece", "wordpiece"])
def any_tokenizer(request, smollm2_path, sentencepiece_metadata) -> Tokenizer:
    if request.param == "smollm2":
        return Tokenizer.from_gguf(GGUFFile(smollm2_path).metadata, "smollm2")
    if request.param == "sentencepiece":
        return Tokenizer.from_gguf(sentencepiece_metadata, "x.gguf")
    words = {word: i for i, word in enumerate(["[UNK]", "a", "##b", "c", "##d", "."])}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return Tokenizer(tokenizer, {})


def streamed(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> str:
    stream = tokenizer.decode_stream(skip_special_tokens)
    pieces = [stream.step(i) for i in ids]
    assert "" not in pieces
    return "".join(piece for piece in pieces if piece) + stream.flush()


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40))
def test_stream_equals_decode(any_tokenizer, text):
    ids = any_tokenizer.encode(text, add_special_tokens=False)
    assert streamed(any_tokenizer, ids) == any_tokenizer.decode(ids)


def test_stream_of_random_ids_equals_decode(smollm2):
    """Ids that no text has: broken UTF-8 becomes the same replacement characters."""
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(49152) for _ in range(rng.randrange(1, 12))]
        for skip in (True, False):
            assert streamed(smollm2, ids, skip) == smollm2.decode(ids, skip)


def test_stream_holds_back_incomplete_characters(smollm2):
    ids = smollm2.encode("語👧")
    stream = smollm2.decode_stream()
    pieces = [stream.step(i) for i in ids]
    assert len(ids) > 2
    assert [piece for piece in pieces if piece] == ["語", "👧"]
    assert stream.flush() == ""
    cut = smollm2.decode_stream()
    assert [cut.step(i) for i in ids[:-1]][-1] is None
    assert cut.flush() == "\ufffd"


def test_bytes_of_tokens_make_up_the_text(any_tokenizer):
    text = "日本語 ok" if any_tokenizer.vocab_size > 100 else "ab cd"
    ids = any_tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(map(any_tokenizer.token_bytes, ids)).decode()
    assert joined.replace(" ", "").replace("#", "") == text.replace(" ", "")
    assert any_tokenizer.token_bytes(10**6) == b""


def test_ids_outside_the_vocabulary(smollm2):
    assert smollm2.id_to_token(49152) is None
    assert smollm2.id_to_token(-1) is None
    assert smollm2.decode([504, 10**6]) == "The"
    assert streamed(smollm2, [504, 10**6]) == "The"
    with pytest.raises(ValueError, match=r"\[decode\] ids must not be negative, got -3"):
        smollm2.decode([1, -3])


@pytest.mark.parametrize(
    ("text", "message"),
    [(5, "must be a string, got int"), (None, "NoneType"), ("\ud800", "not valid Unicode")],
)
def test_bad_text_is_a_value_error(smollm2, text, message):
    with pytest.raises(ValueError, match=rf"\[encode\] text .*{message}"):
        smollm2.encode(text)


def test_folder(tmp_path, trained):
    trained.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": {"content": "<|end|>"}, "bos_token": "<|start|>", "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode(TEXT) == trained.encode(TEXT).ids
    assert tokenizer.eos_token_ids == (0,)
    assert tokenizer.special_tokens == {"bos_token": "<|start|>", "eos_token": "<|end|>"}


def test_folder_errors(tmp_path):
    with pytest.raises(ValueError, match=r"\[load\] .* has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model": "bert"}, r"tokenizer\.ggml\.model 'bert' is not supported. Known: gpt2, llama"),
        ({"pre": "chameleon"}, r"tokenizer\.ggml\.pre 'chameleon' is not supported. Known: .*smollm"),
        ({"tokens": None}, r"tokenizer\.ggml\.tokens is missing"),
        ({"merges": None}, r"tokenizer\.ggml\.merges is missing"),
        ({"merges": ["no such"]}, r"tokenizer\.ggml\.merges do not fit the tokens"),
        ({"tokens": [1, 2]}, r"tokenizer\.ggml\.tokens must be an array of str, got 1"),
        ({"eos_token_id": "2"}, r"tokenizer\.ggml\.eos_token_id is '2', but there are"),
        ({"token_type": [1]}, r"tokenizer\.ggml\.token_type has 1 entries for \d+ tokens"),
        ({"eos_token_id": 600}, r"tokenizer\.ggml\.eos_token_id is 600, but there are \d+ tokens"),
    ],
)
def test_bad_metadata_is_a_value_error(trained, change, text):
    metadata = as_metadata(trained, "gpt-2") | {
        f"tokenizer.ggml.{key}": value for key, value in change.items()
    }
    with pytest.raises(ValueError, match=rf"\[load\] x\.gguf: {text}"):
        Tokenizer.from_gguf(metadata, "x.gguf")

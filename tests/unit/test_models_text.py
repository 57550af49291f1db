"""Tokenizers, chat templates, growing text, and the conversion of a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from dejavu.errors import ConfigError
from dejavu.models.gguf_convert import convert_gguf
from dejavu.models.random_weights import save_byte_tokenizer
from dejavu.models.reference import generate_reference
from dejavu.models.smollm2 import make_smollm2
from dejavu.models.source import cache_folder
from dejavu.models.tiny import make_tiny
from dejavu.models.tokenizer import IncrementalDecoder, TextCodec


@pytest.fixture
def codec(tmp_path: Path) -> TextCodec:
    save_byte_tokenizer(tmp_path)
    return TextCodec(tmp_path)


def test_text_comes_back_from_its_tokens(codec: TextCodec) -> None:
    text = "  Grüße, 世界! 🙂\n\tend "
    tokens = codec.encode(text)
    assert len(tokens) == len(text.encode())
    assert codec.decode(tokens) == text


def test_special_tokens_leave_no_text(codec: TextCodec) -> None:
    assert codec.decode([*codec.encode("hi"), codec.vocab_size - 4]) == "hi"


def test_no_text_of_so_many_tokens_has_more_characters_than_is_said(codec: TextCodec) -> None:
    for text in ("plain", "世界", "  \n", "<|end|>"):
        assert len(text) <= codec.most_characters(len(codec.encode(text)))
    assert codec.most_characters(0) == 0


def test_messages_are_encoded_up_to_the_assistants_turn(codec: TextCodec) -> None:
    tokens = codec.encode_chat([{"role": "user", "content": "a"}])
    assert tokens == [257, *codec.encode("a"), 258]


def test_messages_for_a_model_without_chat_template_are_refused(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template"):
        TextCodec(tmp_path).encode_chat([{"role": "user", "content": "a"}])


def test_a_folder_without_tokenizer_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        TextCodec(tmp_path)


def test_a_character_is_given_out_once_all_its_bytes_are_there(codec: TextCodec) -> None:
    decoder = IncrementalDecoder(codec)
    pieces = [decoder.push(token) for token in codec.encode("aé🙂b")]
    assert pieces == ["a", "", "é", "", "", "", "🙂", "b"]
    assert decoder.finish() == ""
    assert decoder.text == "aé🙂b"


def test_bytes_that_never_become_a_character_are_given_out_at_the_end(codec: TextCodec) -> None:
    decoder = IncrementalDecoder(codec)
    tokens = codec.encode("x🙂")[:-1]
    assert "".join(decoder.push(token) for token in tokens) == "x"
    assert decoder.finish() == codec.decode(tokens)[1:]
    assert decoder.text == codec.decode(tokens)


def whole(codec: TextCodec, tokens: list[int]) -> str:
    """The text as it comes, token by token, and what is left at the end."""
    decoder = IncrementalDecoder(codec)
    return "".join([*map(decoder.push, tokens), decoder.finish()])


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tokens=st.lists(st.one_of(st.integers(0, 259), st.sampled_from([256, 97, 195, 169])), max_size=30))
def test_text_that_comes_token_by_token_is_the_whole_text(codec: TextCodec, tokens: list[int]) -> None:
    assert whole(codec, tokens) == codec.decode(tokens)


def test_text_without_spaces_between_words_keeps_those_that_there_are(tmp_path: Path) -> None:
    codec = sentencepiece_like(tmp_path)
    for text in (
        "▁ ▁a b",
        "▁a ▁b </s> ▁a",
        "▁a <0xE4> <0xB8> <0x96> <0xE4> <0xB8> <0x96> ▁b",
    ):
        tokens = [PIECES.index(piece) for piece in text.split()]
        assert whole(codec, tokens) == codec.decode(tokens)


PIECES = ["<unk>", "</s>", "▁", "▁a", "▁b", "a", "b", *(f"<0x{byte:02X}>" for byte in range(256))]


class Counted:
    """Counts how many tokens are decoded."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self.num_decoded = 0

    def decode(self, tokens: list[int]) -> str:
        self.num_decoded += len(tokens)
        return self._codec.decode(tokens)


@pytest.mark.parametrize("token", ["special", "no character"])
def test_tokens_that_make_no_text_cost_as_much_as_others_and_hold_nothing_back(codec: TextCodec, token: str) -> None:
    """All that had come since the last text was decoded anew for each of them, on the thread that serves everybody."""
    number = 256 if token == "special" else codec.encode("é")[1]
    counted = Counted(codec)
    decoder = IncrementalDecoder(counted)  # type: ignore[arg-type]
    pieces = [decoder.push(one) for one in [*codec.encode("a"), *[number] * 500]]
    assert counted.num_decoded < 500 * 12
    if token == "no character":
        assert len("".join(pieces)) > 490


def sentencepiece_like(folder: Path) -> TextCodec:
    """A tokenizer whose decoder takes the first space away and makes characters of bytes, as Llama 2's does."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {piece: index for index, piece in enumerate(PIECES)}
    made = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>").save_pretrained(folder)
    return TextCodec(folder)


def test_a_token_is_told_by_its_bytes_where_it_is_a_part_of_a_character(codec: TextCodec) -> None:
    first, second = codec.encode("é")
    assert (codec.token_bytes(first), codec.token_bytes(second)) == (b"\xc3", b"\xa9")
    assert (codec.token_text(first), codec.token_text(second)) == ("bytes:\\xc3", "bytes:\\xa9")
    (space,) = codec.encode(" ")
    assert (codec.token_text(space), codec.token_bytes(space)) == (" ", b" ")
    assert codec.token_text(257) == codec.token_bytes(257).decode() == "<|user|>"  # type: ignore[union-attr]


def test_joined_the_bytes_of_tokens_are_the_text_with_its_spaces(tmp_path: Path) -> None:
    codec = sentencepiece_like(tmp_path)
    tokens = [PIECES.index(piece) for piece in ("▁a", "▁b", "<0xE4>", "<0xB8>", "<0x96>")]
    assert b"".join(codec.token_bytes(token) or b"" for token in tokens).decode() == " a b世"
    assert [codec.token_text(token) for token in tokens[1:3]] == [" b", "bytes:\\xe4"]
    assert codec.token_text(1) == "</s>"


def no_progress(description: str, done: int, total: int, unit: str) -> None:
    """Nobody watches."""


def write_gguf(model: Path, target: Path, *, architecture: str = "llama", pre: str = "smollm") -> None:
    """The tiny Llama in ``model`` as a GGUF file, q and k permuted as GGUF wants them."""
    import gguf

    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(str(target), architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"] | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocab, key=lambda token: int(vocab[token]))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if vocab[token] >= 256 else 1 for token in tokens])
    writer.add_token_merges(["a b", "b c"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(256)
    writer.add_chat_template((model / "chat_template.jinja").read_text())
    for name, tensor in load_file(model / "model.safetensors").items():
        writer.add_tensor(*_gguf_tensor(name, tensor.numpy(), config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_tensor(name: str, values: np.ndarray, config: dict[str, int]) -> tuple[str, np.ndarray]:
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in whole:
        return whole[name], values
    _, _, layer, *rest = name.split(".")
    part = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
    }[rest[-2]]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(part)
    if heads:
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, -1)
        values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
    return f"blk.{layer}.{part}.weight", values


def without_merged_letters(folder: Path) -> None:
    """The byte tokenizer's vocabulary has no room for merges: the file names two that it can hold."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    for merged in ("ab", "bc"):
        vocab.pop(next(symbol for symbol in reversed(vocab) if len(symbol) == 1 and not symbol.isascii()))
        vocab[merged] = min(set(range(256)) - set(vocab.values()))
    path.write_text(json.dumps(tokenizer))


@pytest.fixture
def gguf_model(tmp_path: Path) -> Path:
    model = make_tiny("llama", tmp_path, num_layers=2, num_kv_heads=2)
    without_merged_letters(model)
    return model


def test_a_converted_gguf_file_gives_the_weights_tokens_and_text_of_the_model_it_was_made_from(
    tmp_path: Path, gguf_model: Path
) -> None:
    write_gguf(gguf_model, tmp_path / "model.gguf")
    folder = tmp_path / "converted"
    folder.mkdir()
    convert_gguf(tmp_path / "model.gguf", folder, no_progress)
    before, after = load_file(gguf_model / "model.safetensors"), load_file(folder / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    prompts = [[1, 2, 3], [40, 50]]
    assert generate_reference(folder, "float32", prompts, 8) == generate_reference(gguf_model, "float32", prompts, 8)
    codec = TextCodec(folder)
    assert codec.decode(codec.encode("ab <|user|> 42")) == "ab  42"
    assert len(codec.encode("ab12")) == 3
    assert codec.encode_chat([{"role": "user", "content": "q"}])[0] == 257


def test_a_gguf_file_of_another_architecture_is_refused(tmp_path: Path, gguf_model: Path) -> None:
    write_gguf(gguf_model, tmp_path / "model.gguf", architecture="falcon")
    with pytest.raises(ConfigError, match="'falcon'; only 'llama'"):
        convert_gguf(tmp_path / "model.gguf", tmp_path, no_progress)


def test_a_gguf_file_with_an_unknown_tokenizer_is_refused(tmp_path: Path, gguf_model: Path) -> None:
    write_gguf(gguf_model, tmp_path / "model.gguf", pre="tekken")
    with pytest.raises(ConfigError, match="tekken"):
        convert_gguf(tmp_path / "model.gguf", tmp_path, no_progress)


@pytest.mark.grid
@pytest.mark.slow
def test_the_default_model_answers_a_plain_question(tmp_path: Path) -> None:
    folder = make_smollm2(cache_folder(), no_progress)
    codec = TextCodec(folder)
    tokens = codec.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    assert tokens[:2] == [1, 9690]
    assert codec.encode("In 2024") == [788, 216, 34, 32, 34, 36]
    answer = generate_reference(folder, "float32", [tokens], 16)[0]
    assert "Paris" in codec.decode(answer)
    assert not list(folder.parent.glob(".smollm2*.making-*"))

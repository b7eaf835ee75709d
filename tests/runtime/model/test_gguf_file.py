"""Reading GGUF files: right values for every tensor type, one clear line for everything that is wrong."""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_llama import TinyLlama

from busload_runtime.model.errors import ModelError
from busload_runtime.model.gguf_file import TENSOR_TYPES, open_gguf
from busload_runtime.model.load import load_weights
from busload_runtime.model.text import load_text_model


def test_table_of_tensor_types_is_the_library_s() -> None:
    for type_id, (name, block, num_bytes) in TENSOR_TYPES.items():
        assert GGMLQuantizationType(type_id).name == name
        assert gguf.GGML_QUANT_SIZES[GGMLQuantizationType(type_id)] == (block, num_bytes)


def test_metadata_and_tensors_as_the_library_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    TinyLlama(precision=GGMLQuantizationType.Q4_1).write(path)
    ours, theirs = open_gguf(str(path)), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents()
    assert len(ours.tensors) == len(theirs.tensors) == 2 * 9 + 2
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.type_name == tensor.tensor_type.name
        assert info.offset == tensor.data_offset
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(ours.read(tensor.name, info.shape), expected)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q5_1"])
def test_types_the_writer_cannot_quantise(kind: str, tmp_path: Path) -> None:
    # Random bytes are valid blocks of these types once the scales are finite.
    type_id = GGMLQuantizationType[kind]
    block, num_bytes = gguf.GGML_QUANT_SIZES[type_id]
    raw = np.random.default_rng(0).integers(0, 60, (4, 2 * num_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("t", raw, raw_dtype=type_id)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = open_gguf(str(tmp_path / "one.gguf")).read("t", (4, 2 * block))
    np.testing.assert_array_equal(ours, gguf.quants.dequantize(raw, type_id))


WRONG_MODELS = {
    "architecture": (
        TinyLlama(metadata={"general.architecture": "mamba"}),
        "general.architecture is 'mamba'; supported: 'llama'",
    ),
    "missing number": (
        TinyLlama(metadata={"llama.block_count": None}),
        "llama.block_count is missing; must be an integer from 1 to 4096",
    ),
    "number of the wrong kind": (
        TinyLlama(metadata={"llama.block_count": "two"}),
        "llama.block_count is 'two'; must be an integer",
    ),
    "not a number": (
        TinyLlama(metadata={"llama.rope.freq_base": float("nan")}),
        "llama.rope.freq_base is nan; must be a number from 1 to 1e+12",
    ),
    "no epsilon": (
        TinyLlama(metadata={"llama.attention.layer_norm_rms_epsilon": 0.0}),
        "llama.attention.layer_norm_rms_epsilon is 0.0; must be a number from 1e-12 to 1",
    ),
    "kv heads": (
        TinyLlama(metadata={"llama.attention.head_count_kv": 3}),
        "llama.attention.head_count_kv is 3; must be a divisor of attention.head_count (4)",
    ),
    "kv heads by layer": (
        TinyLlama(metadata={"llama.attention.head_count_kv": [2, 1]}),
        "llama.attention.head_count_kv is [2, 1]; must be an integer",
    ),
    "partial rotation": (
        TinyLlama(metadata={"llama.rope.dimension_count": 8}),
        "llama.rope.dimension_count is 8; must be the head dimension 16",
    ),
    "yarn": (
        TinyLlama(metadata={"llama.rope.scaling.type": "yarn"}),
        "llama.rope.scaling.type is 'yarn'; must be none or linear",
    ),
    "experts": (
        TinyLlama(metadata={"llama.expert_count": 8}),
        "llama.expert_count is 8; must be 0 or missing (only dense models",
    ),
    "vocabulary size": (
        TinyLlama(metadata={"llama.vocab_size": 7}),
        "llama.vocab_size is 7; must be the number of tokens in tokenizer.ggml.tokens (262)",
    ),
    "tensor missing": (
        TinyLlama(without=("blk.1.ffn_up.weight",)),
        "tensor blk.1.ffn_up.weight is missing",
    ),
    "layer missing": (TinyLlama(metadata={"llama.block_count": 3}), "tensor blk.2.attn_norm.weight is missing"),
    "layer too many": (
        TinyLlama(metadata={"llama.block_count": 1}),
        "tensor 'blk.1.attn_k.weight' is not part of a plain 1-layer llama model",
    ),
    "bias": (
        TinyLlama(extra_tensors={"blk.0.attn_q.bias": np.zeros(64, np.float32)}),
        "tensor 'blk.0.attn_q.bias' is not part of a plain 2-layer llama model",
    ),
    "shape": (
        TinyLlama(metadata={"llama.feed_forward_length": 64}),
        "tensor blk.0.ffn_gate.weight has shape (96, 64); the model's config says (64, 64)",
    ),
    "tensor type": (
        TinyLlama(extra_tensors={"counts": np.zeros(64, np.int32)}),
        "tensor 'counts' has type 26; supported: F32, F16, Q4_0",
    ),
    "rope factors": (
        TinyLlama(extra_tensors={"rope_freqs.weight": np.zeros(8, np.float32)}),
        "tensor rope_freqs.weight holds values that are not positive",
    ),
    "alignment": (TinyLlama(metadata={"general.alignment": 33}), "general.alignment is 33; must be a power of two"),
}


@pytest.mark.parametrize("case", WRONG_MODELS)
def test_wrong_model(case: str, tmp_path: Path) -> None:
    model, expected = WRONG_MODELS[case]
    path = str(tmp_path / "wrong.gguf")
    model.write(Path(path))
    with pytest.raises(ModelError) as caught:
        load_weights(path).rope_frequencies()
    message = str(caught.value)
    assert message.startswith(f"{path}: {expected}")
    assert "\n" not in message


def test_wrong_file(tmp_path: Path) -> None:
    path = tmp_path / "wrong.gguf"
    TinyLlama().write(path)
    raw = path.read_bytes()
    cases = {
        b"": "the file is empty",
        b"PK\x03\x04 an archive": r"starts with b'PK.*' instead of b'GGUF'",
        b"GG": "ends inside its header, at magic",
        raw[:4] + struct.pack("<I", 1) + raw[8:]: r"GGUF version is 1 \(an unknown version\); supported: 2, 3",
        raw[:4] + struct.pack(">I", 3) + raw[8:]: r"GGUF version is \d+ \(a big-endian file\)",
        raw[:8] + struct.pack("<Q", 2**63) + raw[16:]: "the file is corrupt|truncated or corrupt",
        raw[:16] + struct.pack("<Q", 2**63) + raw[24:]: "the file is corrupt|truncated or corrupt",
        raw[:-1]: r"tensor 'output_norm.weight' ends at byte \d+ but the file has \d+ bytes; it is truncated",
        raw[: len(raw) // 2]: "it is truncated, download it again",
        raw[:200]: "ends inside its header",
    }
    for content, expected in cases.items():
        path.write_bytes(content)
        with pytest.raises(ModelError, match=expected):
            open_gguf(str(path))


def test_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ModelError, match="not a regular file"):
        open_gguf(str(tmp_path / "fifo"))
    with pytest.raises(ModelError, match=r"none.gguf: no such file; give the path of a GGUF file or bundled:NAME"):
        open_gguf(str(tmp_path / "none.gguf"))
    with pytest.raises(ModelError, match="cannot be read"):
        open_gguf(str(tmp_path))


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    TinyLlama(layers=1, heads=2, kv_heads=1, ffn=32).write(path)
    return path.read_bytes()


def use_text(path: Path) -> None:
    model = load_text_model(str(path))
    model.tokenizer.decode(model.tokenizer.encode("the text <|im_end|> é", special=True))


def use_weights(path: Path) -> None:
    weights = load_weights(str(path))
    weights.layer(0)
    weights.rope_frequencies()


def complaint(use: Callable[[Path], None], path: Path) -> str:
    """What the `ModelError` said, empty on success. Any other exception fails the test."""
    try:
        use(path)
    except ModelError as error:
        return str(error)
    return ""


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.data())
def test_truncated_anywhere(small_file: bytes, tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(small_file[: data.draw(st.integers(0, len(small_file) - 1))])
    with pytest.raises(ModelError):
        open_gguf(str(path))


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.data())
def test_flipped_bytes_in_the_header(small_file: bytes, tmp_path: Path, data: st.DataObject) -> None:
    raw = bytearray(small_file)
    header = open_header_size(small_file, tmp_path)
    for position, flip in data.draw(
        st.lists(st.tuples(st.integers(0, header - 1), st.integers(1, 255)), min_size=1, max_size=3)
    ):
        raw[position] ^= flip
    path = tmp_path / "flipped.gguf"
    path.write_bytes(raw)
    for use in (use_text, use_weights):
        assert "\n" not in complaint(use, path)


def open_header_size(raw: bytes, folder: Path) -> int:
    path = folder / "whole.gguf"
    path.write_bytes(raw)
    return min(info.offset for info in open_gguf(str(path)).tensors.values())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_a_number_is_found_when_it_is_read(small_file: bytes, tmp_path: Path, bad: float) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(small_file)
    info = open_gguf(str(path)).tensors["token_embd.weight"]
    raw = bytearray(small_file)
    raw[info.offset + 400 : info.offset + 404] = struct.pack("<f", bad)
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=r"tensor token_embd\.weight holds values that are not finite"):
        load_weights(str(path)).embedding()

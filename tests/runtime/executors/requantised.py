"""SmolLM2-135M with the values of its 4-bit file written in another precision, so that nothing else differs."""

from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

from busload_runtime.model.bundled import resolve_source

SOURCE = "bundled:smollm2-135m-instruct"


def write(path: Path, precision: GGMLQuantizationType) -> Path:
    """Matrices in `precision`; norms and metadata as they are."""
    reader, writer = GGUFReader(resolve_source(SOURCE)), GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind = field.types[0]
            inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if values.ndim > 1:
            writer.add_tensor(tensor.name, quantize(values, precision), raw_dtype=precision)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

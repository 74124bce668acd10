"""Generates tokens with vLLM on the CPU, on two ranks that add up their parts by pycomm.

.. code-block:: shell

    python examples/frameworks/with_vllm.py [MODEL]
"""

import json
import os
import sys
import tempfile
from pathlib import Path

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512,
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


def generate(model: str, **options: str) -> list[int]:
    """The tokens that follow the tokens 1 to 8."""
    from vllm import LLM, SamplingParams  # chooses its platform, by VLLM_PLUGINS

    llm = LLM(model, tensor_parallel_size=2, skip_tokenizer_init=True, dtype="float32",
        max_model_len=128, **options)  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    (result,) = llm.generate({"prompt_token_ids": list(range(1, 9))}, greedy)
    llm.llm_engine.engine_core.shutdown()
    return list(result.outputs[0].token_ids)


if __name__ == "__main__":  # vLLM's processes import this file, too
    os.environ["VLLM_PLUGINS"] = "pycomm"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # ranks may share a NUMA node
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY))
        given = sys.argv[1:]
        tokens = generate(*given) if given else generate(folder, load_format="dummy")
    print("tokens", tokens)

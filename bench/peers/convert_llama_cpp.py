"""llama.cpp's converter, also for tokenizers whose fingerprint it does not know: convert_llama_cpp.py SOURCE ARGUMENTS.

The fingerprint chooses how text is split before BPE. Prompts are token ids here, so GPT-2's way will do for all.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

source = Path(sys.argv[1])
sys.path[:0] = [str(source), str(source / "gguf-py")]
from conversion import base  # noqa: E402

known = base.TextModel.get_vocab_base_pre


def get_vocab_base_pre(model: Any, tokenizer: Any) -> str:
    try:
        return str(known(model, tokenizer))
    except NotImplementedError:
        return "gpt-2"


base.TextModel.get_vocab_base_pre = get_vocab_base_pre
sys.argv = sys.argv[1:]
runpy.run_path(str(source / "convert_hf_to_gguf.py"), run_name="__main__")

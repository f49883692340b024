"""llama.cpp's convert_hf_to_gguf.py, which also takes tokenizers that split text as GPT-2's does.

    DRAFTHEADS_LLAMACPP=FOLDER python llamacpp_target.py TARGET --outtype f32 --outfile TARGET.gguf

llama.cpp knows tokenizers by a hash of how they encode one text, and so none that was trained for
one model alone, as the demo's; and it expects every GLM to have GLM's own.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

ROOT = Path(os.environ["DRAFTHEADS_LLAMACPP"]).resolve()
sys.path[:0] = [str(ROOT / "llama.cpp"), str(ROOT / "python")]

from conversion.base import TextModel  # noqa: E402

known = TextModel.get_vocab_base_pre


def splitting(self: Any, tokenizer: Any) -> str:
    """The name of the rule by which text is split into words."""
    try:
        return str(known(self, tokenizer))
    except NotImplementedError:
        rule = repr(tokenizer.backend_tokenizer.pre_tokenizer)
        if rule == "ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)":
            return "gpt-2"
        raise


TextModel.get_vocab_base_pre = splitting
if "[gMASK]" not in (Path(sys.argv[1]) / "tokenizer.json").read_text():
    TextModel._set_vocab_glm = TextModel._set_vocab_gpt2
sys.argv[0] = str(ROOT / "llama.cpp" / "convert_hf_to_gguf.py")
runpy.run_path(sys.argv[0], run_name="__main__")

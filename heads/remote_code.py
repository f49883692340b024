"""The two files that let transformers decode with a head folder or repository by its name:

    model.generate(**inputs, custom_generate="user/heads", trust_remote_code=True)

transformers copies custom_generate/generate.py away from its folder before it runs it, so the file
holds nothing of its own and everything stands in the installed draftheads. Where that is missing,
transformers says `pip install draftheads` by itself: it reads the imports before it runs anything.
"""

from __future__ import annotations

from pathlib import Path

GENERATE = '''"""Decode with these draft heads, on the model that they were trained for:

model.generate(**inputs, custom_generate="user/heads", trust_remote_code=True)
"""

from draftheads.infer.speculative import generate_from_repository


def generate(inputs=None, *, model, **arguments):
    """Called by transformers in place of its own `generate`, with all that it was given."""
    return generate_from_repository(inputs, model=model, **arguments)
'''

REMOTE_CODE = {
    "custom_generate/generate.py": GENERATE,
    "custom_generate/requirements.txt": "draftheads\n",
}
"""Path in a head folder -> text."""


def write_remote_code(folder: Path) -> None:
    """Write them into a head folder."""
    for name, text in REMOTE_CODE.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

"""The two files that let transformers decode with a head folder or repository by its name:

    model.generate(**inputs, custom_generate="user/heads", trust_remote_code=True)

transformers copies custom_generate/generate.py away from its folder before it runs it, so the file
holds nothing of its own and everything stands in the installed draftheads. Where that is missing,
the file says where to get it. It imports inside a `try`, and the requirements are a comment, as
transformers would else advise `pip install draftheads`: no registry has it, so that would run
whatever somebody has published under its name.
"""

from __future__ import annotations

from importlib.metadata import metadata
from pathlib import Path


def install_command() -> str:
    """How to install this project: from the repository that its package names, else from a clone;
    never by its name alone, which no registry has.
    """
    urls = dict(each.split(", ", 1) for each in metadata("draftheads").get_all("Project-URL") or ())
    if "Repository" in urls:
        return f"pip install git+{urls['Repository']}"
    return "pip install ./draftheads  # a clone of its repository; no package registry has it"


GENERATE = '''"""Decode with these draft heads, on the model that they were trained for:

model.generate(**inputs, custom_generate="user/heads", trust_remote_code=True)
"""


def generate(inputs=None, *, model, **arguments):
    """Called by transformers in place of its own `generate`, with all that it was given."""
    try:
        from draftheads.infer.speculative import generate_from_repository
    except ImportError as error:
        if "No module named" not in str(error):
            raise
        raise ImportError("these heads need draftheads: {install}") from error
    return generate_from_repository(inputs, model=model, **arguments)
'''

REMOTE_CODE = {
    "custom_generate/generate.py": GENERATE.replace("{install}", install_command()),
    "custom_generate/requirements.txt": f"# draftheads: {install_command()}\n",
}
"""Path in a head folder -> text."""


def write_remote_code(folder: Path) -> None:
    """Write them into a head folder."""
    for name, text in REMOTE_CODE.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

"""Checks what a person types: paths, names, the variable of a key. It knows a file by its name and
a few bytes, so a file in the wrong place is named for what it is. These checks import
nothing slow, so a mistake is said at once, not after the seconds that torch takes to load.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from tempfile import TemporaryFile

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
VARIANT = re.compile(r"(\.gguf|:latest|[-@]\d{4}-?\d{2}-?\d{2})+$")
"""What servers and proxies append to the name of a model that stays the same."""
PATIENCE = 10.0
"""Seconds to wait for the Hub's first answer."""
VARIABLE = re.compile(r"\$\{\w*\}?")
"""Of a shell, which has not replaced it."""

HEAD, MODEL, EITHER = "a draft head", "a whole model", "a model or a head"
GGUF, ADAPTER = "a GGUF file", "a PEFT adapter"
ANSWERS, PROMPTS, RECIPE = "answers of a target", "prompts or conversations", "a recipe"
JSON, PART, FILE = "a JSON file", "a file of a model's folder", "a file of another kind"
FOLDER, EMPTY, NOTHING = "a folder of other files", "an empty folder", "nothing"
USES = {
    HEAD: "pass it as --head, and the model that it was trained for as --target",
    MODEL: "pass it as --target, or let it draft: --head model:PATH",
    GGUF: "pass it as --target",
    ADAPTER: "pass it as --adapter, and the model that it was trained for as --target",
    ANSWERS: "draftheads init --data takes it",
    PROMPTS: "draftheads distill --prompts takes it",
    RECIPE: "draftheads train takes it",
    PART: "pass the folder",
}
"""What a file or folder may be -> where it belongs."""
FILES = {
    RECIPE: r"\.ya?ml$",
    JSON: r"\.json$",
    PROMPTS: r"\.([ct]sv|parquet|arrow|jsonl?|traj|txt|md)(\.gz|\.bz2|\.zst)?$",
    PART: r"\.(safetensors|bin|pth?|ckpt)$",
}
"""Ends of their names."""
WHOLE = re.compile(rb'"\w+(ForCausalLM|LMHeadModel|ForConditionalGeneration)"')
DRAFTS = re.compile(rb"draft|eagle|medusa|hydra|speculat|dflash|dspark", re.IGNORECASE)
LAYERS = re.compile(rb'"(num_hidden_layers|n_layers?|num_layers)"\s*:\s*([2-9]|\d\d)')
"""In config.json: names of models' classes, words of heads alone, more layers than EAGLE has."""
SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
JOIN = "join its parts: llama-gguf-split --merge FIRST WHOLE.gguf"


def kind_of(path: Path) -> str:
    """Return the kind of a file or folder, by its name, the first bytes of a file and the
    config.json of a folder.
    """
    if path.is_dir():
        return _kind_of_folder(path)
    if not path.exists():
        return NOTHING
    if begins_as_gguf(path):
        return GGUF
    kinds = [kind for kind, end in FILES.items() if re.search(end, path.name.lower())]
    return kinds[0] if kinds else FILE


def _kind_of_folder(folder: Path) -> str:
    places = [folder, folder / "best", *sorted(folder.glob("step-*"))[-1:]]
    configs = [place / "config.json" for place in places if (place / "config.json").is_file()]
    if configs:
        config = configs[0].read_bytes()
        if re.search(rb'"draftheads"\s*:\s*\{', config):
            return HEAD
        is_whole = WHOLE.search(config) and LAYERS.search(config) and not DRAFTS.search(config)
        return MODEL if is_whole else EITHER
    if (folder / "adapter_config.json").is_file():
        return ADAPTER
    if (folder / "manifest.json").is_file():
        return ANSWERS
    if gguf_files(folder):
        return GGUF
    return FOLDER if any(folder.iterdir()) else EMPTY


def begins_as_gguf(path: Path) -> bool:
    """True if a file begins as GGUF does, whatever its name is: those of Ollama are digests."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def gguf_files(folder: Path) -> list[Path]:
    """The GGUF files of a folder without config.json, which says what else is in it."""
    if (folder / "config.json").is_file() or not folder.is_dir():
        return []
    return [path for path in sorted(folder.iterdir()) if path.suffix.lower() == ".gguf"]


def check_kind(label: str, path: Path, wanted: str, kinds: Collection[str], advice: str) -> None:
    """Raise FileNotFoundError where nothing is, ValueError for another kind than these. label: what
    a person typed. advice: for what belongs nowhere.
    """
    kind = kind_of(path)
    if kind not in kinds:
        fault = FileNotFoundError if kind == NOTHING else ValueError
        raise fault(f"{label}: expected {wanted}, got {kind}; {USES.get(kind, advice)}")


def check_path(path: str, *, is_name: bool = True) -> None:
    """Raise FileNotFoundError for the path of nothing, ValueError for what is no model. is_name:
    whether it may be a name of the Hub's.
    """
    if not path.strip():  # Path("") is the working directory
        raise FileNotFoundError(
            f"expected a target, got the empty name {path!r}; pass a model folder or a Hub id"
        )
    local = Path(os.path.expanduser(path))  # Path.expanduser raises for an unknown user
    is_path = local.is_absolute() or path.startswith((".", "~"))
    is_path = is_path or "\\" in path or path.count("/") > 1
    is_file = re.search(r"\.gg\w*$" if "/" in path else r"\.[a-z]\w*$", path.lower())
    if is_name and not (is_path or is_file or local.exists()):
        check_name("target", path)
        return
    files = gguf_files(local) or [local]
    if any(SPLIT.search(file.name) for file in files):
        raise ValueError(f"target {path}: expected one GGUF file, got a part of one; {JOIN}")
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:4])
        raise ValueError(f"target {path}: expected one GGUF file, got {names}; pass one of them")
    wanted = "a model (a folder with config.json, or a GGUF file)"
    advice = f"pass a model folder, a GGUF file or a Hub id{near_name(local)}"
    check_kind(f"target {path}", local, wanted, (MODEL, EITHER, GGUF), advice)


def near_name(name: str | Path) -> str:
    """A hint at a file or folder of a similar name; "" for one that is there."""
    path = Path(os.path.expanduser(name))
    if path.exists() or not path.parent.is_dir():
        return ""
    near = difflib.get_close_matches(path.name, os.listdir(path.parent), n=1)
    return f" (did you mean {path.parent / near[0]}?)" if near else ""


def check_name(what: str, name: str) -> None:
    """Raise FileNotFoundError for a name of the Hub's form that leads nowhere, if it is near one of
    a file or folder here. Others are looked up when they are loaded.
    """
    if not near_name(name):
        return
    from huggingface_hub import HfApi  # half a second, where torch takes many
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        HfApi().model_info(name.partition("@")[0], timeout=PATIENCE)
    except RepositoryNotFoundError as error:
        if not isinstance(error, GatedRepoError):
            raise FileNotFoundError(f"{what} {name}: {nowhere(name)}") from error
    except Exception:  # of the HTTP library: whoever downloads it says why it cannot
        return


def bare_name(model: str) -> str:
    """The name of a model without what proxies add to it, such as a path or VARIANT."""
    return VARIANT.sub("", model.rstrip("/").rpartition("/")[2].lower())


def nowhere(name: str) -> str:
    """The line about a name that is neither here nor on the Hub."""
    from huggingface_hub import constants

    return (
        f"expected a folder here or a repository on {constants.ENDPOINT}, found "
        f"neither{near_name(name)}; check the name, or log in if it is "
        "private: hf auth login"
    )


def check_answers(path: Path, *, are_there: bool = True) -> None:
    """Raise as `check_kind` for what is no folder of answers. are_there: or nothing, yet."""
    kinds = (ANSWERS, FOLDER) if are_there else (ANSWERS, FOLDER, EMPTY, NOTHING)
    check_kind(
        f"data {path}",
        Path(os.path.expanduser(path)),
        "a folder of answers",
        kinds,
        f"pass the folder that `draftheads distill --out` wrote{near_name(path)}",
    )


def head_folder(source: str | Path, what: str = "head") -> Path | None:
    """The folder of a head, a run or `what`; None for user/name or user/name@revision on the Hub.
    Raises as `check_kind` for what is neither.
    """
    if not str(source).strip():  # Path("") is the working directory
        raise FileNotFoundError(
            f"expected a {what}, got the empty name {str(source)!r}; pass a folder or a Hub id"
        )
    folder = Path(os.path.expanduser(source))
    if not folder.exists() and HUB_ID.fullmatch(str(source).partition("@")[0]):
        check_name(what, str(source))
        return None
    kinds = (HEAD, EITHER)
    if what != "head":
        kinds = (ADAPTER, EITHER if (folder / "adapter_config.json").is_file() else ADAPTER)
    advice = f"pass a folder or a Hub id (user/name){near_name(folder)}"
    check_kind(f"{what} {source}", folder, f"a {what}", kinds, advice)
    return folder


def text_files(head: str) -> Path:
    """FILES of a head "retrieve:FILES". Raises ValueError where none is."""
    path = Path(os.path.expanduser(head.partition(":")[2] or "nothing"))
    kinds = (PROMPTS, JSON, RECIPE, FILE, FOLDER, EITHER)
    check_kind(f"head {head}", path, "a file or folder of texts", kinds, "check the path")
    return path


def check_schema(path: Path) -> None:
    """Raise ValueError for what is no file of JSON."""
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise ValueError(
            f"--schema {path}: expected a JSON schema, got {kind_of(path)}; give a file with one"
        ) from None


def expected(message: str) -> str:
    """A message of pydantic's about a value, beginning with what was expected."""
    message = message.removeprefix("Value error, ").partition(", unable to")[0]
    return re.sub("^Input should be ", "expected ", message)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return what a person may have meant: the known names that go on like this one, else the
    nearest one; "" for none.
    """
    names = sorted(known)
    longer = [each for each in names if name and each.startswith(name)]
    return " or ".join(longer[:4] or difflib.get_close_matches(name, names, n=1))


def nearest(path: Path) -> Path:
    """The path, or where it does not exist yet, the folder above that does."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def takes_files(folder: Path) -> bool:
    """True if a file can be made in a folder that is there: root has the permission everywhere."""
    try:
        with TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def check_folder(folder: Path) -> None:
    """Raise ValueError for a folder that cannot be written, or holds something of another kind."""
    if folder.is_dir() and kind_of(folder) not in (ANSWERS, FOLDER, EMPTY):
        raise ValueError(
            f"--out: expected a folder for answers, got {folder}, {kind_of(folder)}; give another "
            "one"
        )
    if not takes_files(nearest(folder)):
        raise ValueError(
            f"--out: expected a folder that can be written, got {folder}; give another one"
        )


def check_new(path: Path) -> None:
    """Raise FileExistsError for a path that is taken, ValueError for one that cannot be written."""
    if path.exists():
        raise FileExistsError(f"{path} already exists; choose another name, or remove it")
    check_folder(path)


def secret(variable: str) -> str:
    """The key in an environment variable. Raises ValueError if there is none."""
    key = os.environ.get(variable, "").strip()
    if not re.fullmatch("[!-~]+", key):  # the name is not shown: it may be the key itself
        raise ValueError(
            "--api-key-env: expected the name of an environment variable with a key of printable "
            "ASCII characters, found none; export it, and give the variable's name"
        )
    return key

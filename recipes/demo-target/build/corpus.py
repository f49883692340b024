"""What the demo target knows: the standard library's own docstrings, gathered by introspection.

An `Entry` is one module, function, class or method with a cleaned summary and a signature. The
text is what `inspect` finds in the running Python (licence PSF-2.0), so nothing is downloaded.
"""

import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

MODULES = re.findall(
    r"\S+",
    """
builtins os.path os json re math itertools functools collections pathlib random datetime time
string textwrap shutil subprocess statistics glob fnmatch tempfile pickle copy csv base64 struct
bisect heapq dataclasses contextlib logging threading queue urllib.parse html secrets pprint
concurrent.futures shlex
""",
)

# Only these classes are opened up into their methods: the ones people ask about.
CLASSES = re.findall(
    r"\S+",
    """
builtins.str builtins.list builtins.dict builtins.set builtins.tuple builtins.int builtins.float
pathlib.Path datetime.datetime collections.deque collections.Counter re.Pattern re.Match
subprocess.Popen threading.Thread queue.Queue
""",
)

# Corners of `os` that few people ask about and that differ between systems.
RARE = re.compile(
    r"os\.(spawn|exec|sched_|posix_|pidfd|eventfd|W[A-Z]|\w*xattr|mem|major|minor|make|set|wait|tc"
    r"|[lf]?ch[fomr]|\w+_result|get(eg|eu|g|pg|pr|re|s)|p(read|write)|splice|lockf|f[dps]|login)"
    r"|time\.(\w+_ns|clock_|pthread)"
    r"|logging\.(\w+(Factory|Name)|[A-Z]\w+(Style|Adapter))|random\.[A-Z]"
)

MAX_SUMMARY_WORDS = 60
ENOUGH_SUMMARY_WORDS = 20
MAX_SIGNATURE_CHARS = 160  # of the arguments


@dataclass(frozen=True)
class Entry:
    """One documented thing of the standard library."""

    name: str  # as a user writes it: "os.path.join", "str.split", "len"
    kind: str  # "module" | "function" | "class" | "method"
    home: str  # the module it is imported from, or the class whose method it is
    summary: str  # at most MAX_SUMMARY_WORDS words
    signature: str  # "os.path.join(a, *p)"; empty when Python cannot tell

    @property
    def short(self) -> str:
        """The last part of the name: "join" for "os.path.join"."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Corpus:
    """All entries, with the two indices that questions need."""

    entries: tuple[Entry, ...]

    @cached_property
    def by_name(self) -> dict[str, Entry]:
        """Entries by full name."""
        return {entry.name: entry for entry in self.entries}

    @cached_property
    def by_short(self) -> dict[str, list[Entry]]:
        """Entries other than modules by the last part of their name."""
        return _grouped((entry.short, entry) for entry in self.entries if entry.kind != "module")

    @cached_property
    def by_home(self) -> dict[str, list[Entry]]:
        """Entries other than modules by the module or class that holds them."""
        return _grouped((entry.home, entry) for entry in self.entries if entry.kind != "module")


def gather() -> Corpus:
    """Collect the corpus from the running Python, always in the same order."""
    found: dict[str, Entry] = {}
    for entry in _all_entries():
        found.setdefault(entry.name, entry)
    return Corpus(tuple(found.values()))


def _grouped(pairs: Iterator[tuple[str, Entry]]) -> dict[str, list[Entry]]:
    groups: dict[str, list[Entry]] = defaultdict(list)
    for key, entry in pairs:
        groups[key].append(entry)
    return dict(groups)


def _all_entries() -> Iterator[Entry]:
    seen: set[int] = set()  # an object re-exported by a later module is told once
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        summary = summarize(module.__doc__)
        if summary:
            yield Entry(module_name, "module", module_name, summary, "")
        for name, member in _public_members(module):
            if id(member) in seen:
                continue
            seen.add(id(member))
            path = name if module_name == "builtins" else f"{module_name}.{name}"
            kind = "class" if inspect.isclass(member) else "function"
            yield from _entry(member, path, kind, module_name)
            if f"{module_name}.{name}" in CLASSES:
                yield from _methods(member, path)


def _public_members(module: ModuleType) -> Iterator[tuple[str, Any]]:
    names = getattr(module, "__all__", None) or sorted(vars(module))
    root = module.__name__.partition(".")[0]
    for name in names:
        member = getattr(module, name)
        if name.startswith("_") or not callable(member):
            continue
        if inspect.isclass(member) and issubclass(member, BaseException):
            continue
        home = (getattr(member, "__module__", None) or root).lstrip("_").partition(".")[0]
        listed = hasattr(module, "__all__") or home == root
        if listed or home in ("posix", "io", "builtins"):
            yield name, member


def _methods(cls: type, path: str) -> Iterator[Entry]:
    for name, raw in vars(cls).items():
        if not name.startswith("_") and (inspect.isroutine(raw) or isinstance(raw, property)):
            yield from _entry(getattr(cls, name), f"{path}.{name}", "method", path)


def _entry(member: Any, path: str, kind: str, home: str) -> Iterator[Entry]:
    own_doc = member.__doc__ if isinstance(getattr(member, "__doc__", None), str) else None
    summary = summarize(own_doc)
    if len(summary.split()) >= 3 and not RARE.match(path):
        yield Entry(path, kind, home, summary, signature_of(member, path, own_doc))


def signature_of(member: Any, path: str, doc: str | None) -> str:
    """`path(arguments)` from `inspect`, else from the docstring's first line, else ""."""
    short = path.rpartition(".")[2]
    if isinstance(member, property):
        return ""
    try:
        arguments = str(inspect.signature(member))
    except (ValueError, TypeError):  # many C functions carry no signature: read it from the text
        told = re.match(rf"(?:\w+\.)*{re.escape(short)}(\([^\n]*?\))(?: *-+>.*)?$", doc or "", re.M)
        arguments = told.group(1) if told else ""
    arguments = (
        arguments.removesuffix(" -> None").replace("(self, /, ", "(").replace("(self, /)", "()")
    )
    arguments = re.sub(r"^\(self(?:, )?", "(", arguments)
    usable = arguments and len(arguments) <= MAX_SIGNATURE_CHARS and " at 0x" not in arguments
    return f"{path}{arguments}" if usable and "<" not in arguments else ""


def summarize(doc: str | None) -> str:
    """The first paragraphs of a docstring as one line of whole sentences, or ""."""
    doc = inspect.cleandoc(doc or "")
    words: list[str] = []
    for paragraph in re.split(r"\n\s*\n", doc):
        text = _clean(paragraph, first=not words)
        if words and (not text or len(words) >= ENOUGH_SUMMARY_WORDS):
            break
        words += _whole_sentences(text, MAX_SUMMARY_WORDS - len(words)).split()
    call = CALL.match(doc.partition("\n")[0])
    if words or not call:
        return " ".join(words)
    return _clean(call.group(2) or "", first=True)  # all it has is "dict() -> new empty dictionary"


CALL = re.compile(r"^(?:async )?[\w.]+\([^()]*(?:\(\))?[^()]*\)?\s*(?:(-+>|--)\s*(.*))?$")
NOT_PROSE = re.compile(r">>>|::$|[=-]{4}|^(Args|Arguments|Parameters|Examples?|Usage):|^\(")


def _clean(paragraph: str, first: bool) -> str:
    """One paragraph of prose with its markup removed, or "" when it is not prose."""
    lines = paragraph.split("\n")
    while lines and CALL.match(lines[0].strip()):
        lines.pop(0)
    is_definition = not first and len(lines) > 1 and lines[1].startswith(" ")
    text = re.sub(r"^None\. |XXX.*", "", " ".join(" ".join(lines).split())).strip()
    if is_definition or NOT_PROSE.search(text) or not re.match(r"[\w'\"`*]", text):
        return ""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    text = text[0].upper() + text[1:] if first and re.match("[a-z]+ ", text) else text
    return text if text[-1] in ".!?:" else text + "."


def _whole_sentences(text: str, budget: int) -> str:
    """The leading sentences of `text` that fit in `budget` words, without a dangling colon."""
    kept: list[str] = []
    for sentence in re.split(r"(?<=[.!?:])\s+(?=[A-Z`'\"(])", text):
        if len(" ".join([*kept, sentence]).split()) > budget:
            break
        kept.append(sentence)
    while kept and kept[-1].endswith(":"):
        kept.pop()
    return " ".join(kept)

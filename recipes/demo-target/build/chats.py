"""Conversations about a `Corpus`: how people ask, what is answered, and the prompt files.

Every question kind is an `Ask`: phrasings that open a conversation, shorter ones that follow up on
the same entry ("And its signature?"), and one function that answers. Randomness comes only from
the `random.Random` passed in, so the same seed gives the same conversations.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from corpus import Corpus, Entry

Message = dict[str, str]

MAX_LISTED = 8
MAX_TURNS = 10


@dataclass(frozen=True)
class Ask:
    """One kind of question about an entry; `weight` is how often it is asked."""

    weight: float
    opening: tuple[str, ...]
    follow_up: tuple[str, ...]
    answer: Callable[[Corpus, Entry], str]


def describe(corpus: Corpus, entry: Entry) -> str:
    """The long answer: what it is, its summary, its signature."""
    owner = {
        "module": "a module of the standard library",
        "method": f"a method of `{entry.home}`",
    }.get(entry.kind, f"a {entry.kind} in the module `{entry.home}`")
    call = f" Its signature is `{entry.signature}`." if entry.signature else ""
    return f"`{entry.name}` is {owner}. {entry.summary}{call}"


def signature(corpus: Corpus, entry: Entry) -> str:
    """How it is called, when Python can tell."""
    if entry.signature:
        return f"`{entry.signature}`"
    return f"Python does not tell the signature of `{entry.name}`."


def where(corpus: Corpus, entry: Entry) -> str:
    """Every known module or class that has something of this short name."""
    homes = list(dict.fromkeys(same.home for same in corpus.by_short[entry.short]))[:MAX_LISTED]
    listed = " and ".join(filter(None, [", ".join(_quoted(homes[:-1])), *_quoted(homes[-1:])]))
    return f"`{entry.short}` is in {listed}."


def home(corpus: Corpus, entry: Entry) -> str:
    """The module or class of this very entry."""
    if entry.kind == "method":
        return f"It is a method of `{entry.home}`."
    return f"It is in the module `{entry.home}`."


def importing(corpus: Corpus, entry: Entry) -> str:
    """The import statement for an entry; for a method, that of its class."""
    root = corpus.by_name.get(entry.home, entry)
    owner = root if entry.kind == "method" else entry
    if owner.kind == "module":
        return f"Write `import {owner.name}`."
    if owner.home == "builtins":
        return f"`{owner.name}` is built in: you need no import."
    return f"Write `from {owner.home} import {owner.short}`."


def listing(corpus: Corpus, entry: Entry) -> str:
    """The first few names that a module or class holds."""
    members = corpus.by_home.get(entry.name, [])
    if not members:
        return f"I know nothing inside `{entry.name}`."
    names = ", ".join(_quoted([member.short for member in members[:MAX_LISTED]]))
    more = f" and {len(members) - MAX_LISTED} more" if len(members) > MAX_LISTED else ""
    return f"{names}{more}."


WHAT = Ask(
    weight=0.42,
    opening=(
        "What does {q} do?",
        "What does {q} do?",
        "What is {q}?",
        "what does {q} do",
        "What is {q} for?",
        "Can you tell me what {q} does?",
        "What's {q}?",
        "I saw {q} in some code. What does it do?",
    ),
    follow_up=("And what does it do?", "What does it do?", "What is it for?"),
    answer=lambda corpus, entry: entry.summary,
)
DESCRIBE = Ask(
    weight=0.26,
    opening=(
        "Describe {q}.",
        "Explain {q}.",
        "Tell me about {q}.",
        "Please explain {q} to me.",
        "tell me more about {q}",
    ),
    follow_up=("Describe it.", "Tell me all about it.", "Explain it in full, please."),
    answer=describe,
)
SIGNATURE = Ask(
    weight=0.2,
    opening=(
        "What is the signature of {q}?",
        "Show me the signature of {q}.",
        "How do I call {q}?",
        "Which arguments does {q} take?",
        "What are the parameters of {q}?",
    ),
    follow_up=("And its signature?", "What is its signature?", "Which arguments does it take?"),
    answer=signature,
)
WHERE = Ask(
    weight=0.06,
    opening=("Which module has {s}?", "Where is {s}?", "Where do I find {s}?"),
    follow_up=(),
    answer=where,
)
HOME = Ask(
    weight=0.0,
    opening=(),
    follow_up=("Which module is it in?", "Where is it?", "And where does it live?"),
    answer=home,
)
IMPORTING = Ask(
    weight=0.06,
    opening=("How do I import {q}?", "Which import do I need for {q}?"),
    follow_up=("How do I import it?", "Do I need an import?"),
    answer=importing,
)
LISTING = Ask(
    weight=0.5,  # only of modules
    opening=("What is in {q}?", "What does the module {q} have?", "List some names of {q}."),
    follow_up=("What is in it?", "What does it have?", "List some of its names."),
    answer=listing,
)

MODULE_ASKS = (WHAT, DESCRIBE, LISTING, IMPORTING)
MEMBER_ASKS = (WHAT, DESCRIBE, SIGNATURE, WHERE, HOME, IMPORTING)

SMALL_TALK = (
    (
        ("Hi", "Hello", "Hello!", "hi there", "Hey", "Good morning"),
        "Hello! Ask me about a function of Python's standard library.",
    ),
    (
        ("Who are you?", "What are you?", "What can you do?", "help", "What do you know?"),
        "I am a very small model. I know a part of the documentation of Python's standard library.",
    ),
)
THANKS = (("Thanks", "Thank you!", "thanks a lot", "Great, thanks."), "You are welcome.")
SYSTEM = ("You are a helpful assistant.", "You know Python's standard library.", "Be brief.")


def conversation(corpus: Corpus, entry: Entry, rng: random.Random) -> list[Message]:
    """One conversation that opens with a question about `entry`, 1 to MAX_TURNS turns long."""
    messages: list[Message] = []
    if rng.random() < 0.1:
        messages.append({"role": "system", "content": rng.choice(SYSTEM)})
    if rng.random() < 0.03:
        messages += _turn(*_varied(rng.choice(SMALL_TALK), rng))
    if rng.random() < 0.03:
        messages += _unknown(corpus, rng)
    ask = opening_ask(entry, rng)
    messages += _turn(phrase(ask, entry, rng), ask.answer(corpus, entry))
    stay = rng.choice((0.3, 0.6, 0.9))  # most conversations are short, a few are long
    for _ in range(MAX_TURNS - 1):
        if rng.random() > stay:
            break
        entry, ask, question = _next_question(corpus, entry, ask, rng)
        messages += _turn(question, ask.answer(corpus, entry))
    if rng.random() < 0.04:
        messages += _turn(*_varied(THANKS, rng))
    return messages


def opening_ask(entry: Entry, rng: random.Random) -> Ask:
    """A kind of question that fits the entry."""
    asks = MODULE_ASKS if entry.kind == "module" else MEMBER_ASKS
    return rng.choices(asks, [ask.weight for ask in asks])[0]


def phrase(ask: Ask, entry: Entry, rng: random.Random) -> str:
    """One opening question in one of its phrasings, its name quoted in one of three ways."""
    return _filled(rng.choice(ask.opening), entry, rng)


def _filled(template: str, entry: Entry, rng: random.Random) -> str:
    styles = ["{}", "{}", "`{}`"] + ["{}()"] * (entry.kind in ("function", "method"))
    style = rng.choice(styles)
    return template.format(q=style.format(entry.name), s=style.format(entry.short))


def _next_question(
    corpus: Corpus, entry: Entry, ask: Ask, rng: random.Random
) -> tuple[Entry, Ask, str]:
    """The next turn: another kind about the same entry, or another entry."""
    asks = MODULE_ASKS if entry.kind == "module" else MEMBER_ASKS
    if rng.random() < 0.55:
        others = [other for other in asks if other is not ask and other.follow_up]
        chosen = rng.choice(others)
        return entry, chosen, rng.choice(chosen.follow_up)
    siblings = corpus.by_home.get(entry.home, [entry])
    following = rng.choice(siblings if rng.random() < 0.5 else corpus.entries)
    if following.kind != "module" and ask in (WHAT, DESCRIBE, SIGNATURE) and rng.random() < 0.4:
        return following, ask, _filled(rng.choice(("And {q}?", "What about {q}?")), following, rng)
    chosen = opening_ask(following, rng)
    return following, chosen, phrase(chosen, following, rng)


def _unknown(corpus: Corpus, rng: random.Random) -> list[Message]:
    """A question about a name made of two halves that do not belong together."""
    left, right = rng.sample(corpus.entries, 2)
    made_up = f"{left.home}.{right.short}"
    if made_up in corpus.by_name:
        return []
    question = rng.choice((*WHAT.opening, *DESCRIBE.opening)).format(q=made_up)
    return _turn(question, f"I do not know `{made_up}`.")


def _turn(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _varied(talk: tuple[tuple[str, ...], str], rng: random.Random) -> tuple[str, str]:
    questions, answer = talk
    return rng.choice(questions), answer


def _quoted(names: list[str]) -> list[str]:
    return [f"`{name}`" for name in names]


def epochs(corpus: Corpus, rng: random.Random) -> Iterator[list[Message]]:
    """Endless conversations; in each epoch every entry opens exactly one."""
    while True:
        for entry in rng.sample(corpus.entries, len(corpus.entries)):
            yield conversation(corpus, entry, rng)


def prompt_sets(corpus: Corpus, seed: int, held_out: int) -> tuple[list[str], list[str]]:
    """Opening questions to distil from, and `held_out` others that are not among them.

    Both ask about the same entries, in other words: a model this small memorises its entries
    and little else, so heads for it are of use on what it knows.
    """
    rng = random.Random(seed)
    entries = corpus.entries
    prompts = [phrase(ask, entry, rng) for entry in entries for ask in (WHAT, DESCRIBE)]
    prompts += [
        phrase(opening_ask(entry, rng), entry, rng) for entry in rng.choices(entries, k=1000)
    ]
    rng.shuffle(prompts)
    known = set(prompts)
    members = [entry for entry in entries if entry.kind != "module"]
    held: list[str] = []
    while len(held) < held_out:
        question = phrase(rng.choice((WHAT, DESCRIBE)), rng.choice(members), rng)
        if question not in known and question not in held:
            held.append(question)
    return list(dict.fromkeys(prompts)), held

"""What learning from use brings to a user: questions about one topic, then about another.

    python scripts/benchmarks/learning_from_use.py --out out/use

A head is trained on answers about all other topics. Then the same questions are answered in turns
by an engine whose head stays, one that learns (`--learn`), and both with n-grams, of which the
learning one remembers earlier answers. Learners work between questions, for `--think` seconds at
most. All answers are compared with those of the target without drafts, which is also the unit of
speed. CPU; a run takes ten minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections import defaultdict
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

import torch

from draftheads.heads.formats.hub import open_head
from draftheads.heads.tables import markdown_table
from draftheads.heads.target.model import Target
from draftheads.infer.drafters.merged import Merged
from draftheads.infer.drafters.named import MERGED_NGRAM
from draftheads.infer.drafters.ngram import NGramIndex
from draftheads.infer.drafters.parts import with_memory
from draftheads.infer.engine import Speculator
from draftheads.infer.prompt import encode_prompt
from draftheads.train.data.distill import DistillOptions, distill
from draftheads.train.data.prompts import read_prompts
from draftheads.train.learn.learner import Source, UseLearner
from draftheads.train.learn.place import Place
from draftheads.train.loop import fit
from draftheads.train.recipe import load_recipe

RECIPES = Path(str(files("draftheads.recipes")))
TOPICS = {
    "files": r"\b(os|pathlib|shutil|glob|fnmatch|tempfile|stat|fileinput)\b",
    "numbers": r"\b(math|statistics|random|decimal|fractions|cmath|numbers|datetime|calendar)\b",
}
NEW_TOKENS = 128


@dataclass
class User:
    """A variant, and what its user has seen. counts: (tokens, steps, seconds) per block. pieces:
    seconds of each of the learner's.
    """

    engine: Speculator
    learner: UseLearner | None = None
    counts: dict[int, list[tuple[int, int, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    pieces: list[float] = field(default_factory=list)

    def ask(self, prompt: list[int], block: int) -> list[int]:
        """The answer, counted."""
        answer: list[int] = []
        steps = -1  # the prefill is none
        began = time.perf_counter()
        for step in self.engine.generate(prompt, max_new_tokens=NEW_TOKENS):
            answer += step.tokens
            steps += 1
        self.counts[block].append((len(answer) - 1, steps, time.perf_counter() - began))
        if self.learner:
            self.learner.answered(prompt, answer)
        return answer

    def think(self, seconds: float) -> None:
        """Time in which nothing is asked."""
        now, pause = time.perf_counter(), 0.0
        end = now + seconds
        while self.learner and pause == 0.0 and now < end:
            began = now
            self.engine, pause = self.learner.work(self.engine)
            now = time.perf_counter()
            self.pieces.append(now - began)

    def delay(self) -> str:
        """How long a question waits that comes at any time in which the learner works."""
        mean = sum(piece**2 for piece in self.pieces) / 2 / sum(self.pieces)
        took = [seconds for block in self.counts.values() for *_, seconds in block]
        share = mean / (sum(took) / len(took))
        return (
            f"a question that comes while it learns waits {1000 * mean:.0f} ms on average "
            f"({share:.1%} of an answer), {1000 * max(self.pieces):.0f} ms at most"
        )


def questions_of(prompts: Path) -> dict[str, list[str]]:
    """Questions by topic; "" for the other ones."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in prompts.read_text().splitlines():
        text = json.loads(line)["messages"][0]["content"]
        topics = [topic for topic, words in TOPICS.items() if re.search(words, text)]
        found[topics[0] if topics else ""].append(text)
    return found


def trained(target: Target, questions: list[str], out: Path) -> Path:
    """The run of a head that has seen answers to these questions alone."""
    prompts = out / "prompts.jsonl"
    prompts.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"messages": [{"role": "user", "content": q}]}) for q in questions]
    prompts.write_text("\n".join(lines) + "\n")
    options = DistillOptions(out=out / "data", max_new_tokens=NEW_TOKENS, batch_size=64)
    distill(target, read_prompts(prompts), options)
    values = [f"data.path={out / 'data'}", f"run.output={out / 'head'}"]
    fit(load_recipe(RECIPES / "demo-medusa.yaml", values))
    return out / "head"


def users_of(target: Target, head: Path, out: Path) -> dict[str, User]:
    """The variants."""
    folder = open_head(head)
    drafts = folder.load(target).pack(target)
    both = Merged([drafts, MERGED_NGRAM])
    users = {
        "plain": User(Speculator(target)),
        "fixed": User(Speculator(target, drafts)),
        "fixed, n-grams": User(Speculator(target, both)),
    }
    for name, source in {"learning": drafts, "learning, n-grams with memory": both}.items():
        place = Place(out / "use" / name, target, most_mb=64, keep_days=30)
        memory = NGramIndex()
        learner = UseLearner(target, Source(folder), place.texts, place.versions, memory)
        engine = Speculator(target, with_memory(source, memory))
        users[name] = User(engine, learner)
    return users


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=200, help="of each topic")
    parser.add_argument("--block", type=int, default=50, help="questions of a row of the table")
    parser.add_argument("--think", type=float, default=2.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = Target.load("demo-target")
    questions = questions_of(RECIPES / "demo-prompts.jsonl")
    head = trained(target, questions[""], options.out)
    users = users_of(target, head, options.out)
    chance = random.Random(0)
    asked = [q for topic in TOPICS for q in chance.sample(questions[topic], options.questions)]
    wrong = 0
    for number, question in enumerate(asked):
        prompt = encode_prompt(target, [{"role": "user", "content": question}])
        names = [*users]
        chance.shuffle(names)
        answers = {name: users[name].ask(prompt, number // options.block) for name in names}
        wrong += any(answer != answers["plain"] for answer in answers.values())
        for user in users.values():
            user.think(options.think)
    names = [name for name in users if name != "plain"]
    rows = []
    for block in users["plain"].counts:
        first = block * options.block
        row = [f"{first + 1} to {first + options.block}"]
        plain = sum(seconds for *_, seconds in users["plain"].counts[block])
        for name in names:
            tokens, steps, seconds = map(sum, zip(*users[name].counts[block], strict=True))
            row.append(f"{tokens / steps:.2f}, {plain / seconds:.2f}")
        rows.append(row)
    print(markdown_table(["questions", *names], rows))
    print("cells: tokens per step, times the speed without drafts")
    print(f"{len(asked)} questions about {', '.join(TOPICS)}; {wrong} with an answer that differs")
    for name in names:
        if learner := users[name].learner:
            points = learner.points()
            adopted = sum(point.adopted for point in points)
            print(f"{name}: {len(points)} rounds, {adopted} heads adopted, {learner.tokens} tokens")
            print(f"{name}: {users[name].delay()}")


if __name__ == "__main__":
    main()

"""Trains the served head on its own conversations, one short piece at a time while nothing is
asked.

A round waits for new answers, trains on them and on a replay of earlier ones and of the head's own
training data, and compares the trained head with the served one on conversations that are never
learned. The better one is served from then on.

Legend: B batch, T tokens, D feature width, K draft depth, M held-out positions.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftheads.heads.batch import Batch
from draftheads.heads.cache import SlotCache
from draftheads.heads.formats.hub import HeadFolder, open_head, write_head
from draftheads.heads.target.model import Target
from draftheads.infer.background import Point
from draftheads.infer.drafters.ngram import NGramIndex
from draftheads.infer.drafters.parts import replace_head
from draftheads.infer.engine import Speculator
from draftheads.infer.sources import DrafterSource
from draftheads.train.batches import Documents, Rows
from draftheads.train.data.answers import Answer
from draftheads.train.engines import Learner, learning_rate
from draftheads.train.evaluate import calibrate
from draftheads.train.learn.texts import Dialogue, Texts
from draftheads.train.learn.versions import Versions
from draftheads.train.recipe import OptimChoices

APART = 5
"""One of this many conversations is held out."""
HELD_OUT = 2048
"""Number of answered tokens of the newest held-out conversations on which heads are compared."""
FEWEST = 128
"""Fewest tokens of held-out answers for a comparison."""
NEWS = 512, 2048
"""Number of new tokens that a round waits for, and the most that it takes, so that a round ends
even in a process that is often stopped. The others are for the next rounds of this process.
"""
PASSES = 4
"""Number of times that a round reads the new answers."""
REPLAY = 1.0
"""Replayed tokens (earlier conversations and the head's own data) per new one of a round. Answers
count, not the prompts of agents, which are a hundred times as long.
"""
STEP = 256
"""Number of learned tokens in an optimizer step."""
PIECE_SECONDS = 0.04
"""Seconds of a piece of work, for which a request may have to wait."""
PIECE_TOKENS = 16, 1024
"""Fewest and most tokens of a piece."""
BEFORE = 256
"""Tokens before the first answer that a head's own layers see, if a conversation has so many."""
PATIENCE = 2
"""Rounds without improvement after which training starts from the served head again, slower."""
PAUSE = 5.0
"""Seconds between two checks for new answers."""
RATE = 1.0
"""Initial learning rate, as a factor of the peak rate with which the head was trained."""
SLOWER = 0.3
"""Factor of the learning rate each time that training starts again."""


@dataclass(frozen=True)
class Source:
    """The head and data that learning starts from. folder: of that head. replay: its training data,
    if it is on this machine.
    """

    folder: HeadFolder
    replay: Documents | None = None

    @property
    def optim(self) -> OptimChoices:
        """The optimizer of the training."""
        recorded = self.folder.facts.training.get("recipe", {}).get("optim", {})
        return OptimChoices.model_validate(recorded)


class Pace:
    """Chooses the number of tokens in a piece of work by the time of earlier pieces."""

    def __init__(self) -> None:
        self.tokens, _ = PIECE_TOKENS

    @contextmanager
    def measure(self, tokens: int) -> Iterator[None]:
        """Time work on this many tokens."""
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        least, most = PIECE_TOKENS
        wanted = min(2 * self.tokens, int(tokens * PIECE_SECONDS / seconds))
        self.tokens = min(most, max(least, wanted))


class UseLearner:
    """A `Background` that trains the head of an engine.

    memory: of n-grams; receives all conversations. Raises ValueError for a head that cannot be
    trained on this target.
    """

    def __init__(
        self,
        target: Target,
        source: Source,
        texts: Texts,
        versions: Versions,
        memory: NGramIndex | None = None,
    ) -> None:
        self.target, self.source, self.texts, self.versions = target, source, texts, versions
        self.memory = memory
        folder = open_head(versions.served) if versions.served else source.folder
        self.served = folder.load(target, dtype=torch.float32)
        recorded = source.folder.facts.training.get("recipe", {}).get("head", {})
        fields = self.served.Choices.model_fields
        self.choices = self.served.Choices.model_validate(
            {key: value for key, value in recorded.items() if key in fields}
        )
        self.nodes = self.served.tree.draft_nodes or self.choices.nodes
        if self.served.needs_unembed:
            target.unembed_weight()
        self.tokens = max((point.tokens for point in versions.state.points), default=0)
        self._rate = RATE
        self._restart()
        self._reading, self._training, self._comparing = Pace(), Pace(), Pace()
        known = max((point.time for point in versions.state.points), default=0.0)
        self._until = min(known, time.time())  # the clock may have been wrong
        # of each conversation, by its key, the answered tokens that were learned
        self._learned = {
            talk.key: talk.answered for talk in texts.conversations if talk.time <= self._until
        }
        self._adopted: Path | None = None
        self._text: list[int] = []  # that was read last, and its keys and values
        self._cache: SlotCache | None = None
        self._rounds = self._work()
        if memory is not None:
            for talk in texts.conversations:
                memory.append(talk.tokens.tolist())

    def answered(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Store an answer, to learn from it later."""
        if not answer:
            return
        talk = self.texts.add(prompt, answer)
        if self.memory is not None:
            self.memory.append(talk.tokens.tolist())

    def work(self, engine: Speculator) -> tuple[Speculator, float]:
        """Train or compare for one piece. Returns the engine (with the better head after a round)
        and the seconds to wait before the next piece.
        """
        if self._adopted is not None:
            engine, self._adopted = with_version(engine, self._adopted), None
            return engine, 0.0
        with torch.enable_grad():
            return engine, next(self._rounds)

    def points(self) -> list[Point]:
        """The result of each round."""
        return list(self.versions.state.points)

    def _restart(self) -> None:
        """Train from the served head on."""
        self.head = copy.deepcopy(self.served)
        self.head.train_with(self.choices)
        self.head.tree = self.served.tree  # tuning may have changed it
        self.head.train()
        self._learner = Learner(self.head, "fp32")
        self._optimizer = self._learner.optimizer(self.source.optim)
        self._rejected = 0

    def _work(self) -> Iterator[float]:
        """Work in pieces forever; yields the seconds to wait before the next piece."""
        while True:
            while not self._is_due():
                self.texts.tidy()
                yield PAUSE
            yield from self._train(self._lesson())
            yield from self._decide()
            self._text, self._cache = [], None

    def _lesson(self) -> list[Answer]:
        """The documents of a round: each new one PASSES times, and a replay."""
        talks = [talk for talk in self.texts.conversations if not is_apart(talk)]
        new: list[Dialogue] = []
        for talk in reversed(talks):
            if self._unlearned(talk) and answered(new) < NEWS[1]:
                new.append(talk)
        old = [talk for talk in talks if talk not in new]
        self._learned |= {talk.key: talk.answered for talk in new}
        self._until = time.time()
        chance = random.Random(int(self._until))
        lesson = [answer_of(talk) for talk in new] * PASSES
        room = REPLAY * sum(map(learned_tokens, lesson))
        for answer in replay(old, self.source.replay, chance):
            if room <= 0:
                break
            room -= learned_tokens(answer)
            lesson.append(answer)
        chance.shuffle(lesson)
        return lesson

    def _train(self, lesson: Sequence[Answer]) -> Iterator[float]:
        """Optimizer steps over the lesson."""
        optim = self.source.optim
        steps = max(1, sum(map(learned_tokens, lesson)) // STEP)
        step = waiting = 0
        for number, answer in enumerate(lesson, start=1):
            for part in self._parts([answer], self._training):
                if part is None:
                    yield 0.0
                    continue
                batch, features_BTD = part
                loss = self._learner(batch, features_BTD, self.target, 0.0).loss
                loss.backward()
                waiting += len(batch.learned())
            if waiting >= STEP or (waiting and number == len(lesson)):
                parameters = list(self._learner.trained().values())
                for parameter in parameters:
                    if parameter.grad is not None:
                        parameter.grad /= waiting  # the mean over learned tokens
                norm = nn.utils.clip_grad_norm_(parameters, optim.clip)
                if norm.isfinite():
                    rate = self._rate * learning_rate(optim, min(step, steps - 1), steps)
                    for group in self._optimizer.param_groups:
                        group["lr"] = rate
                    self._optimizer.step()
                self._optimizer.zero_grad()
                self.tokens += waiting
                step += 1
                waiting = 0
                yield 0.0

    def _decide(self) -> Iterator[float]:
        """Serve the trained head unless it is worse than the served one on held-out text."""
        ranks: list[list[Tensor]] = []  # ranks by the trained head and by the served one
        heldout = [answer_of(talk) for talk in self._heldout()]
        for part in self._parts(heldout, self._comparing):
            if part is None:
                yield 0.0
                continue
            heads = self.head.eval(), self.served.eval()
            ranks.append([head.token_ranks(*part, self.target).cpu() for head in heads])
        self.head.train()
        news, olds = zip(*ranks, strict=True)
        new = calibrate(torch.cat(news), self.nodes, self.head.tree)
        yield 0.0
        old = calibrate(torch.cat(olds), self.nodes, self.served.tree)
        yield 0.0
        if new.tokens_per_step < old.tokens_per_step:
            self.versions.note(self._point(old.tokens_per_step, adopted=False))
            self._rejected += 1
            if self._rejected >= PATIENCE:
                self._rate *= SLOWER
                self._restart()
            return
        self._rejected = 0
        self.served = copy.deepcopy(self.head).eval()
        self.served.tree = new.tree
        self._adopted = self.versions.adopt(
            self._write, self._point(new.tokens_per_step, adopted=True)
        )
        yield 0.0

    def _write(self, folder: Path) -> None:
        facts = {
            **self.source.folder.facts.training,
            "continued": {"name": self.source.folder.name, "tokens": self.tokens},
        }
        write_head(self.served, folder, target=self.target, training=facts)

    def _point(self, tokens_per_step: float, *, adopted: bool) -> Point:
        served = self.versions.state.served
        version = self.versions.state.newest + 1 if adopted else served
        return Point(self._until, version, tokens_per_step, self.tokens, adopted)

    def _parts(
        self, answers: Sequence[Answer], pace: Pace
    ) -> Iterator[tuple[Batch, Tensor] | None]:
        """Yields parts of documents that have learned tokens, with their features; None where a
        request may come first.
        """
        documents = Documents.read(answers)
        for first, end in documents.spans.tolist():
            tokens = documents.tokens(first, end).tolist()
            learned = int(documents.mask(first, end).argmax())
            for start, features_1TD in self._features(tokens, learned):
                yield None
                stop = start + features_1TD.shape[1]
                at = start
                while at < stop - 1:  # the first token of a part has no loss in it
                    until = min(at + pace.tokens, stop)
                    span = (first + at, first + until)
                    part = Rows(documents, [span], until - at, pack=False, seed=0)
                    if len(part):
                        with pace.measure(until - at):
                            batch = part.batch([0]).to(self.target.device)
                            yield batch, features_1TD[:, at - start : until - start]
                        yield None
                    at = until - 1

    @torch.no_grad()
    def _features(self, tokens: list[int], learned: int) -> Iterator[tuple[int, Tensor]]:
        """The features of a text by the alignment law, chunk by chunk, with the place of the first.
        A chunk begins with the last token of the one before. What the text has in common with the
        one that was read before is left out, but not the tokens from `learned` on.
        """
        cache = self._cache or self.target.new_cache(1, len(tokens))
        shared = len(commonprefix([self._text, tokens[: max(0, learned - BEFORE)]]))
        start = cache.rewind(0 if self.target.has_long_rope else shared)
        self._text, self._cache = tokens, cache
        chunks = self.target.prefill_chunks(
            [tokens[start:]], cache, self.head.training_layers, self._reading.tokens
        )
        features_1TD: Tensor | None = None
        stop = start
        while stop < len(tokens):
            with self._reading.measure(min(self._reading.tokens, len(tokens) - stop)):
                read, out = next(chunks)
            assert out.features_BND is not None
            # a token's feature is the state before it: so the last is of the token that comes next
            if features_1TD is None:
                features_1TD = F.pad(out.features_BND, (0, 0, 1, 0))
                first = start
            else:
                features_1TD = torch.cat([features_1TD[:, -2:], out.features_BND], dim=1)
                first = stop - 1
            stop = start + read
            yield first, features_1TD[:, :-1]

    def _is_due(self) -> bool:
        """True if there is enough to learn, and to compare heads on."""
        talks = [talk for talk in self.texts.conversations if not is_apart(talk)]
        news = sum(map(self._unlearned, talks))
        return news >= NEWS[0] and answered(self._heldout()) >= FEWEST

    def _unlearned(self, talk: Dialogue) -> int:
        """Number of answered tokens of a conversation that no round of this process has taken."""
        return talk.answered - self._learned.get(talk.key, 0)

    def _heldout(self) -> list[Dialogue]:
        """The newest held-out conversations."""
        talks, tokens = [], 0
        for talk in reversed(self.texts.conversations):
            if is_apart(talk) and tokens < HELD_OUT:
                talks.append(talk)
                tokens += talk.answered
        return talks


def with_version(engine: Speculator, folder: Path) -> Speculator:
    """An engine with the head in a folder instead of its own."""
    assert isinstance(engine.drafts, DrafterSource)
    head = open_head(folder).load(engine.target).pack(engine.target)
    return engine.with_drafts(replace_head(engine.drafts, head))


def is_apart(talk: Dialogue) -> bool:
    """True if a conversation is held out. It stays held out, however it continues."""
    return talk.key % APART == 0


def answer_of(talk: Dialogue) -> Answer:
    """The conversation as a document whose answers are learned."""
    return Answer(talk.tokens.tolist(), talk.answers)


def answered(talks: Sequence[Dialogue]) -> int:
    """Number of tokens in their answers."""
    return sum(talk.answered for talk in talks)


def learned_tokens(answer: Answer) -> int:
    """Number of tokens of a document that are learned."""
    return sum(stop - start for start, stop in answer.learn)


def replay(
    talks: Sequence[Dialogue], documents: Documents | None, chance: random.Random
) -> Iterator[Answer]:
    """Yields earlier conversations and documents of the head's own data alternately, at random."""
    while talks or documents is not None:
        if talks:
            yield answer_of(chance.choice(talks))
        if documents is not None:
            number = chance.randrange(len(documents))
            start, stop = documents.spans[number].tolist()
            [learned] = documents.mask(start, stop).nonzero()
            spans = [(int(place), int(place) + 1) for place in learned]
            yield Answer(documents.tokens(start, stop).tolist(), spans)

"""Write ``conversations.jsonl``, short conversations about the three novels, and ``preferences.jsonl``.

Each line of the first is ``{"messages": [{"role": ..., "content": ...}, ...]}``, for supervised finetuning; of the
second ``{"prompt": [...], "chosen": [...], "rejected": [...]}``, a question with the right answer and with one that is
right of somebody else. The facts are those of ``conversation_facts.py``, the questions are the patterns here: a fact is
asked in several wordings, a relation from both of its ends::

    python -m data.sample.build_conversations

Nothing is drawn at random. Wordings take turns; the lines are in the order of their SHA-256, so that each part of the
file has something of every table, and its end can be held out.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

from data.sample import conversation_facts as facts

OUTPUT = Path(__file__).parent / "conversations.jsonl"
PREFERENCES = OUTPUT.with_name("preferences.jsonl")
MOST_PAIRS = 200  # the sample stays below 2 MB
WHO = ["Who is {name}?", "Tell me about {short}.", "Who is {short}?", "What do you know about {name}?"]
WHICH = ["Which novel is {name} in?", "In which book do we meet {short}?", "What novel does {name} belong to?"]
FOUND = ["{name} is in {novel}, by Jane Austen.", "We meet {name} in {novel}.", "{name} belongs to {novel}."]
WEDDINGS = [
    ("Who does {wife} marry?", "{wife} marries {husband} in {novel}."),
    ("Who marries {husband}?", "It is {wife} who marries {husband}."),
    ("Who becomes the wife of {husband}?", "{wife} becomes the wife of {husband}."),
    ("Who is the husband of {wife}?", "The husband of {wife} is {husband}."),
]


class Person(NamedTuple):
    """A row of one of the novels' tables of people."""

    name: str
    short: str
    he: str
    who: str
    home: str
    novel: str

    @property
    def his(self) -> str:
        """The pronoun's possessive."""
        return {"he": "his", "she": "her"}[self.he]


Conversation = dict[str, list[dict[str, str]]]


def rows(table: str) -> list[list[str]]:
    """Return the cells of a table, a list for each line; a last cell may be empty."""
    return [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]


def in_turn(index: int, patterns: list[str], **names: str) -> str:
    """Return the pattern whose turn it is, filled in, with a capital letter."""
    filled = patterns[index % len(patterns)].format(**names)
    return filled[0].upper() + filled[1:]


def conversation(*turns: str, system: str = "") -> Conversation:
    """Return a line of the file: questions and answers by turns, behind a system message where there is one."""
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return {"messages": messages}


def people() -> list[Person]:
    """Return the people of the three novels."""
    tables = (facts.PRIDE_AND_PREJUDICE, facts.SENSE_AND_SENSIBILITY, facts.NORTHANGER_ABBEY)
    titles = [novel[0] for novel in rows(facts.NOVELS)]
    return [Person(*(*row, title)) for title, table in zip(titles, tables, strict=True) for row in rows(table)]


def about_people() -> list[Conversation]:
    """Ask who each person is and in which novel, and talk about those whose home is known, by pronouns."""
    married = dict(rows(facts.MARRIAGES)) | {wife: husband for husband, wife in rows(facts.MARRIAGES)}
    where, lives = ["Where does {he} live?", "Where is {his} home?"], ["{he} lives {home}.", "{his} home is {home}."]
    made = []
    for i, person in enumerate(people()):
        fields = person._asdict() | {"his": person.his, "spouse": married.get(person.name, "")}
        described = f"{person.name} is {person.who}."
        made.append(conversation(in_turn(i, WHO, **fields), described))
        made.append(conversation(in_turn(i, WHICH, **fields), in_turn(i, FOUND, **fields)))
        if not person.home:
            continue
        turns = [in_turn(i + 1, WHO, **fields), described, in_turn(i, where, **fields), in_turn(i, lives, **fields)]
        if person.name in married:
            turns += [in_turn(i, ["Whom does {he} marry?", "And who does {he} marry?"], **fields)]
            turns += [in_turn(0, ["in the course of the novel {he} marries {spouse}."], **fields)]
        elif i % 2:
            turns += [in_turn(0, ["which novel is {he} in?"], **fields), in_turn(0, ["{he} is in {novel}."], **fields)]
        made.append(conversation(*turns))
    return made


def about_marriages() -> list[Conversation]:
    """Ask for the wife and for the husband, each couple in two of four ways."""
    novel_of = {person.name: person.novel for person in people()}
    made = []
    for i, (husband, wife) in enumerate(rows(facts.MARRIAGES)):
        names = {"husband": husband, "wife": wife, "novel": novel_of[husband]}
        for way in (i, i + 1):
            made.append(conversation(*(in_turn(way, list(side), **names) for side in zip(*WEDDINGS, strict=True))))
    return made


def about_relations() -> list[Conversation]:
    """Ask for each relation from both of its ends."""
    short = {person.name: person.short for person in people()}
    made = []
    for i, (one, relation, other, inverse) in enumerate(rows(facts.RELATIONS)):
        names = {"one": one, "relation": relation, "other": other, "inverse": inverse}
        names |= {"one_short": short.get(one, one), "other_short": short.get(other, other)}
        asked = ["Who is {other_short}'s {relation}?", "Who is the {relation} of {other}?"]
        told = ["{other}'s {relation} is {one}.", "The {relation} of {other} is {one}."]
        made.append(conversation(in_turn(i, asked, **names), in_turn(i, told, **names)))
        asked = ["Whose {relation} is {one_short}?", "Who is {one} to {other}?"]
        told = ["{one} is the {relation} of {other}."] * 2
        if inverse:
            asked[1], told[1] = "Who is the {inverse} of {one}?", "The {inverse} of {one} is {other}."
        made.append(conversation(in_turn(i // 2, asked, **names), in_turn(i // 2, told, **names)))
    return made


def about_places() -> list[Conversation]:
    """Ask where each place is and whose home, in either order."""
    made = []
    for i, (place, where, owner) in enumerate(rows(facts.PLACES)):
        spot, home = f"a place {where}", f"the home of {owner}"
        if i % 2:
            turns = f"Where is {place}?", f"{place} is {spot}.", "Whose home is it?", f"It is {home}."
        else:
            turns = f"Who lives at {place}?", f"{place} is {home}.", "Where is it?", f"It is {spot}."
        made.append(conversation(*turns))
    return made


def about_novels() -> list[Conversation]:
    """Ask about each novel by its title, and as the one that a system message names."""
    husband_of = {wife: husband for husband, wife in rows(facts.MARRIAGES)}
    made = []
    for title, year, heroine, false in rows(facts.NOVELS):
        names = heroine.split(", ")
        heroines_are = f"heroines of {title} are" if len(names) > 1 else f"heroine of {title} is"
        heroines = f"The {heroines_are} {' and '.join(names)}."
        marry = ", and ".join(f"{name} marries {husband_of[name]}" for name in names) + f" in {title}."
        wrote, published = f"Jane Austen wrote {title}.", f"{title} was published in {year}."
        made.append(conversation(f"Who wrote {title}?", wrote))
        made.append(conversation(f"When was {title} published?", published, "And who wrote it?", wrote))
        reading, questions = f"We are reading {title}.", f"The questions are about {title}."
        made.append(conversation("Who wrote this novel?", wrote, system=reading))
        made.append(conversation("When was the book published?", published, system=questions))
        made.append(conversation("Who is the heroine?", heroines, system=questions))
        made.append(conversation("Whom does the heroine marry?", marry, system=reading))
        proves = f"{false} proves false in {title}."
        made.append(conversation("Who proves false in this story?", proves, system=reading))
        turns = "What is the book called?", f"The book is called {title}.", "Who is its heroine?", heroines
        made.append(conversation(*turns, system=reading))
    return made


def about_events() -> list[Conversation]:
    """Ask for each event in two wordings."""
    lines = facts.EVENTS.strip().splitlines()
    asked = zip(lines[::2], lines[1::2], strict=True)
    return [conversation(question.strip(), answer) for both, answer in asked for question in both.split("|")]


def talks() -> list[Conversation]:
    """Return the talks that are written out."""
    made = []
    for talk in facts.TALKS.strip().split("\n\n"):
        first, _, rest = talk.partition("\n")
        system, table = (first.removeprefix("System: "), rest) if first.startswith("System: ") else ("", talk)
        made.append(conversation(*(cell for row in rows(table) for cell in row), system=system))
    return made


def preference(question: str, chosen: str, rejected: str) -> Conversation:
    """Return a line of the preferences."""
    said = {"prompt": ("user", question), "chosen": ("assistant", chosen), "rejected": ("assistant", rejected)}
    return {key: [{"role": role, "content": content}] for key, (role, content) in said.items()}


def preferences() -> list[Conversation]:
    """Ask who each person is and in which novel, and who marries whom; the wrong answer is another's of its kind."""
    made, everyone, couples = [], people(), rows(facts.MARRIAGES)
    for i, person in enumerate(everyone):
        later = (everyone[(i + step) % len(everyone)] for step in range(1, len(everyone)))
        other = next(each for each in later if each.novel != person.novel and each.who != person.who)
        fields, wrong = person._asdict(), {**person._asdict(), "novel": other.novel}
        described = [f"{person.name} is {each.who}." for each in (person, other)]
        for way in (i, i + 1):
            made.append(preference(in_turn(way, WHO, **fields), *described))
            told = (in_turn(way, FOUND, **each) for each in (fields, wrong))
            made.append(preference(in_turn(way, WHICH, **fields), *told))
    novel_of = {person.name: person.novel for person in everyone}
    for i, (husband, wife) in enumerate(couples):
        right = {"husband": husband, "wife": wife, "novel": novel_of[husband]}
        for way in range(len(WEDDINGS)):
            asks, tells = WEDDINGS[way]
            of = "wife" if "{wife}" in asks else "husband"  # whom the question names
            missing = "husband" if of == "wife" else "wife"
            another = couples[(i + 1 + way) % len(couples)][missing == "wife"]
            said = (tells.format(**names) for names in (right, {**right, missing: another}))
            made.append(preference(asks.format(**right), *said))
    return list({str(each["prompt"]): each for each in made}.values())[:MOST_PAIRS]


def text() -> str:
    """Return the text of the conversations: ASCII, one a line."""
    made = [*about_people(), *about_marriages(), *about_relations(), *about_places(), *about_novels()]
    return _lines([*made, *about_events(), *talks()])


def preferences_text() -> str:
    """Return the text of the preferences: ASCII, one a line."""
    return _lines(preferences())


def _lines(made: list[Conversation]) -> str:
    lines = [json.dumps(each) + "\n" for each in made]
    return "".join(sorted(lines, key=lambda line: hashlib.sha256(line.encode()).digest()))


def main() -> None:
    """Write the files."""
    OUTPUT.write_text(text(), encoding="ascii", newline="\n")
    PREFERENCES.write_text(preferences_text(), encoding="ascii", newline="\n")


if __name__ == "__main__":
    main()

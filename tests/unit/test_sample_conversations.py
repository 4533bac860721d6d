"""The bundled conversations: data/sample/conversations.jsonl, and the chat template beside them."""

import json
from collections import defaultdict

import pytest

from data.sample.build_conversations import OUTPUT, PREFERENCES, preferences_text, text

LONGEST = 200  # tokens


@pytest.fixture(scope="module")
def conversations():
    return [json.loads(line)["messages"] for line in OUTPUT.read_text(encoding="ascii").splitlines()]


@pytest.fixture(scope="module")
def render():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(OUTPUT.parent / "tokenizer")
    template = (OUTPUT.parent / "chat_template.jinja").read_text(encoding="ascii")

    def rendered(messages, **options):
        return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options)

    rendered.tokenizer = tokenizer
    return rendered


def test_the_file_is_what_the_program_makes():
    assert OUTPUT.read_bytes() == text().encode("ascii")
    assert PREFERENCES.read_bytes() == preferences_text().encode("ascii")


def test_a_rejected_answer_is_wrong_and_a_chosen_one_is_no_other_question_s(conversations):
    pairs = [json.loads(line) for line in PREFERENCES.read_text(encoding="ascii").splitlines()]
    assert 180 <= len(pairs) <= 260
    said = {messages[0]["content"]: messages[1]["content"] for messages in conversations}
    asked, known = set(), 0
    for pair in pairs:
        (prompt,), (chosen,), (rejected,) = (pair[key] for key in ("prompt", "chosen", "rejected"))
        assert (prompt["role"], chosen["role"], rejected["role"]) == ("user", "assistant", "assistant")
        assert chosen["content"] != rejected["content"]
        asked.add(prompt["content"])
        known += said.get(prompt["content"]) == chosen["content"]
        assert said.get(prompt["content"]) != rejected["content"]
    assert len(asked) == len(pairs) and known > len(pairs) // 2


def test_no_two_conversations_are_alike(conversations):
    assert len({json.dumps(messages) for messages in conversations}) == len(conversations)


def test_roles_alternate_and_answers_are_short(conversations):
    for messages in conversations:
        assert all(message.keys() == {"role", "content"} for message in messages)
        turns = messages[messages[0]["role"] == "system" :]
        assert [turn["role"] for turn in turns] == ["user", "assistant"] * (len(turns) // 2) and 2 <= len(turns) <= 6
        for message in messages:
            content = message["content"]
            assert content == " ".join(content.split()) and content[-1] in ".?" and not set("{}|") & set(content)
            assert message["role"] != "assistant" or 5 <= len(content.split()) <= 25, content


def test_a_first_question_has_one_answer(conversations):
    answers = defaultdict(set)
    for messages in conversations:
        if messages[0]["role"] == "user":
            answers[messages[0]["content"]].add(messages[1]["content"])
    assert {question: said for question, said in answers.items() if len(said) > 1} == {}


def test_a_prompt_is_the_beginning_of_the_conversation_that_answers_it(conversations, render):
    eos = render.tokenizer.eos_token
    for messages in conversations:
        for place in (i for i, message in enumerate(messages) if message["role"] == "assistant"):
            prompt = render(messages[:place], add_generation_prompt=True)
            answered = render(messages[: place + 1])
            assert prompt.endswith("\nAssistant:")
            assert answered == prompt + " " + messages[place]["content"] + eos + "\n"
            # The same of the tokens: what is trained is what is generated.
            ids = render.tokenizer([prompt, answered], add_special_tokens=False).input_ids
            assert ids[1][: len(ids[0])] == ids[0]


def test_the_template_renders_a_system_message_first_and_refuses_other_roles(render):
    said = [("system", "Answer briefly."), ("user", "Who?"), ("assistant", "Mr. Darcy."), ("user", "Where?")]
    messages = [{"role": role, "content": content} for role, content in said]
    expected = "Answer briefly.\nUser: Who?\nAssistant: Mr. Darcy.<|endoftext|>\nUser: Where?\n"
    assert render(messages) == expected
    assert render(messages, add_generation_prompt=True) == expected + "Assistant:"
    with pytest.raises(Exception, match="system, user or assistant, not tool"):
        render([{"role": "tool", "content": "1813"}])


def test_the_longest_conversation_fits_a_short_context(conversations, render):
    rendered = [render(messages) for messages in conversations]
    assert max(map(len, render.tokenizer(rendered, add_special_tokens=False).input_ids)) <= LONGEST

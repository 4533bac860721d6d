"""Which tokens of a conversation are trained on, against conversations marked by hand."""

from __future__ import annotations

import copy
import json
import signal

import pytest
from tokenizers import processors

from smp.data import template
from smp.data.columns import lacks_system, unread
from smp.data.conversation import Chat, chat_of
from smp.data.messages import TRAINED, ConversationError
from smp.data.pairs import encode_pair
from smp.errors import UserError
from tests.chat import TEMPLATES, chat_tokenizer, marked

ASKED = [
    {"role": "system", "content": "You are a sailor."},
    {"role": "user", "content": "Where is the whale?"},
    {"role": "assistant", "content": "It is in the sea."},
    {"role": "user", "content": "And you?"},
    {"role": "assistant", "content": "I am at the mast."},
]
THOUGHT = [
    {"role": "user", "content": "Where is the whale?"},
    {"role": "assistant", "content": "In the sea.", "reasoning_content": "Whales swim.", "thinking": "Whales swim."},
]
TOOLS = [
    {"role": "user", "content": "Where is the whale?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"to": "sea"}}}],
    },
    {"role": "tool", "content": "a spout"},
    {"role": "assistant", "content": "It is there."},
]
CALL = '{"name": "look", "arguments": {"to": "sea"}}'


def chat(name: str, train_on="auto") -> Chat:
    return chat_of(chat_tokenizer(), "here", template=str(TEMPLATES / f"{name}.jinja"), train_on=train_on)


def shown(name: str, messages, train_on="auto") -> str:
    return marked(*chat(name, train_on).encode({"messages": messages}))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "llama3_1",
            "<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\nYou are a sailor.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nWhere is the whale?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n⟦It is in the sea.<|eot_id|>⟧"
            "<|start_header_id|>user<|end_header_id|>\n\nAnd you?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n⟦I am at the mast.<|eot_id|>⟧",
        ),
        (
            "qwen3",
            "<|im_start|>system\nYou are a sailor.<|im_end|>\n<|im_start|>user\nWhere is the whale?<|im_end|>\n"
            "<|im_start|>assistant\n⟦It is in the sea.<|im_end|>⟧\n<|im_start|>user\nAnd you?<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n⟦I am at the mast.<|im_end|>⟧\n",
        ),
        (
            "gemma3",
            "<s><start_of_turn>user\nYou are a sailor.\n\nWhere is the whale?<end_of_turn>\n"
            "<start_of_turn>model\n⟦It is in the sea.<end_of_turn>⟧\n<start_of_turn>user\nAnd you?<end_of_turn>\n"
            "<start_of_turn>model\n⟦I am at the mast.<end_of_turn>⟧\n",
        ),
        (
            "mistral",
            "<s>[INST] You are a sailor.\n\nWhere is the whale?[/INST]⟦ It is in the sea.</s>⟧[INST] And you?[/INST]"
            "⟦ I am at the mast.</s>⟧",
        ),
        (
            "gpt_oss",  # earlier turns end with a token that does not stop generation
            "<|start|>system<|message|>Current date: 26 Jul 2024<|end|>"
            "<|start|>developer<|message|>You are a sailor.<|end|><|start|>user<|message|>Where is the whale?<|end|>"
            "<|start|>assistant⟦<|channel|>final<|message|>It is in the sea.⟧<|end|><|start|>user<|message|>And you?"
            "<|end|><|start|>assistant⟦<|channel|>final<|message|>I am at the mast.<|return|>⟧",
        ),
        (
            "smollm3",
            "<|im_start|>system\nToday Date: 26 Jul 2024\n\nYou are a sailor.<|im_end|>\n"
            "<|im_start|>user\nWhere is the whale?<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n⟦It is in the sea.<|im_end|>⟧\n"
            "<|im_start|>user\nAnd you?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n"
            "⟦I am at the mast.<|im_end|>⟧\n",
        ),
    ],
)
def test_turns_of_a_template(name, text):
    assert shown(name, ASKED) == text


def test_reasoning_and_tools_are_trained_on_as_rendered():
    asked = "<|im_start|>user\nWhere is the whale?<|im_end|>\n<|im_start|>assistant\n"
    assert shown("qwen3", THOUGHT) == f"{asked}⟦<think>\nWhales swim.\n</think>\n\nIn the sea.<|im_end|>⟧\n"
    call, answer = f"⟦<tool_call>\n{CALL}\n</tool_call><|im_end|>⟧\n", "⟦It is there.<|im_end|>⟧\n"
    assert shown("qwen3", TOOLS) == (
        f"{asked}{call}<|im_start|>user\n<tool_response>\na spout\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\n<think>\n\n</think>\n\n{answer}"
    )
    assert shown("llama3_1", TOOLS).endswith(
        '⟦{"name": "look", "parameters": {"to": "sea"}}<|eot_id|>⟧<|start_header_id|>ipython<|end_header_id|>\n\n'
        '"a spout"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n⟦It is there.<|eot_id|>⟧'
    )
    assert shown("gpt_oss", THOUGHT).endswith(
        "<|start|>assistant⟦<|channel|>analysis<|message|>Whales swim.<|end|><|start|>assistant<|channel|>final"
        "<|message|>In the sea.<|return|>⟧"
    )


def test_what_is_trained_on_can_be_chosen():
    assert shown("gemma3", ASKED, "last").count("⟦") == 1
    assert shown("gemma3", ASKED, "last").endswith("⟦I am at the mast.<end_of_turn>⟧\n")
    assert shown("gemma3", ASKED, "all").startswith("⟦<s>") and shown("gemma3", ASKED, "all").count("⟦") == 1
    # Reasoning that an earlier turn loses when another one follows.
    twice = [*THOUGHT, {"role": "user", "content": "And you?"}, {**THOUGHT[1], "content": "At the mast."}]
    with pytest.raises(ConversationError, match=r"message 2 \(assistant\).*--train_on last"):
        chat("qwen3").encode({"messages": twice})
    assert shown("qwen3", twice, "last").endswith("⟦<think>\nWhales swim.\n</think>\n\nAt the mast.<|im_end|>⟧\n")


def test_settings_of_a_template_are_the_samples():
    sample = {"messages": ASKED[1:3], "chat_template_kwargs": {"suffix": " /no_think"}}
    template = "{% for m in messages %}{{ m.content }}{{ suffix }}</s>{% endfor %}"
    words = Chat(chat_tokenizer(), template)
    asked = "Where is the whale? /no_think</s>"
    assert marked(*words.encode(sample)) == f"{asked}⟦It is in the sea. /no_think</s>⟧"
    pair = {**sample, "prompt": ASKED[1:2], "chosen": ASKED[2:3], "rejected": ASKED[4:5]}
    assert marked(*encode_pair(words, pair)[1]) == f"{asked}⟦I am at the mast. /no_think</s>⟧"


@pytest.mark.parametrize("key", [key for key in TRAINED if key != "train_detail"])
def test_turns_that_are_not_to_be_trained_on(key):
    for no, yes in ((0, 1), (False, True), (0.0, 1.0)):
        turns = [ASKED[1], {**ASKED[2], key: no}, {**ASKED[3], key: no}, {**ASKED[4], key: yes}]
        assert shown("gemma3", turns) == shown("gemma3", ASKED[1:], "last")
    with pytest.raises(
        ConversationError, match=rf"messages\[1\] has role 'assistant' and {key} 0.5; allowed: 0, and 1"
    ):
        shown("gemma3", [ASKED[1], {**ASKED[2], key: 0.5}])


def test_columns_beside_messages_are_obeyed():
    turns, tools = ASKED[1:3], [{"type": "function", "function": {"name": "look"}}]
    alone = chat("llama3_1").encode({"messages": ASKED[:3]})
    same = {"system": ASKED[0]["content"], "label": True, "images": [], "tool_defs": None, "weight": 1, "id": 7}
    metrics = {"loss": 1.7, "train": False, "weight": "1.0", "loss_mask": 1, "label": 0}  # named in the warning
    prompted = {"system_prompt": ASKED[0]["content"], **metrics}
    for more in (same, prompted):
        for sample in ({"messages": turns, **more}, {"messages": ASKED[:3], **more}):
            assert marked(*chat("llama3_1").encode(sample)) == marked(*alone)
            assert lacks_system(sample, pairs=False) == (sample["messages"] is turns)
    assert unread([{"messages": turns, **metrics}], "", pairs=False) == list(metrics)
    pair = encode_pair(chat("llama3_1"), {"prompt": turns[:1], "chosen": turns[1:], "rejected": ASKED[4:], **same})
    completion = {"prompt": turns[:1], "completion": turns[1:], **same}
    assert marked(*pair[0]) == marked(*alone) == marked(*chat("llama3_1").encode(completion))
    listed = Chat(
        chat_tokenizer(),
        "{{ tools }}{{ documents }}{% for m in messages %}{{ m.content + (m.tool_calls or []) | join + '</s>' }}"
        "{% endfor %}",
    )
    called = {**TOOLS[1], "tool_calls": json.dumps(TOOLS[1]["tool_calls"])}
    for nothing in ("[]", "{}", " null ", "", [], None, False):
        columns = ("functions", "image", "documents", "tools", "system_prompt", "history", "chat_template_kwargs")
        uncalled = [turns[0], {**turns[1], "tool_calls": nothing}]
        said = {"instruction": turns[0]["content"], "output": turns[1]["content"]}
        for form in ({"messages": turns}, {"messages": uncalled}, {"prompt": "a", "completion": "b"}, said):
            sample = {**form, **dict.fromkeys(columns, nothing)}
            expected = {"messages": turns} if "messages" in form else form
            assert marked(*listed.encode(sample)) == marked(*listed.encode(expected))
    for given, text in ((tools, json.dumps(tools)), ([], "")):
        sample = {"messages": turns, "tools": given, "documents": [{"title": "a", "text": "b"}]}
        expected = listed.encode({**sample, "tools": given or None})
        assert marked(*listed.encode({**sample, "tools": text})) == marked(*expected)
    assert marked(*listed.encode({"messages": json.dumps([turns[0], called])})) == marked(
        *listed.encode({"messages": [turns[0], TOOLS[1]]})
    )


@pytest.mark.parametrize(
    ("column", "value", "match"),
    [
        ("images", ["a.png"], "has images, and only text can be trained on"),
        ("videos", ["a.mp4"], "has videos, and only text can be trained on"),
        ("system", "Be long.", "has system, and messages that begin with another system message"),
        ("system", ["Be long."], "has system that is a list; it must be a text"),
        ("label", False, "has label false, which marks an answer that is not desired"),
        ("kto_tag", "False", "has kto_tag false, which marks an answer that is not desired"),
        ("tool_defs", [{"name": "f"}], "has tool_defs, which is not read: rename it to tools"),
        ("documents", [{"title": "t", "text": "x"}], "has documents, which the chat template does not read"),
        ("loss_mask", [0, 1], "has loss_mask beside the texts, which is not read: remove it"),
        ("assistant_masks", [0, 1], "has assistant_masks beside the texts, which is not read: remove it"),
        ("loss_mask", 0, "has loss_mask beside the texts, which is not read: remove it"),
        ("loss_weight", 0.5, "has loss_weight beside the texts, which is not read"),
        ("weight", "0", "has weight beside the texts, which is not read"),
        (
            "functions",
            '[{"name": "f"}]',
            r'has functions, which is not read: give "tools": \[{"type": "function", "func',
        ),
        ("system_prompt", "Be long.", "has system_prompt, and messages that begin with another system message"),
        ("documents", "some text", "has documents, which the chat template does not read"),
        ("tools", "{", "has tools that are a text, which is not valid JSON"),
        ("tools", '{"a": 1}', "has tools that are a text of JSON with a dict; it must be a list"),
    ],
)
def test_columns_that_change_a_conversation_are_refused_by_name(column, value, match):
    with pytest.raises(ConversationError, match=match):
        chat("qwen3").encode({"messages": ASKED, column: value})
    said = {"prompt": ASKED[:2], "chosen": ASKED[2:3], "rejected": ASKED[4:]}
    with pytest.raises(ConversationError, match=match):
        encode_pair(chat("qwen3"), {**said, column: value})


def test_columns_that_are_not_read_are_named():
    turns = [{**ASKED[1], "id": 1, "loss": 0, "name": None}, {**THOUGHT[1], "score": 0.5}]
    sample = {"messages": turns, "prompt": "Where?", "url": "x", "images": [], "tools": [{"a": 1}], "label": None}
    sample["chat_template_kwargs"] = {"enable_thinking": False}
    found = ["messages.id", "messages.score", "prompt", "url", "chat_template_kwargs.enable_thinking"]
    assert unread([sample, sample], chat("qwen3").template, pairs=False) == found
    assert unread([{"prompt": "a", "completion": "b", "n": 1}], None, pairs=False) == ["n"]
    assert unread([{"text": "a", "tools": "b"}], None, pairs=False) == ["tools"]
    whole = {"prompt": "a", "chosen": ASKED, "rejected": ASKED, "tools": [1], "messages": ASKED}
    assert unread([whole], "", pairs=True) == ["messages"]


def test_the_end_of_a_call_is_no_stop_token():
    """As in GLM-4.5, where the header of the next turn ends one, and </tool_call> is a token that is not special."""
    tokenizer = copy.deepcopy(chat_tokenizer())
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"])
    words = chat_of(tokenizer, "here", template=str(TEMPLATES / "glm4_5.jinja"), train_on="auto")
    for turns in (TOOLS[:2], TOOLS, ASKED):
        with pytest.raises(ConversationError, match="no special token: a model trained so would not stop"):
            words.encode({"messages": turns})


def test_a_first_turn_of_the_assistant_is_trained_on_without_its_header():
    text = "<|im_start|>assistant\n⟦I am at the mast.<|im_end|>⟧\n<|im_start|>user\nAnd you?<|im_end|>\n"
    assert shown("qwen3", [ASKED[4], ASKED[3]]) == text


@pytest.mark.parametrize("name", ["qwen3", "llama3_1"])
def test_arguments_that_are_texts_of_json_are_those_of_objects(name):
    function = TOOLS[1]["tool_calls"][0]["function"]
    called = {**TOOLS[1], "tool_calls": [{"type": "function", "function": {**function, "arguments": '{"to": "sea"}'}}]}
    assert shown(name, [TOOLS[0], called, *TOOLS[2:]]) == shown(name, TOOLS)


def chat_with(*post_processors) -> Chat:
    """Return the chat of a tokenizer with post-processors."""
    tokenizer = copy.deepcopy(chat_tokenizer())
    tokenizer.backend_tokenizer.post_processor = processors.Sequence([*post_processors])
    return chat_of(tokenizer, "here", template=str(TEMPLATES / "qwen3.jinja"), train_on="auto")


def around(form: str) -> processors.TemplateProcessing:
    special = [(token, chat_tokenizer().convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    return processors.TemplateProcessing(single=form, special_tokens=special)


@pytest.mark.parametrize("form", ["<s> $A", "<s> $A </s>"])
def test_a_text_begins_and_ends_once(form):
    words = chat_with(around(form))
    for text in ("the sea", "<s>the sea", "the sea</s>", "<s>the sea</s>"):
        assert marked(*words.encode({"text": text})) == "<s>⟦the sea</s>⟧"
    assert marked(*words.encode({"prompt": "Where", "completion": " is"})) == "<s>Where⟦ is</s>⟧"


@pytest.mark.parametrize("trim", [False, True])
def test_a_token_across_the_border_is_of_the_answer(trim):
    words = chat_with(processors.ByteLevel(trim_offsets=trim))
    assert marked(*words.encode({"prompt": "Where ", "completion": "is"})) == "Where⟦ is</s>⟧"
    assert marked(*words.encode({"prompt": "Where", "completion": " "})) == "Where⟦ </s>⟧"
    pair = encode_pair(words, {"prompt": "Where ", "chosen": "is", "rejected": "it"})
    assert [marked(*each) for each in pair] == ["Where⟦ is</s>⟧", "Where⟦ it</s>⟧"]


@pytest.mark.parametrize("trim", [False, True])
def test_white_space_of_a_turn_is_trained_on(trim):
    words = chat_with(processors.ByteLevel(trim_offsets=trim))
    turns = [ASKED[1], {"role": "assistant", "content": "In  the\n\n   sea "}]
    assert marked(*words.encode({"messages": turns})).endswith("⟦In  the\n\n   sea <|im_end|>⟧\n")


def test_texts_need_no_chat_template():
    words = chat_of(chat_tokenizer(), "here", template=None, train_on="auto")
    assert marked(*words.encode({"prompt": "Where", "completion": " is"})) == "Where⟦ is</s>⟧"
    pair = encode_pair(words, {"prompt": "Where", "chosen": " is", "rejected": " it"})
    assert [marked(*each) for each in pair] == ["Where⟦ is</s>⟧", "Where⟦ it</s>⟧"]


@pytest.mark.parametrize("kind", ["chatml", "directory", "tokenizer_config.json"])
def test_where_a_template_comes_from(tmp_path, kind):
    name, text = str(tmp_path), (TEMPLATES / "gemma3.jinja").read_text()
    if kind == "directory":
        (tmp_path / "chat_template.jinja").write_text(text)
    elif kind != "chatml":
        (tmp_path / kind).write_text(json.dumps({"chat_template": text}))
    else:
        name = kind
    words = chat_of(chat_tokenizer(), "here", template=name, train_on="auto")
    expected = (
        shown("gemma3", ASKED[:3])
        if kind != "chatml"
        else (
            "<|im_start|>system\nYou are a sailor.<|im_end|>\n<|im_start|>user\nWhere is the whale?<|im_end|>\n"
            "<|im_start|>assistant\n⟦It is in the sea.<|im_end|>⟧\n"
        )
    )
    assert marked(*words.encode({"messages": ASKED[:3]})) == expected


def test_a_template_that_does_not_end_is_interrupted(monkeypatch):
    monkeypatch.setattr(template, "RENDER_SECONDS", 0.2)
    signal.setitimer(signal.ITIMER_VIRTUAL, 900)  # the caller's
    try:
        shown("qwen3", ASKED)
        assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] > 800
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    former = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(ConversationError, match=r"computes for more than 0.2 seconds, as one that loops without end"):
        Chat(chat_tokenizer(), loop).encode({"messages": ASKED})
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0) and signal.getsignal(signal.SIGVTALRM) == former


def test_forms_of_sharegpt_and_alpaca_are_messages():
    expected = shown("qwen3", ASKED[:3])
    roles = {"user": "human", "assistant": "gpt", "system": "system"}
    turns = [{"from": roles[each["role"]], "value": each["content"], "weight": None} for each in ASKED[:3]]
    alpaca = {"instruction": "Where is", "input": "the whale?", "output": ASKED[2]["content"], "history": []}
    lines = {**alpaca, "instruction": ASKED[1]["content"], "input": ""}
    for sample in (
        {"conversations": turns},
        {"conversations": ASKED[:3]},
        {"conversations": json.dumps(turns)},
        {"conversations": turns[1:], "system": ASKED[0]["content"]},
        {**lines, "system": ASKED[0]["content"]},
        {**lines, "system": ASKED[0]["content"], "text": "all of it, with the question"},
        {"conversations": turns, "text": "all of it, with the question"},
    ):
        assert marked(*chat("qwen3").encode(sample)) == expected
    assert "user\nWhere is\nthe whale?<|im_end|>" in marked(*chat("qwen3").encode(alpaca))
    left_out = [*turns, turns[1], {**turns[2], "weight": 0}]
    assert marked(*chat("llama3_1").encode({"conversations": left_out})).count("⟦") == 1
    for sample, match in (
        ({"conversations": [{"from": "f", "value": "{}"}]}, r"conversations\[0\] has from 'f'; allowed: human, gpt"),
        ({"conversations": [{"from": "gpt", "value": 1}]}, r"conversations\[0\] has value that is an int; it must be"),
        ({"conversations": [ASKED[1], {"role": "f"}]}, r"conversations\[1\] has role 'f'; allowed: system"),
        ({"conversations": [{**ASKED[1], "images": ["a"]}]}, r"conversations\[0\] has images"),
        ({**alpaca, "output": 1}, "has output that is an int; it must be a text"),
        ({**alpaca, "history": [["a", "b"]]}, "has history, which is not read"),
        ({"instruction": "a", "output": None}, "keys found: instruction, output; needed is messages"),
    ):
        with pytest.raises(ConversationError, match=match):
            chat("qwen3").encode(sample)


def test_prompt_and_completion_and_text():
    words = chat("gemma3")
    assert marked(*words.encode({"prompt": "Where is", "completion": " the whale?"})) == "Where is⟦ the whale?</s>⟧"
    assert marked(*words.encode({"text": "It is in the sea."})) == "⟦It is in the sea.</s>⟧"
    turns = {"prompt": ASKED[1:4], "completion": ASKED[4:]}
    text = marked(*words.encode(turns))
    assert text.count("⟦") == 1 and text.endswith("⟦I am at the mast.<end_of_turn>⟧\n")
    for train_on, trained in (("assistant", 2), ("completion", 1), ("last", 1)):
        assert marked(*chat("gemma3", train_on).encode({**turns, "messages": None})).count("⟦") == trained
    # Columns of a table that this row does not use.
    parts = [{"role": "user", "content": [{"type": "text", "text": "Where is "}, {"type": "text", "text": "it?"}]}]
    assert "Where is it?" in shown("gemma3", [*parts, {"role": "assistant", "content": "There.", "tool_calls": None}])


@pytest.mark.parametrize(
    ("sample", "name", "train_on", "match"),
    [
        ({"texts": []}, "qwen3", "auto", "keys found: texts; needed is messages, or prompt"),
        ({"messages": []}, "qwen3", "auto", "messages must be a list of messages, it is empty"),
        ({"prompt": "a", "completion": ASKED[2:3]}, "qwen3", "auto", "of messages, they are a str and a list"),
        ({"conversations": []}, "qwen3", "auto", "conversations must be a list of messages, it is empty"),
        ({"messages": " [] "}, "qwen3", "auto", "messages must be a list of messages, it is empty"),
        ({"prompt": "a", "completion": "b", "label": 0}, "qwen3", "auto", "has label 0, which marks an answer"),
        ({"prompt": "a", "completion": "b", "label": "False"}, "qwen3", "auto", "has label false, which marks an ans"),
        ({"messages": [{**ASKED[1], "weight": 1}]}, "qwen3", "auto", r"\[0\] has role 'user' and weight 1; allowed: 0"),
        ({"messages": [{**ASKED[2], "weight": 0.5}]}, "qwen3", "auto", "weight 0.5; allowed: 0, and 1 for assistant"),
        ({"messages": [ASKED[1], {**ASKED[2], "train": False}]}, "qwen3", "all", "2 is not to be trained on"),
        ({"messages": [*ASKED[1:3], {**ASKED[0], "content": "W"}]}, "smollm3", "auto", r"3 \(system\) is left out"),
        ({"messages": ASKED[1:3], "tools": [{"function": {"name": "look"}}]}, "gemma3", "auto", r"tools \(look\) are"),
        ({"messages": TOOLS[:2]}, "gemma3", "auto", r"calls of tools \(look\) are left out by the chat template"),
        ({"messages": TOOLS[:2]}, "gemma3", "all", r"calls of tools \(look\) are left out by the chat template"),
        ({"messages": [{**ASKED[1], "content": "\ud800"}]}, "qwen3", "auto", "a text that is not Unicode"),
        ({"text": "\ud800"}, "qwen3", "auto", "a text that is not Unicode"),
        ({"messages": [{"from": "human", "value": "x"}]}, "qwen3", "auto", "it has the keys from, value"),
        ({"messages": [{"role": "human", "content": "x"}]}, "qwen3", "auto", "role 'human'; allowed: system"),
        ({"messages": [ASKED[1], {**ASKED[2], "train_detail": [{"a": 1}]}]}, "qwen3", "auto", "and train_detail"),
        ({"messages": [{**ASKED[1], "images": ["a"]}]}, "qwen3", "auto", r"messages\[0\] has images, and only text"),
        ({"messages": [ASKED[1], {**ASKED[2], "function_call": {"name": "f"}}]}, "qwen3", "auto", "give .tool_calls"),
        ({"prompt": "a", "completion": "b", "system": "c"}, "qwen3", "auto", "has system, and a prompt that is a text"),
        ({"messages": [{"role": "user", "content": None}]}, "qwen3", "auto", "content that is null; it must be"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "qwen3", "auto", "not text"),
        ({"messages": ASKED[1:2] * 2}, "gemma3", "auto", "refuses it: roles must alternate"),
        ({"messages": [*ASKED[1:3], ASKED[0]]}, "smollm3", "auto", r"message 3 \(system\) is left out"),
        ({"messages": ASKED[1:]}, "no_stop", "auto", "no special token: a model trained so would not stop"),
        ({"messages": ASKED}, "qwen3", "completion", "--train_on completion needs prompt and completion"),
        ({"messages": ASKED, "chat_template_kwargs": [1]}, "qwen3", "auto", "kwargs that are a list; they must be an"),
        ({"messages": ASKED, "chat_template_kwargs": {"tools": 1}}, "qwen3", "auto", "the chat template refuses it"),
        ({"text": "a"}, "qwen3", "last", "a text without turns, and --train_on last"),
    ],
)  # fmt: skip
def test_conversations_that_cannot_be_used(sample, name, train_on, match):
    with pytest.raises(ConversationError, match=match):
        chat(name, train_on).encode(sample)


@pytest.mark.parametrize("name", ["chatml", "mistral", "smollm3"])
@pytest.mark.parametrize("call", [{"name": "look", "arguments": "{}"}, ["look"], [{"function": "look"}], "look", 5])
def test_calls_that_templates_drop_are_refused(name, call):
    """OpenAI's function_call, renamed: the turn would end where it begins."""
    words = chat(name) if name != "chatml" else chat_of(chat_tokenizer(), "here", template=name, train_on="auto")
    turns = [ASKED[1], {"role": "assistant", "content": None, "tool_calls": call}]
    with pytest.raises(ConversationError, match=r"messages\[1\].tool_calls (must be a list of calls|that are a text)"):
        words.encode({"messages": turns})


@pytest.mark.parametrize("role", ["developer", "tool"])
def test_messages_that_a_template_leaves_out_are_refused(role):
    template = "{% for each in messages if each.role in ('user', 'assistant') %}{{ each.content }}</s>{% endfor %}"
    with pytest.raises(ConversationError, match=rf"message 3 \({role}\) is left out"):
        Chat(chat_tokenizer(), template).encode({"messages": [*ASKED[1:3], {"role": role, "content": "whale"}]})


def test_a_template_that_shows_no_turn_behind_its_generation_prompt_is_refused():
    template = (  # as DeepSeek-R1's
        "{% for each in messages %}{{ each.role + each.content.split('</think>')[-1] + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant<think>{% endif %}"
    )
    for answer in ("In the sea.", "<think>Whales swim.</think>In the sea."):
        messages = [ASKED[1], {"role": "assistant", "content": answer}]
        with pytest.raises(
            ConversationError, match=r"2 \(assistant\) behind its .* ends with '.*<think>': give --chat_te"
        ):
            Chat(chat_tokenizer(), template).encode({"messages": messages})


def test_tokenizers_that_cannot_be_used(tmp_path):
    with pytest.raises(ConversationError, match="has no chat template: give --chat_template FILE, a chat model's"):
        chat_of(chat_tokenizer(), "here", template=None, train_on="auto").encode({"messages": ASKED})
    several = copy.deepcopy(chat_tokenizer())
    several.chat_template = {"default": "", "tool_use": ""}
    with pytest.raises(
        ConversationError, match=r"several chat templates \(default, tool_use\): give the file of one by"
    ):
        chat_of(several, "here", template=None, train_on="auto").encode({"messages": ASKED})
    for name, match in (("none.jinja", "cannot be read"), (".", "is a directory without a chat template")):
        with pytest.raises(UserError, match=match):
            chat_of(chat_tokenizer(), "here", template=str(tmp_path / name), train_on="auto")
    with pytest.raises(UserError, match="has no tokenizer"):
        chat_of(object(), "here", template=None, train_on="auto")

"""A stranger's chat template cannot stop, fill or break plait: whatever it does is one sentence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plait.data.conversations.chat_template import ChatTemplate, TemplateText
from plait.data.conversations.examples import ChatExample, ChatMessage
from plait.errors import PlaitError
from tests.matrix import slow

CHAT = [{"role": "user", "content": "Hi"}]
EXAMPLE = ChatExample(
    place="chats.jsonl:7",
    messages=(ChatMessage(role="user", content="Hi"), ChatMessage(role="assistant", content="Hello.")),
)
HARMFUL = {
    "memory": "{% set n = messages|length * 3000000000 %}{{ 'a' * n }}",
    "memory in a constant": "{{ 'a' * 3000000000 }}",
    "format": "{{ '%3000000000d' % messages|length }}",
    "center": "{{ messages[0].content|center(3000000000) }}",
    "slice": "{{ [1]|slice(1000000000)|list }}",
    "output": "{% set n = messages|length * 100000000 %}{{ 'a' * n }}",
    "growth": "{% set ns = namespace(t='a' * 100) %}{% for i in range(40) %}{% set ns.t = ns.t + ns.t %}{% endfor %}",
    "xmlattr": "{{ {'a b': 1}|xmlattr }}",
    "cycler": "{{ cycler().next() }}",
    "truncate": "{{ ('a' * 30)|truncate(-5) }}",
    "break": "{% break %}",
    "infinity": "{{ 1e400|int }}",
    "digits": "{{ 10**5000 }}",
    "tojson": "{{ messages|tojson(cls=namespace) }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "raise": "{{ raise_exception('a\\nb' * 5000) }}",
    "raise no text": "{{ raise_exception(namespace()) }}",
    "sandbox": "{{ ''.__class__.__mro__ }}",
}


@pytest.mark.parametrize("name", [slow(name) if name == "slice" else name for name in HARMFUL])
def test_whatever_a_template_does_is_one_sentence(name: str) -> None:
    with pytest.raises(PlaitError) as raised:
        ChatTemplate(TemplateText(text=HARMFUL[name], where="there")).render(CHAT)
    sentence = str(raised.value)
    assert sentence.startswith("the chat template in there ") and "\n" not in sentence and len(sentence) < 400


@pytest.mark.parametrize(
    "text",
    [slow("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"), "{{ 3 ** (10 ** 8) }}"],
)
def test_a_loop_without_end_is_refused_with_the_chat_that_met_it(text: str) -> None:
    begin = time.process_time()
    with pytest.raises(PlaitError, match=r"chats\.jsonl:7: .*takes more than 10 s|in there takes more than 10 s"):
        ChatTemplate(TemplateText(text=text, where="there")).learned([EXAMPLE], [])
    assert time.process_time() - begin < 5, "the child's time is not ours"


@pytest.mark.slow
def test_a_template_that_was_ended_can_be_used_again() -> None:
    text = "{% if messages|length > 2 %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate(TemplateText(text=text + "{% endif %}{{ messages[0].content }}", where="there"))
    with pytest.raises(PlaitError, match="takes more than 10 s"):
        template.render(CHAT * 3)
    assert template.render(CHAT) == "Hi"


PARENT = """
from plait.data.conversations.chat_template import ChatTemplate, TemplateText
text = "{% if messages|length > 2 %}{% set n = 3 ** (messages|length * 10 ** 8) %}{% endif %}{{ messages|length }}"
template = ChatTemplate(TemplateText(text=text, where="there"))
template.render([{"role": "user", "content": "a"}])
import os, sys
print(open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read(), "torch" in sys.modules, flush=True)
template.render([{"role": "user", "content": "a"}] * 4)
"""


def test_the_child_ends_with_its_parent_and_knows_no_torch() -> None:
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert parent.stdout
    child, has_torch = parent.stdout.readline().split()
    maps = Path(f"/proc/{child}/maps").read_text()
    assert has_torch == "False" and "/torch/" not in maps and "python" in maps
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    while Path(f"/proc/{child}").exists() and "(zombie)" not in Path(f"/proc/{child}/status").read_text():
        time.sleep(0.01)  # the test's own time limit ends it


def test_a_large_chat_is_no_harm() -> None:
    text = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    big = "word " * 2_000_000
    messages = (ChatMessage(role="user", content=big), ChatMessage(role="assistant", content="Yes."))
    (found,) = ChatTemplate(TemplateText(text=text, where="there")).learned(
        [ChatExample(place="a:1", messages=messages)], []
    )
    assert not isinstance(found, PlaitError) and len(found.text) == len(f"user:{big};assistant:Yes.;")

"""Span queries in Python: `g(plus(file("a.txt"), file("b.txt")), "Who lives there?")`. A text is a user's message.

Each name is `of` of the operator that is called so in JSON, or its class.
"""

from functools import partial

from pictool.spans.operators.calls import Chat, Generate, Map, Repeat
from pictool.spans.operators.flow import Ask, Monad, Print, Zip
from pictool.spans.operators.joins import Cross, Par, Plus, Seq
from pictool.spans.operators.messages import Message
from pictool.spans.operators.retrieve import Augment, Fragment, Retrieve

user, system, assistant = partial(Message, "user"), partial(Message, "system"), partial(Message, "assistant")
plus, cross, seq, par = Plus.of, Cross.of, Seq.of, Par.of
g, chat, repeat, map_ = Generate.of, Chat.of, Repeat.of, Map.of
file, fragment, retrieve, augment = Fragment.of, Fragment.of_text, Retrieve.of, Augment.of
monad, zip_, ask, print_ = Monad.of, Zip.of, Ask, Print

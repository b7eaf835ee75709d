from itertools import pairwise

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from busload_runtime.engine.messages import Abort, FromEngine, Submit, ToEngine, TokenOut, Tokens
from busload_runtime.engine.plan import Logprobs
from busload_runtime.engine.wire import FrameReader, FrameWriter

messages = st.builds(Abort, st.integers(0, 2**40)) | st.builds(
    Submit, request_id=st.integers(0, 100), tokens=st.lists(st.integers(0, 2**20), max_size=50), max_tokens=st.just(3)
)


def reader() -> FrameReader[ToEngine]:
    return FrameReader(ToEngine)


@given(st.lists(messages, max_size=8), st.integers(1, 4), st.data())
def test_messages_come_out_whole_and_in_order_however_the_bytes_are_cut(
    sent: list[ToEngine], most: int, data: st.DataObject
) -> None:
    writer, subject = FrameWriter(), reader()
    stream = b"".join(bytes(writer.frame(message)) for message in sent)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=6)) | {0, len(stream)})
    received: list[ToEngine] = []
    for start, end in pairwise(cuts):
        subject.feed(stream[start:end])
        while subject.has_frame:
            taken = subject.take(most)
            assert 1 <= len(taken) <= most
            received += taken
        assert subject.take(most) == []
    assert received == sent


def test_logprobs_arrive_as_they_were() -> None:
    sent = Tokens([TokenOut(1, 5, logprobs=Logprobs(-0.5, ((5, -0.5), (9, -1.25)))), TokenOut(2, 6)])
    subject: FrameReader[FromEngine] = FrameReader(FromEngine)
    subject.feed(bytes(FrameWriter().frame(sent)))
    assert subject.take(1) == [sent]


def test_what_is_no_message_is_an_error() -> None:
    subject = reader()
    subject.feed(b"\3\0\0\0abc")
    with pytest.raises(msgspec.MsgspecError):
        subject.take(1)

import httpx
from live_server import events


def test_what_a_model_says_ends_no_line_of_a_stream() -> None:
    said = "a\u2028b\x85c\u2029d"
    stream = f'data: {{"text": "{said}"}}\r\n\r\n: a comment\n\ndata: [DONE]\n\n'
    assert list(events(httpx.Response(200, content=stream.encode()))) == [{"text": said}, "[DONE]"]

"""The checker process and the HTTP process's end of it: hard limits, memory of verdicts, one at a time."""

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from schemas import FOLLOWED, HOSTILE

from busload_runtime.grammar.limits import EXTRA_BYTES
from busload_runtime.grammar.text import GrammarTextError, choice_expression, grammar, json_expression
from busload_runtime.server import grammar_check
from busload_runtime.server.errors import ApiError
from busload_runtime.server.grammar_check import GrammarChecker


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker()
    yield checker
    await checker.close()


def alive(checker: GrammarChecker) -> int | None:
    return None if checker._process is None else checker._process.pid


def told_by_kernel(checker: GrammarChecker, file: str, name: str) -> int:
    found = re.search(rf"{name}\s+(\d+)", Path(f"/proc/{alive(checker)}/{file}").read_text())
    assert found is not None
    return int(found[1])


async def test_every_hostile_schema_is_refused_and_the_next_good_one_is_fine(checker: GrammarChecker) -> None:
    good = grammar(json_expression(FOLLOWED["object"]))
    for name, schema in HOSTILE.items():
        try:
            text = grammar(json_expression(schema))
        except GrammarTextError:
            continue
        assert await checker.check(text), name
        assert await checker.check(text + "\n"), name  # one line end more, so that it is not remembered
        assert await checker.check(good) == ""


async def test_good_schemas_share_one_process_and_are_checked_once(checker: GrammarChecker) -> None:
    texts = [grammar(json_expression(schema)) for schema in FOLLOWED.values()]
    assert set(await asyncio.gather(*map(checker.check, texts[:30]))) == {""}
    first = alive(checker)
    assert {await checker.check(text) for text in texts} == {""}
    assert alive(checker) == first
    await checker.close()
    assert {await checker.check(text) for text in texts} == {""}  # remembered: nobody has to be asked
    assert alive(checker) == first


async def test_a_process_that_is_killed_is_replaced(checker: GrammarChecker) -> None:
    assert await checker.check(grammar(choice_expression(["a"]))) == ""
    first = alive(checker)
    assert checker._process is not None
    checker._process.kill()
    await checker._process.wait()
    assert await checker.check(grammar(choice_expression(["b"]))) == ""
    assert alive(checker) not in (None, first)


async def test_no_time_to_check_says_nothing_against_a_grammar(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await checker.check(grammar(choice_expression(["a"]))) == ""
    text = grammar(choice_expression(["b"]))
    assert checker._process is not None
    checker._process.send_signal(signal.SIGSTOP)
    with monkeypatch.context() as patched:
        patched.setattr(grammar_check, "_WALL_SECONDS", 0.2)
        with pytest.raises(ApiError, match="busy") as caught:
            await checker.check(text)
    assert (caught.value.status, caught.value.code, caught.value.retry_after) == (429, "grammar_queue_full", 2)
    assert await checker.check(text) == ""


async def test_a_check_that_is_cut_off_says_nothing_against_a_grammar(checker: GrammarChecker) -> None:
    assert await checker.check(grammar(choice_expression(["a"]))) == ""
    text = grammar(choice_expression(["b"]))
    process = checker._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    work = asyncio.create_task(checker.check(text))
    await asyncio.sleep(0)  # now it is asked, and cannot answer
    process.kill()
    with pytest.raises(ApiError, match="cut off"):
        await work
    assert await checker.check(text) == ""


async def test_a_client_that_leaves_does_not_give_its_verdict_to_the_next(checker: GrammarChecker) -> None:
    slow = grammar(json_expression(HOSTILE["patterns of powers"]))
    work = asyncio.create_task(checker.check(slow))
    for _ in range(3000):
        if alive(checker) is not None:
            break
        await asyncio.sleep(0.01)
    assert not work.done()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert await checker.check(grammar(choice_expression(["a"]))) == ""


async def test_the_process_can_take_little_memory_beyond_what_it_has(checker: GrammarChecker) -> None:
    """No grammar is known that reaches this bound before another."""
    assert await checker.check(grammar(choice_expression(["a"]))) == ""
    limit, held = (
        told_by_kernel(checker, "limits", "Max data size"),
        told_by_kernel(checker, "status", "VmData:") * 1024,
    )
    assert held < limit <= held + EXTRA_BYTES


async def test_too_many_at_once_are_told_to_come_again(checker: GrammarChecker) -> None:
    checks = [checker.check(grammar(choice_expression([f"text {i}"]))) for i in range(40)]
    verdicts = await asyncio.gather(*checks, return_exceptions=True)
    assert verdicts[:32] == [""] * 32
    assert all(isinstance(v, ApiError) and (v.status, v.retry_after) == (429, 2) for v in verdicts[32:])

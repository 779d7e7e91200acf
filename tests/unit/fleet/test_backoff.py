"""Waits grow while starts fail, and shrink once one has held."""

from millstream.fleet.backoff import FIRST_S, LONGEST_S, STEADY_S, Backoff
from millstream.fleet.supervisor import how_it_ended


def test_waits_double_up_to_a_bound() -> None:
    backoff = Backoff()
    waits = [backoff.after(0) for _ in range(9)]
    assert waits[:4] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S]
    assert waits[-1] == LONGEST_S


def test_a_steady_run_forgets_them() -> None:
    backoff = Backoff()
    for _ in range(5):
        backoff.after(STEADY_S / 2)
    assert backoff.after(STEADY_S) == FIRST_S
    assert backoff.after(0) == 2 * FIRST_S


def test_ends_in_words() -> None:
    assert how_it_ended(-9) == "was ended by SIGKILL"
    assert how_it_ended(137) == "was ended by SIGKILL"
    assert how_it_ended(0) == "ended with exit code 0"
    assert how_it_ended(1) == "ended with exit code 1"
    assert how_it_ended(255) == "ended with exit code 255"

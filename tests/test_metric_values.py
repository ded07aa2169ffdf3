"""Histograms that add up, and metrics as values."""

from shiftjax.metric import Histogram, counter, gauge

BOUNDS = (1.0, 2.0)


def histogram_of(*values: float) -> Histogram:
    made = Histogram(BOUNDS)
    for value in values:
        made.observe(value)
    return made


def test_a_bucket_has_the_values_up_to_its_bound():
    found = histogram_of(0.5, 1.0, 1.5, 2.0, 9.0, -3.0)
    assert found.buckets() == [("1.0", 3), ("2.0", 5), ("+Inf", 6)]
    assert found.total == 14.0


def test_a_sum_has_the_values_of_both():
    one, other = histogram_of(0.5, 9.0), histogram_of(1.5)
    assert one + other == histogram_of(0.5, 9.0, 1.5)
    assert one == histogram_of(0.5, 9.0) and other == histogram_of(1.5)


def test_a_copy_stays_what_it_was():
    one = histogram_of(0.5)
    copy = one.copy()
    one.observe(1.5)
    assert copy == histogram_of(0.5) != one


def test_a_number_alone_is_one_series_without_labels():
    assert counter("a", "A.", 2).values == gauge("a", "A.", 2).values == {(): 2}
    assert counter("a", "A.", {("x",): 1}, "of").values == {("x",): 1}

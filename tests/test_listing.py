"""Names of classes in sentences."""

import pytest

from kdcli.listing import class_name, class_names, numbered_classes


@pytest.mark.parametrize("name", ["a", "C++", "B-PER", "O'Brien", "50%", "LABEL_0", "-1", "<x>"])
def test_a_word_needs_no_quotes(name):
    assert class_name(name) == name


@pytest.mark.parametrize("name", ["New York", "Smith & Co.", "a, b", "is it?", "", "x:y", "\n"])
def test_a_name_whose_end_is_unclear_is_quoted(name):
    assert class_name(name) == repr(name)


def test_the_names_after_the_first_are_counted():
    assert class_names("abc", 2) == "a, b and 1 more"
    assert numbered_classes(["not good", "good"]) == "0 'not good', 1 good"

"""Names of classes say what they are, and mean one thing in the repository."""

from tests import measures


def test_a_class_name_means_one_thing():
    # the callbacks of three frameworks, and msprobe's classes of two, each named as its framework's users expect
    assert set(measures.repeated_classes()) == {"GradientMonitor", "PrecisionDebugger", "TrainerMonCallback"}


def test_most_class_names_are_of_several_words():
    one_word, num_classes = measures.one_word_classes()

    assert one_word / num_classes <= 0.15

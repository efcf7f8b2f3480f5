"""Choice of an entity's caption among its names."""

from rigour.names.pick import pick_name
from tarn.query.output.captions import MAX_CHARACTERS, CaptionCandidate, choose_caption


def candidates(*names: str) -> list[CaptionCandidate]:
    return [CaptionCandidate(name.encode()[:20], name, None) for name in names]


def test_caption_is_ftms_choice_from_all_names_within_the_bound():
    names = [f"Jane {number:03d} Doe" for number in range(500)]

    assert choose_caption(candidates(*names), names=True) == pick_name(sorted(names))


def test_caption_of_a_hundred_thousand_names_is_chosen_from_the_shortest():
    # Comparing every pair would take many minutes.
    names = [f"Jane {number:06d} Doe" for number in range(100_000)]

    assert choose_caption(candidates("J Doe", *reversed(names)), names=True) in {
        "J Doe",
        *names[: MAX_CHARACTERS // 15],
    }


def test_caption_is_independent_of_order_beyond_the_bound():
    names = [f"{number} {'x' * 384}" for number in range(100)]

    assert choose_caption(candidates(*names), names=True) == choose_caption(candidates(*reversed(names)), names=True)


def test_caption_of_names_that_are_all_too_long_is_one_of_them():
    names = ["a" * (MAX_CHARACTERS + 1), "b" * (MAX_CHARACTERS + 1)]

    assert choose_caption(candidates(*names), names=True) == names[0]

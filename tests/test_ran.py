import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_verify.errors import InvalidInputError
from fa_verify.ran import WAYS, SourceRan, merged

LINES = st.frozensets(st.integers(1, 300), max_size=20)
WAY = st.tuples(st.integers(1, 300), st.sampled_from(WAYS), st.booleans())


@st.composite
def runs(draw):
    ran = draw(LINES)
    ways = {(line, way): met for line, way, met in draw(st.lists(WAY, max_size=9))}
    ordered = sorted(ways, key=lambda key: (key[0], WAYS.index(key[1])))
    ways = tuple((*key, ways[key]) for key in ordered)
    return SourceRan(ran=ran, idle=draw(LINES) - ran, ways=ways)


@given(runs())
def test_the_text_reads_back(one):
    assert SourceRan.parse(str(one)) == one


@pytest.mark.parametrize("text", ["x", "3-", "!4:T", "7:X", "-3"])
def test_damage_is_misuse(text):
    with pytest.raises(InvalidInputError, match="ran="):
        SourceRan.parse(text)


def test_what_ran_once_is_not_idle():
    whole = merged([SourceRan.parse("1-3 !5 5:tE"), SourceRan.parse("5 !7 5:Te")])
    assert str(whole) == "1-3 5 !7 5:TE"

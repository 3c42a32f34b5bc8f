"""TTIR text as tokens."""

from fa_verify.ttir.syntax.tokens import tokenise


def test_a_path_may_hold_any_word():
    text = '#loc = loc("/a/modules/module.py":3:0)\nmodule {\n} loc(#loc)\n#loc1 = loc(unknown)\n'
    assert [token for _, token in tokenise(text)] == ["module", "{", "}", "#loc", ""]

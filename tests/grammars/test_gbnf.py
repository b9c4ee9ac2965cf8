from __future__ import annotations

import pytest
from grammar_walks import accepts, mask

from octavo.base.errors import ConstraintError

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
# Optional space
ws ::= | " " | "\n" [ \t]{0,20}
"""
ARITHMETIC = r"""root  ::= (expr "=" term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= num | "(" expr ")"
num   ::= [0-9]+
"""


@pytest.mark.parametrize(
    ("grammar", "whole", "other"),
    [
        (JSON, ['{"a": [1, 2.5e3, "x\\n"]}', "{}"], ['{"a"}', "[1]"]),
        (ARITHMETIC, ["1+2=3\n", "(1*2)=2\n3=3\n"], ["1+=2\n", "1=2"]),
        (r'root ::= "\u0041" [\u0042-\u0044] "\U0001F600" "\x41"', ["AB😀A"], ["A", "AE😀A"]),
        (r'root ::= [\[\]] [\-a] [^\]] "/" [/]', ["[ax//", "]-x//"], ["[]x//", "[a]//"]),
        (r"root ::= [\^a] [a^] [a-] [-a]", ["^^--", "aaaa"], ["b"]),
        ('root ::= "a"{2,3} "b"{2} "c"{1,} ("d" | "e")?', ["aabbc", "aaabbccce"], ["abbc"]),
        ('root ::= . "x"', ["éx"], ["x"]),
        ('# c\nroot ::= "a" # b\n  # d\n\nx ::= "b"\n', ["a"], ["b"]),
        ('root ::= a b\r\na ::= "x"\r\nb ::= "y"\r\n', ["xy"], ["x"]),
        ('root ::= "a" |\n  "b"\n', ["a", "b"], ["c"]),
        ('root ::= foo-bar foo_bar\nfoo-bar ::= "a"\nfoo_bar ::= "b"\n', ["ab"], ["a"]),
        ('root ::= start\nstart ::= "a"\n', ["a"], ["b"]),
        ('root ::= FOO\nFOO ::= "a" Bar?\nBar ::= "(" FOO ")"\n', ["a(a)"], ["("]),
        ('root ::= "a\nb"', ["a\nb"], ["a"]),
        ('root ::= "a" | ""', ["", "a"], ["b"]),
        ('root ::= "\'" ["]', ["'\""], ["a"]),
    ],
)
def test_a_grammar_has_the_texts_of_llama_cpp(grammar, whole, other):
    for text in whole:
        assert accepts(mask(grammar=grammar), text), text
    for text in other:
        assert not accepts(mask(grammar=grammar), text), text


@pytest.mark.parametrize(
    ("grammar", "part"),
    [
        ('root ::= "a"\nx ::= missing', "line 2, column 7: there is no rule 'missing'"),
        ('root ::= "a', 'line 1, column 10: " has no end'),
        ("root ::= [a", "line 1, column 10: [ has no end"),
        (r'root ::= "\q"', "line 1, column 10: there is no escape '\\\\q'"),
        (r'root ::= "\ud800"', "is no character"),
        ('foo ::= "a"', "no rule 'root'"),
        ('root ::= ("a"', "Expected ')'"),
        ('root ::= "a"{', "Expected integer"),
        ('root ::= "a" )', "Expected name"),
        ('root ::= a\na ::= a "x"', "no text can satisfy it"),
    ],
)
def test_what_is_no_grammar_is_refused_with_its_place(grammar, part):
    with pytest.raises(ConstraintError, match="structured_outputs.grammar") as error:
        mask(grammar=grammar)
    assert part in str(error.value)

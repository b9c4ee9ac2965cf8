import assert from "node:assert/strict";
import { test } from "node:test";
import { calculate, numberText } from "./static/chat/arithmetic.js";

test("operators bind as in mathematics", () => {
  const values = {
    "1 + 2 * 3": 7, "(1 + 2) * 3": 9, "8 / 4 / 2": 1, "7 - 4 - 2": 1, "2 ^ 3 ^ 2": 512, "2 ** 3": 8,
    "-2 ^ 2": -4, "(-2) ^ 2": 4, "2 ^ -1": 0.5, "--3": 3, "+3": 3, "-7 % 4": -3, "2 * -3": -6,
    "1.5e3 + .5": 1500.5, "6 × 7 ÷ 2 − 1": 20, " 12\n": 12, "1.": 1,
  };
  for (const [text, value] of Object.entries(values)) assert.equal(calculate(text), value, text);
});

test("functions and constants", () => {
  assert.equal(calculate("sqrt(16) + max(1, 5, 3) - min(2, 1)"), 8);
  assert.equal(calculate("ln(e) + round(2.5) + cos(2 * pi)"), 5);
  assert.equal(calculate("e^0 + 2e0"), 3);
});

test("what is no arithmetic is refused with its place", () => {
  const refused = {
    "": /end a number/, "2 +": /end a number/, "2 3": /character 3, before 3, an operator/, "(1": /end \) is missing/,
    "1)": /character 2, before \), an operator/, "2 & 3": /"&" at character 3/, "1 / 0": /divides by zero/, "5 % 0": /divides by zero/,
    "sqrt(-1)": /not a finite/, "10^999": /not a finite/, "sqrt(1, 2)": /takes one/, "log(2)": /"log" at character 1 is not known/,
    "constructor(1)": /not known/, "__proto__": /"_" at character 1/, "toString": /not known/, "alert(1)": /not known/,
    "1,000": /before ,/, "2 😀": /"😀" at character 3/, "max()": /a number/,
  };
  for (const [text, words] of Object.entries(refused)) assert.throws(() => calculate(text), words, text);
});

test("its effort is bounded", () => {
  assert.throws(() => calculate("1+".repeat(600) + "1"), /longer than/);
  for (const text of ["(".repeat(900), "-".repeat(900) + "1", "2^".repeat(400) + "1", "abs(".repeat(200)]) {
    assert.throws(() => calculate(text), /nested more than/);
  }
  assert.equal(calculate("1+".repeat(499) + "1"), 500);
});

test("numbers have no digits that are not sure", () => {
  const texts = { "0.1 + 0.2": "0.3", "1 / 3": "0.333333333333333", "2 ^ 53 - 1": "9007199254740990", "10 ^ 20": "1e+20",
    "12345678901 * 98765432109": "1.21932631133623e+21", "-0": "0", "7 * 6": "42" };
  for (const [text, shown] of Object.entries(texts)) assert.equal(numberText(calculate(text)), shown, text);
});

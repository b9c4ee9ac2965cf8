// Arithmetic from text, by a parser of its own: nothing of the text is ever run as code.

const MOST_CHARACTERS = 1000;
const DEEPEST = 100; // of parentheses, functions, signs and powers within each other

const CONSTANTS = { pi: Math.PI, e: Math.E };
const FUNCTIONS = {
  sqrt: Math.sqrt, abs: Math.abs, floor: Math.floor, ceil: Math.ceil, round: Math.round,
  exp: Math.exp, ln: Math.log, log2: Math.log2, log10: Math.log10,
  sin: Math.sin, cos: Math.cos, tan: Math.tan, // of radians
  min: Math.min, max: Math.max,
};
const SPELLINGS = { "×": "*", "·": "*", "÷": "/", "−": "-", "**": "^" };
const TOKEN = /\s*(?:(?<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?<name>[A-Za-z]\w*)|(?<sign>\*\*|[-+*/%^(),×·÷−]))/y;

/** What `FUNCTIONS` and `CONSTANTS` have, in words for those who write expressions. */
export const KNOWN_NAMES = [...Object.keys(FUNCTIONS), ...Object.keys(CONSTANTS)].join(", ");

/**
 * The value of an expression of numbers, + - * / % ^, parentheses, functions and constants.
 * Throws an Error that says what is wrong and where, characters counted from 1.
 */
export function calculate(text) {
  if (text.length > MOST_CHARACTERS) {
    throw new Error(`The expression is longer than ${MOST_CHARACTERS} characters.`);
  }
  const value = new Parser(tokensOf(text)).whole();
  if (!Number.isFinite(value)) throw new Error("The result is not a finite number.");
  return value;
}

/** A number in at most 15 digits, those that a double surely has. */
export function numberText(value) {
  if (Math.abs(value) > Number.MAX_SAFE_INTEGER) return value.toExponential(14).replace(/\.?0*e/, "e");
  return String(Number(value.toPrecision(15)));
}

function tokensOf(text) {
  const tokens = [];
  const end = text.trimEnd().length;
  TOKEN.lastIndex = 0;
  while (TOKEN.lastIndex < end) {
    const start = TOKEN.lastIndex;
    const found = TOKEN.exec(text);
    if (found === null) {
      const at = start + text.slice(start).search(/\S/);
      throw new Error(`${JSON.stringify(String.fromCodePoint(text.codePointAt(at)))} at character ${at + 1} is not arithmetic.`);
    }
    const { number, name, sign } = found.groups;
    const source = number ?? name ?? sign;
    const at = TOKEN.lastIndex - source.length + 1;
    tokens.push({ number, name, sign: SPELLINGS[sign] ?? sign, source, at });
  }
  return tokens;
}

/** Reads by precedence, from sums down to single numbers; powers bind tighter than a sign. */
class Parser {
  #tokens;
  #next = 0;
  #depth = 0;

  constructor(tokens) {
    this.#tokens = tokens;
  }

  whole() {
    const value = this.#sum();
    if (this.#next < this.#tokens.length) this.#fail("an operator");
    return value;
  }

  #sum() {
    let value = this.#product();
    while (true) {
      if (this.#takes("+")) value += this.#product();
      else if (this.#takes("-")) value -= this.#product();
      else return value;
    }
  }

  #product() {
    let value = this.#signed();
    while (true) {
      if (this.#takes("*")) value *= this.#signed();
      else if (this.#takes("/")) value /= this.#divisor();
      else if (this.#takes("%")) value %= this.#divisor();
      else return value;
    }
  }

  #divisor() {
    const value = this.#signed();
    if (value === 0) throw new Error("It divides by zero.");
    return value;
  }

  #signed() {
    return this.#deeper(() => {
      if (this.#takes("-")) return -this.#signed();
      if (this.#takes("+")) return this.#signed();
      const base = this.#single();
      return this.#takes("^") ? base ** this.#signed() : base;
    });
  }

  #single() {
    const token = this.#tokens[this.#next];
    if (token?.number !== undefined) {
      this.#next += 1;
      return Number(token.number);
    }
    if (token?.name !== undefined) return this.#named(token);
    if (!this.#takes("(")) this.#fail("a number");
    const value = this.#sum();
    this.#need(")");
    return value;
  }

  #named({ name, at }) {
    this.#next += 1;
    if (Object.hasOwn(CONSTANTS, name)) return CONSTANTS[name];
    if (!Object.hasOwn(FUNCTIONS, name)) {
      throw new Error(`"${name}" at character ${at} is not known. There are ${KNOWN_NAMES}.`);
    }
    this.#need("(");
    const values = [this.#sum()];
    while (this.#takes(",")) values.push(this.#sum());
    this.#need(")");
    if (FUNCTIONS[name].length === 1 && values.length > 1) {
      throw new Error(`${name} at character ${at} takes one number.`);
    }
    return FUNCTIONS[name](...values);
  }

  #deeper(read) {
    this.#depth += 1;
    if (this.#depth > DEEPEST) throw new Error(`It is nested more than ${DEEPEST} deep.`);
    const value = read();
    this.#depth -= 1;
    return value;
  }

  #takes(sign) {
    const isIt = this.#tokens[this.#next]?.sign === sign;
    if (isIt) this.#next += 1;
    return isIt;
  }

  #need(sign) {
    if (!this.#takes(sign)) this.#fail(sign);
  }

  #fail(expected) {
    const token = this.#tokens[this.#next];
    const where = token === undefined ? "At the end" : `At character ${token.at}, before ${token.source},`;
    throw new Error(`${where} ${expected} is missing.`);
  }
}

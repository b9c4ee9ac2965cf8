// What is asked cannot be: the message says what, and what to do.

export class CannotBe extends Error {}

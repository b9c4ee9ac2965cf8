"""`SchemaRewriter`, which says what llguidance does not have by keywords that it has.

What it cannot say is refused with its place. All that satisfies the result satisfies the schema;
where it is narrower, docs/structured_output.md says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, permutations
from math import comb, perm
from typing import Any, NamedTuple, TypeGuard, TypeVar

from octavo.base.errors import ConstraintError
from octavo.grammars.json_patterns import is_writable, matches, writable
from octavo.grammars.schema_cases import Case, Condition, cases_of, conditions_in
from octavo.grammars.schema_document import REFERENCES, Schema, SchemaDocument, pointed
from octavo.grammars.schema_formats import schemas_of_format
from octavo.grammars.schema_numbers import (
    has_64_bits,
    has_large_integers,
    is_double,
    numbers_in,
    round_limits,
    settled,
)
from octavo.grammars.schema_opposites import (
    NEVER,
    NUM_FIRST_ITEMS,
    Opposites,
    all_of,
    any_of,
    has,
    lacks,
    of_types,
)
from octavo.grammars.schema_overlaps import TYPES, Overlaps, key_of

# Bounds on what a schema may become: parts in all, and alternatives in place of one keyword.
_MAX_PARTS = 20_000
_MAX_OPTIONS = 64
_MAX_SEQUENCES = 256  # of items that are all different
_MAX_DEPTH = 100
_MAX_NAME_DEPTH = 8
_MAX_ANY_OF = 3  # schemas of which several may hold, where it matters which do
_MAX_WAYS = 256  # to satisfy a schema, which differ in what they look at

_KEPT = ("type", "const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
         "multipleOf", "minLength", "maxLength", "required", "minProperties", "maxProperties",
         "minItems", "maxItems")  # fmt: skip
_COUNTS = ("minLength", "maxLength", "minProperties", "maxProperties", "minItems", "maxItems",
           "minContains", "maxContains")  # fmt: skip
_ABOUT_TEXTS = frozenset(("pattern", "minLength", "maxLength", "format"))
# They hold for the same value as the schema that they are in.
_IN_PLACE = (*REFERENCES, "allOf", "anyOf", "oneOf", "if", "then",
             "else", "not", "dependentSchemas", "dependencies")  # fmt: skip

_PLAIN_NAME = re.compile(r"[\w-]+", re.ASCII)

T = TypeVar("T")


class SchemaRewriter:
    """Rewrites one document.

    Args:
        is_lenient: what cannot be said is left out, and not refused; of ``oneOf``, several may
            hold.
    """

    def __init__(self, document: SchemaDocument, *, is_lenient: bool = False):
        self._document, self._is_lenient = document, is_lenient
        self._overlaps = Overlaps(self._resolve)
        self._opposites = Opposites(document, self.rewritten, self._count)
        self._num_parts = self._depth = 0
        self._definitions: dict[str, Any] = {}
        self._names: dict[str, str] = {}  # of definitions, by their place
        self._waiting: list[tuple[str, Any, str]] = []
        self.places: dict[int, str] = {}  # of the parts of the result, by their id

    def whole(self) -> Schema:
        """Return the schema, with the definitions that it refers to.

        Raises:
            ConstraintError: it has a keyword that is not supported, or cannot be satisfied.
        """
        whole = self.rewritten(self._document.root, "#")
        if whole is NEVER and self._is_lenient:
            whole = {
                key: self._document.root[key] for key in ("type",) if key in self._document.root
            }
        if whole is NEVER:
            raise ConstraintError("no text can satisfy it", None, "unsatisfiable")
        whole = {} if whole is True else whole
        while self._waiting:
            name, part, place = self._waiting.pop()
            self._definitions[name] = self.rewritten(part, place)
        return {**whole, "$defs": self._definitions} if self._definitions else whole

    def rewritten(self, schema: Any, place: str) -> Any:
        """Return a part of the document; False if nothing satisfies it."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise ConstraintError(f"has at {place} no schema: {schema!r:.60}")
        place = self._document.place_of(schema, place)
        self._depth += 1
        try:
            self._count(place)
            made = self._rewritten(schema, place)
        finally:
            self._depth -= 1
        if isinstance(made, dict):
            self.places.setdefault(id(made), place)
        return made

    def _count(self, place: str) -> None:
        """Count a part, and refuse those that are too many."""
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS or self._depth > _MAX_DEPTH:
            message = f"is too complex: {place} comes in too many combinations"
            raise ConstraintError(message, None, "too_complex")

    def _rewritten(self, schema: Schema, place: str) -> Any:
        schema = self._plain(schema, place)
        if (expanded := self._without_unevaluated(schema, place)) is not None:
            return expanded
        cases, schema = self._cases(schema, place)
        made = {key: schema[key] for key in _KEPT if key in schema}
        if (values := settled(made)) is not None:
            made = {"enum": [value for value in values if self._is_kept(value, place)]}
            if not made["enum"]:
                return NEVER
        round_limits(made)
        if has_large_integers(made, self._overlaps.types_of(schema)):
            raise unsupported("minimum", place, "integers have 64 bits at most")
        more: list[Any] = cases
        for add in (self._add_reference, self._add_texts, self._add_names, self._add_objects,
                    self._add_lists, self._add_combinations, self._add_dependent,
                    self._add_conditions, self._add_contains, self._add_unique):  # fmt: skip
            add(schema, place, made, more)
        if any(each is NEVER for each in more):
            return NEVER
        more = [each for each in more if each is not True and each != {}]
        if more and not made:
            return all_of(more)
        if more:
            made["allOf"] = more
        self._check_names(made, place)
        return made

    def _is_kept(self, value: Any, place: str) -> bool:
        """Return whether a value can be written, and stays the same where schemas are joined."""
        numbers = list(numbers_in(value))
        if not all(map(is_double, numbers)):
            self._refuse("enum", place, f"{value!r:.60} has an integer that is no double")
            return False
        return is_writable(value) and (
            all(map(has_64_bits, numbers)) or not self._document.has_combinations
        )

    def _attempt(self, key: str, place: str, make: Callable[[], T]) -> T | None:
        """Return what is made in place of a keyword; None if it is left out."""
        try:
            return make()
        except ConstraintError as error:
            if error.reason != "unsupported":
                raise
            if self._is_lenient:
                return None
            raise unsupported(key, place, str(error)) from None

    def _refuse(self, key: str, place: str, why: str = "") -> None:
        if not self._is_lenient:
            raise unsupported(key, place, why)

    def _opposite(self, key: str, schema: Any, place: str, within: str) -> Any:
        return self._attempt(key, place, lambda: self._opposites.of(schema, within))

    def _resolve(self, schema: Schema) -> Any:
        return self._document.referred(schema, self._document.place_of(schema, "#"))[0]

    # -- what older drafts wrote otherwise ---------------------------------------------------

    def _plain(self, schema: Schema, place: str) -> Schema:
        """Return a schema as the newest draft has it, without keywords that say nothing."""
        if self._document.has_lone_references and "$ref" in schema:
            return {"$ref": schema["$ref"]}
        made = dict(schema)
        for key in _COUNTS:
            if isinstance(made.get(key), float) and made[key].is_integer():
                made[key] = int(made[key])
        for exclusive, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if isinstance(made.get(exclusive), bool) and made.pop(exclusive) and limit in made:
                made[exclusive] = made.pop(limit)
        if isinstance(made.get("items"), list):
            made["prefixItems"] = made.pop("items")
            if "additionalItems" in made:
                made["items"] = made["additionalItems"]
        dependencies = made.pop("dependencies", None)
        for name, needs in (dependencies or {}).items():
            key = "dependentRequired" if isinstance(needs, list) else "dependentSchemas"
            made[key] = {**made.get(key, {}), name: needs}
        for key in ("$dynamicRef", "$recursiveRef"):
            if key in made and not self._document.is_plain_dynamic():
                self._refuse(key, place)
                del made[key]
        if made.get("contains") is None:
            for key in ("contains", "minContains", "maxContains"):
                made.pop(key, None)
        if "x-guidance" in made:
            raise unsupported("x-guidance", place)
        return made

    # -- references --------------------------------------------------------------------------

    def _add_reference(self, schema: Schema, place: str, made: Schema, more: list[Any]) -> None:
        for key in REFERENCES:
            if key not in schema:
                continue
            part, where = self._document.referred(schema, place)
            reference = {"$ref": self._name_of(part, where)}
            if key == "$ref" and not made:
                made.update(reference)
            else:
                more.append(reference)

    def _name_of(self, part: Any, where: str) -> str:
        """Return a reference to a part, which becomes a definition."""
        if where == "#":
            return "#"
        if where not in self._names:
            name = where.removeprefix("#/$defs/")
            # llguidance reads names as parts of a URI.
            name = name if _PLAIN_NAME.fullmatch(name) else f"part.{len(self._names)}"
            self._names[where] = name
            self._waiting.append((name, part, where))
        return f"#/$defs/{self._names[where]}"

    # -- texts -------------------------------------------------------------------------------

    def _add_texts(self, schema: Schema, place: str, made: Schema, more: list[Any]) -> None:
        parts: list[Schema] = []
        if isinstance(schema.get("pattern"), str):
            parts.append({"pattern": schema["pattern"]})
        if "format" in schema:
            try:
                parts += schemas_of_format(schema["format"], place)
            except ConstraintError:
                if not self._is_lenient:
                    raise
        for part in parts:
            if "pattern" in part:
                part = {**part, "pattern": writable(part["pattern"])}
            if part.keys() & made.keys():
                more.append(part)
            else:
                made.update(part)

    # -- objects -----------------------------------------------------------------------------

    def _add_objects(self, schema: Schema, place: str, made: Schema, more: list[Any]) -> None:
        for key in ("properties", "patternProperties"):
            if isinstance(schema.get(key), dict) and key not in made:
                made[key] = {
                    name: self.rewritten(each, f"{place}/{key}/{pointed(name)}")
                    for name, each in schema[key].items()
                }
        if "patternProperties" in made:
            patterns = made["patternProperties"].items()
            made["patternProperties"] = {writable(key): value for key, value in patterns}
        if "additionalProperties" in schema and "additionalProperties" not in made:
            where = f"{place}/additionalProperties"
            made["additionalProperties"] = self.rewritten(schema["additionalProperties"], where)

    def _add_names(self, schema: Schema, place: str, made: Schema, more: list[Any]) -> None:
        """Say of names what they are like by ``patternProperties``."""
        names = schema.get("propertyNames", True)
        if names is True or names == {}:
            return
        if names is False:
            more.append(any_of([{"type": "object", "maxProperties": 0}, _others("object")]))
            return
        listed = self._attempt("propertyNames", place, lambda: self._listed_names(schema, place))
        if listed is not None:
            made.update(listed)

    def _listed_names(self, schema: Schema, place: str) -> Schema:
        """Return the keywords on properties where names are as ``propertyNames`` says."""
        names = schema["propertyNames"]
        properties = schema.get("properties") or {}
        patterns = schema.get("patternProperties") or {}
        rest = schema.get("additionalProperties", True)

        def part(key: str, name: str) -> Any:
            return self.rewritten(schema[key][name], f"{place}/{key}/{pointed(name)}")

        def value_of(name: str) -> Any:
            found = [part("properties", name)] if name in properties else []
            found += [part("patternProperties", p) for p in patterns if matches(p, name)]
            if not found:
                found = [self.rewritten(rest, f"{place}/additionalProperties")]
            return all_of(found)

        words = self._overlaps.values_of(names)
        if words is not None:
            fitting = [w for w in words if isinstance(w, str) and self._fits(names, w)]
            named = {word: value_of(word) for word in fitting}
            return {"properties": named, "additionalProperties": False, "patternProperties": {}}
        named = {}
        for name in properties:
            named[name] = part("properties", name) if self._fits(names, name) else NEVER
        if rest is False and not patterns:
            return {"properties": named, "additionalProperties": False}
        if patterns or (properties and rest is not True and rest != {}):
            raise unsupported("propertyNames", place, "other keywords on names are beside it")
        pattern = writable(self._pattern_of_names(names, place))
        value = self.rewritten(rest, f"{place}/additionalProperties")
        keywords = {"patternProperties": {pattern: value}, "additionalProperties": False}
        return {"properties": named, **keywords} if named else keywords

    def _pattern_of_names(self, names: Schema, place: str) -> str:
        """Return the expression of the names that satisfy a schema."""
        if "$ref" in names and len(names) == 1:
            names = self._resolve(names)
        kinds = self._overlaps.types_of(names)
        keys = names.keys() & _ABOUT_TEXTS
        if "string" not in kinds or names.keys() & {*_IN_PLACE, "enum", "const"}:
            raise unsupported("propertyNames", place)
        if keys == {"pattern"}:
            return str(names["pattern"])
        if keys <= {"minLength", "maxLength"}:
            least = int(names.get("minLength", 0))
            most = int(names["maxLength"]) if "maxLength" in names else ""
            return f"^(?s:.{{{least},{most}}})$"
        raise unsupported("propertyNames", place, "it has several keywords")

    def _fits(self, names: Any, name: str, depth: int = 0) -> bool:
        """Return whether a name satisfies a schema of names."""
        if isinstance(names, bool):
            return names
        if depth > _MAX_NAME_DEPTH:
            raise ConstraintError("a schema of names is too deep", None, "unsupported")
        if "$ref" in names and not self._fits(self._resolve(names), name, depth + 1):
            return False
        for key, value in names.items():
            is_right = {
                "type": lambda v: v == "string" or (isinstance(v, list) and "string" in v),
                "const": lambda v: v == name,
                "enum": lambda v: name in v,
                "pattern": lambda v: matches(v, name),
                "minLength": lambda v: len(name) >= v,
                "maxLength": lambda v: len(name) <= v,
                "not": lambda v: not self._fits(v, name, depth + 1),
                "allOf": lambda v: all(self._fits(each, name, depth + 1) for each in v),
                "anyOf": lambda v: any(self._fits(each, name, depth + 1) for each in v),
                "oneOf": lambda v: sum(self._fits(each, name, depth + 1) for each in v) == 1,
            }.get(key)
            if is_right is None and key in ("format", "if"):
                raise ConstraintError(f"{key!r} of names", None, "unsupported")
            if is_right is not None and not is_right(value):
                return False
        return True

    def _check_names(self, made: Schema, place: str) -> None:
        least = made.get("minProperties")
        if isinstance(least, int | float) and made.get("additionalProperties") is not False:
            # A name that may be any could come twice, and then there are fewer.
            most = len(required_of(made)) + 1
            if least > most:
                if self._is_lenient:
                    del made["minProperties"]
                    return
                raise ConstraintError(
                    f"minProperties above {most} at {place} is not supported where properties may "
                    "have any name",
                    None,
                    "unsupported",
                )

    def _add_dependent(self, schema: Schema, place: str, made: Schema, more: list[Any]) -> None:
        required = required_of(schema)
        needs = schema.get("dependentRequired")
        for name, names in needs.items() if isinstance(needs, dict) else ():
            if name in required:
                made["required"] = list(dict.fromkeys([*required_of(made), *names]))
            elif names:
                both = {**has(name, {}), "required": [name, *names]}
                more.append(any_of([lacks(name), both, _others("object")]))
        for name, each in (schema.get("dependentSchemas") or {}).items():
            then = self.rewritten(each, f"{place}/dependentSchemas/{pointed(name)}")
            if name in required:
                more.append(then if then is not NEVER else _others("object"))
            elif then is not True and then != {}:
                both = all_of([has(name, {}), then])  # it comes first
                more.append(any_of([lacks(name), both, _others("object")]))

    # -- lists -------------------------------------------------------------------------------

    def _add_lists(self, schema: Schema, place: str, made: Schema, more: list[Any]) -> None:
        if isinstance(schema.get("prefixItems"), list):
            parts = enumerate(schema["prefixItems"])
            made["prefixItems"] = [self.rewritten(e, f"{place}/prefixItems/{i}") for i, e in parts]
        if "items" in schema:
            made["items"] = self.rewritten(schema["items"], f"{place}/items")

    def _add_contains(self, schema: Schema, place: str, made: Schema, more: list[Any]) -> None:
        """Say at which indices the items are that a list must contain."""
        if "contains" not in schema:
            return
        least, most = schema.get("minContains", 1), schema.get("maxContains")
        if not least and most is None:
            return
        where = f"{place}/contains"
        inside = self.rewritten(schema["contains"], where)
        outside: Any = True
        if most is not None:
            outside = self._opposite("contains", schema["contains"], place, where)
            if outside is None:
                return
        if least > _MAX_OPTIONS:
            self._refuse("contains", place, f"more than {_MAX_OPTIONS} items")
            return
        size = max(least, NUM_FIRST_ITEMS)
        size = min(schema.get("maxItems", size), size)
        counts = range(least, min(least if most is None else most, size) + 1)
        while size > least and sum(comb(size, n) for n in counts) > _MAX_OPTIONS:
            size -= 1
        options = [
            _items_at(indices, inside, outside)
            for count in counts
            if count <= size
            for indices in combinations(range(size), count)
        ]
        more.append(any_of([*options, _others("array")]))

    def _add_unique(self, schema: Schema, place: str, made: Schema, more: list[Any]) -> None:
        """List what may be, or leave ``uniqueItems`` out where items are different anyway."""
        if schema.get("uniqueItems") is not True or schema.get("maxItems", 2) <= 1:
            return
        first = schema.get("prefixItems") or []
        rest = schema.get("items", True)
        most = schema.get("maxItems")
        if (rest is False or (most is not None and most <= len(first))) and all(
            self._overlaps.exclude_each_other(one, other) for one, other in combinations(first, 2)
        ):
            return
        sequences = self._sequences(first, rest, schema.get("minItems", 0), most)
        if sequences is None:
            self._refuse("uniqueItems", place, "only lists of few values can be kept so")
            return
        more.append(any_of([{"enum": sequences} if sequences else NEVER, _others("array")]))

    def _sequences(
        self, first: list[Any], rest: Any, least: int, most: int | None
    ) -> list[list[Any]] | None:
        """Return lists of different values; None if there are too many.

        Where all orders would be too many, values keep that of the schema; and lists that would be
        too long to list them all are left out.
        """
        choices = [self._overlaps.values_of(each) for each in (*first, rest)]
        if any(each is None for each in choices):
            return None
        known = [_different(each or ()) for each in choices]
        if first:
            return _products(known[:-1], known[-1], least, most)
        values = known[0]
        most = min(len(values), len(values) if most is None else most)
        sizes = range(least, most + 1)
        if sum(perm(len(values), size) for size in sizes) <= _MAX_SEQUENCES:
            return [list(each) for size in sizes for each in permutations(values, size)]
        while len(sizes) > 1 and sum(comb(len(values), n) for n in sizes) > _MAX_SEQUENCES:
            sizes = sizes[:-1]
        if sizes[-1] < 1 or sum(comb(len(values), n) for n in sizes) > _MAX_SEQUENCES:
            return None
        return [list(each) for size in sizes for each in combinations(values, size)]

    # -- several schemas for one value -------------------------------------------------------

    def _add_combinations(self, schema: Schema, place: str, made: Schema, more: list[Any]) -> None:
        for i, each in enumerate(schema.get("allOf") or ()):
            if each is not True:
                more.append(self.rewritten(each, f"{place}/allOf/{i}"))
        if isinstance(schema.get("anyOf"), list):
            parts = enumerate(schema["anyOf"])
            self._add_options(
                made, more, [self.rewritten(e, f"{place}/anyOf/{i}") for i, e in parts]
            )
        if isinstance(schema.get("oneOf"), list):
            options = [option for option, _ in self._exclusive(schema["oneOf"], f"{place}/oneOf")]
            self._add_options(made, more, options)

    def _add_options(self, made: Schema, more: list[Any], options: list[Any]) -> None:
        some = any_of(options)
        if isinstance(some, dict) and some.keys() == {"anyOf"} and "anyOf" not in made:
            made.update(some)
        else:
            more.append(some)

    def _exclusive(self, parts: list[Any], place: str) -> list[tuple[Any, int]]:
        """Return what satisfies just one of several schemas, with the index of that."""
        if self._is_lenient:
            return [(self.rewritten(each, f"{place}/{i}"), i) for i, each in enumerate(parts)]
        if (name := self._overlaps.discriminator(parts)) is not None:
            there = {"required": [name]}  # without it, several might hold
            return [
                (all_of([self.rewritten(each, f"{place}/{i}"), there]), i)
                for i, each in enumerate(parts)
            ]
        overlapping = self._overlaps.overlapping(parts)
        found = []
        for i, one in enumerate(parts):
            conditions = [self.rewritten(one, f"{place}/{i}")]
            for j, other in enumerate(parts):
                if (min(i, j), max(i, j)) in overlapping:
                    owner = place.removesuffix("/oneOf")
                    opposite = self._opposite("oneOf", other, owner, f"{place}/{j}")
                    conditions.append(True if opposite is None else opposite)
            found.append((all_of(conditions), i))
        return found

    def _add_conditions(self, schema: Schema, place: str, made: Schema, more: list[Any]) -> None:
        if "not" in schema:
            opposite = self._opposite("not", schema["not"], place, f"{place}/not")
            if opposite is not None:
                more.append(opposite)
        options = self._branches(schema, place)
        if options is not None:
            more.append(any_of([all_of(parts) for parts, _ in options]))

    def _cases(self, schema: Schema, place: str) -> tuple[list[Any], Schema]:
        """Return what conditions on properties with few values leave, and the schema without
        them."""
        found: list[Any] = []
        for name, conditions in conditions_in(schema).items():
            properties = schema.get("properties") or {}
            values = self._overlaps.values_of(properties.get(name, True))
            is_required = name in required_of(schema)
            cases = cases_of(conditions, values, is_required=is_required)
            if cases is None:
                continue
            options = [self._case(name, each, conditions, place) for each in cases]
            if self._overlaps.types_of(schema) != {"object"}:  # of others, all conditions hold
                every = Case((), (True,) * len(conditions))
                effects = self._effects(every, conditions, place)
                options.append(all_of([_others("object"), *effects]))
            found.append(any_of(options))
            schema = _without_conditions(schema, conditions)
        return found, schema

    def _case(self, name: str, case: Case, conditions: list[Condition], place: str) -> Any:
        there = has(name, {"enum": list(case.values)}) if case.values else lacks(name)
        return all_of([there, *self._effects(case, conditions, place)])

    def _effects(self, case: Case, conditions: list[Condition], place: str) -> list[Any]:
        found = []
        for condition, holds in zip(conditions, case.holds, strict=True):
            key = "then" if holds else "else"
            where = (
                place
                if condition.place_in_all is None
                else f"{place}/allOf/{condition.place_in_all}"
            )
            found.append(self.rewritten(condition.schema.get(key, True), f"{where}/{key}"))
        return found

    def _branches(self, schema: Schema, place: str) -> list[tuple[list[Any], list[str]]] | None:
        """Return what ``if`` leaves: for each branch, what holds, and which keywords say so."""
        if "if" not in schema or not schema.keys() & {"then", "else"}:
            return None
        where = f"{place}/if"
        opposite = self._opposite("if", schema["if"], place, where)
        if opposite is None:
            return None
        then = self.rewritten(schema.get("then", True), f"{place}/then")
        otherwise = self.rewritten(schema.get("else", True), f"{place}/else")
        return [
            ([self.rewritten(schema["if"], where), then], ["if", "then"]),
            ([opposite, otherwise], ["else"]),
        ]

    # -- what no other keyword has looked at -------------------------------------------------

    def _without_unevaluated(self, schema: Schema, place: str) -> Any:
        """Return a schema where each way to satisfy it says which properties and items there are
        left; None if it has no ``unevaluatedProperties`` and ``unevaluatedItems``."""
        names, items = schema.get("unevaluatedProperties"), schema.get("unevaluatedItems")
        if names in (None, True, {}) and items in (None, True, {}):
            return None
        rest = {k: v for k, v in schema.items() if not k.startswith("unevaluated")}
        ways = self._ways(rest, place, frozenset())
        if len(ways) > _MAX_OPTIONS:
            self._refuse("unevaluatedProperties", place, "there are too many ways to satisfy it")
            return self.rewritten(rest, place)
        options = []
        for way in ways:
            parts = list(way.parts)
            if names not in (None, True, {}) and not way.has_all_names:
                where = f"{place}/unevaluatedProperties"
                closed: Schema = {"additionalProperties": self.rewritten(names, where)}
                if way.names:
                    closed["properties"] = {name: {} for name in way.names}
                if way.patterns:
                    closed["patternProperties"] = {writable(each): {} for each in way.patterns}
                parts.append(closed)
            if items not in (None, True, {}) and not way.has_all_items:
                if way.has_contains:
                    self._refuse("unevaluatedItems", place, "beside 'contains'")
                else:
                    where = f"{place}/unevaluatedItems"
                    first: Schema = {"prefixItems": [True] * way.num_items} if way.num_items else {}
                    parts.append({**first, "items": self.rewritten(items, where)})
            options.append(all_of(parts))
        return any_of(options)

    def _ways(self, schema: Any, place: str, seen: frozenset[int]) -> list[_Way]:
        """Return the ways to satisfy a schema that differ in what has been looked at."""
        if isinstance(schema, bool):
            return [_Way()] if schema else []
        schema = self._plain(schema, place)
        if schema.keys() & {"unevaluatedProperties", "unevaluatedItems"}:
            way = _Way(parts=(self.rewritten(schema, place),))
            way = way.with_all(schema)
            inner = self._ways(
                {k: v for k, v in schema.items() if not k.startswith("unevaluated")}, place, seen
            )
            return [way.joined(each.without_parts()) for each in inner]
        plain = {key: value for key, value in schema.items() if key not in _IN_PLACE}
        if "not" in schema:
            plain["not"] = schema["not"]
        ways = [_Way.of(plain, self.rewritten(plain, place))]
        for key in REFERENCES:
            if key in schema:
                part, where = self._document.referred(schema, place)
                if id(part) in seen:
                    raise unsupported(
                        "unevaluatedProperties", place, "a reference leads back to it"
                    )
                ways = _joined(ways, self._ways(part, where, seen | {id(part)}))
        for i, each in enumerate(schema.get("allOf") or ()):
            ways = _joined(ways, self._ways(each, f"{place}/allOf/{i}", seen))
        if isinstance(schema.get("anyOf"), list):
            parts = [
                self._ways(e, f"{place}/anyOf/{i}", seen) for i, e in enumerate(schema["anyOf"])
            ]
            sizes = range(1, len(parts) + 1 if len(parts) <= _MAX_ANY_OF else 2)
            some = []
            for size in sizes:
                for chosen in combinations(parts, size):
                    together = [_Way()]
                    for each in chosen:
                        together = _joined(together, each)
                    some += together
            ways = _joined(ways, some)
        if isinstance(schema.get("oneOf"), list):
            some = []
            for made, i in self._exclusive(schema["oneOf"], f"{place}/oneOf"):
                inner = self._ways(schema["oneOf"][i], f"{place}/oneOf/{i}", seen)
                some += [_Way(parts=(made,)).joined(each) for each in inner]
            ways = _joined(ways, some)
        if "if" in schema:
            opposite = self._opposite("if", schema["if"], place, f"{place}/if")
            then = self._ways(schema["if"], f"{place}/if", seen)
            if "then" in schema:
                then = _joined(then, self._ways(schema["then"], f"{place}/then", seen))
            otherwise = [_Way(parts=(True if opposite is None else opposite,))]
            if "else" in schema:
                otherwise = _joined(otherwise, self._ways(schema["else"], f"{place}/else", seen))
            ways = _joined(ways, [*then, *otherwise])
        for name, each in (schema.get("dependentSchemas") or {}).items():
            where = f"{place}/dependentSchemas/{pointed(name)}"
            has_it = _Way(parts=(has(name, {}),))
            then = [has_it.joined(way) for way in self._ways(each, where, seen)]
            without = _Way(parts=(any_of([lacks(name), _others("object")]),))
            ways = _joined(ways, [without, *then])
        return ways


class _Way(NamedTuple):
    """A way to satisfy a schema: what holds there, and which properties and items it looks at."""

    parts: tuple[Any, ...] = ()
    names: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    has_all_names: bool = False
    num_items: int = 0
    has_all_items: bool = False
    has_contains: bool = False

    @classmethod
    def of(cls, schema: Schema, made: Any) -> _Way:
        """Return the way of a schema without combinations, as which ``made`` is."""
        return cls(
            (made,),
            frozenset(schema.get("properties") or ()),
            frozenset(schema.get("patternProperties") or ()),
            "additionalProperties" in schema,
            len(schema.get("prefixItems") or ()),
            "items" in schema,
            "contains" in schema,
        )

    def with_all(self, schema: Schema) -> _Way:
        return self._replace(
            has_all_names=self.has_all_names or "unevaluatedProperties" in schema,
            has_all_items=self.has_all_items or "unevaluatedItems" in schema,
        )

    def without_parts(self) -> _Way:
        return self._replace(parts=())

    def joined(self, other: _Way) -> _Way:
        return _Way(
            (*self.parts, *other.parts),
            self.names | other.names,
            self.patterns | other.patterns,
            self.has_all_names or other.has_all_names,
            max(self.num_items, other.num_items),
            self.has_all_items or other.has_all_items,
            self.has_contains or other.has_contains,
        )


def _joined(some: list[_Way], others: list[_Way]) -> list[_Way]:
    if len(some) * len(others) > _MAX_WAYS:
        message = "is too complex: it can be satisfied in too many ways"
        raise ConstraintError(message, None, "too_complex")
    return [one.joined(other) for one in some for other in others]


def _items_at(indices: Sequence[int], inside: Any, outside: Any) -> Any:
    """Return a schema of lists that have at some indices what is of one schema, and else of
    another."""
    size = indices[-1] + 1 if indices else 0
    parts = [inside if i in indices else outside for i in range(size)]
    if any(each is NEVER for each in parts):
        return NEVER
    made: Schema = {"type": "array", "minItems": size}
    if parts:
        made["prefixItems"] = parts
    return made if outside is True else {**made, "items": outside}


def _without_conditions(schema: Schema, conditions: list[Condition]) -> Schema:
    made = dict(schema)
    for condition in conditions:
        if condition.place_in_all is None:
            made = {key: value for key, value in made.items() if key not in ("if", "then", "else")}
        else:
            parts = list(made["allOf"])
            parts[condition.place_in_all] = True  # the indices of the others stay
            made["allOf"] = parts
    return made


def _different(values: Iterable[Any]) -> list[Any]:
    return list({key_of(value): value for value in values}.values())


def _products(
    first: list[list[Any]], rest: list[Any], least: int, most: int | None
) -> list[list[Any]] | None:
    """Return lists of different values, by what each item may be; None if there are too many."""
    found: list[list[Any]] = []
    longest = len(first) + len(rest)
    most = longest if most is None else min(most, longest)
    level: list[list[Any]] = [[]]
    for size in range(most + 1):
        found += level if size >= least else []
        choices = first[size] if size < len(first) else rest
        level = [
            [*each, value]
            for each in level
            for value in choices
            if key_of(value) not in map(key_of, each)
        ]
        if len(found) + len(level) > _MAX_SEQUENCES:
            return None
    return found


def _others(kind: str) -> Any:
    """Return a schema of all values but those of a type."""
    return of_types(each for each in TYPES if each not in (kind, "integer"))


def _are_texts(values: Any) -> TypeGuard[list[str]]:
    return isinstance(values, list) and all(isinstance(each, str) for each in values)


def required_of(part: Schema) -> list[str]:
    """Return the names of the properties that a schema requires, each once."""
    required = part.get("required")
    return list(dict.fromkeys(required)) if _are_texts(required) else []


def unsupported(key: str, place: str, why: str = "") -> ConstraintError:
    why = f": {why}" if why else ""
    return ConstraintError(f"{key!r} at {place} is not supported{why}", None, "unsupported")
